"""Completion for bash, also the old one of macOS."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.completion.words import Command, Value

__all__ = ["bash"]

_SCRIPT = """\
# Completion of penstock for bash, made by 'penstock completion bash'.
_penstock() {{
    local IFS=$' \\t\\n' cur prev command='' at=1 place=0 word
    COMPREPLY=()
    cur=${{COMP_WORDS[COMP_CWORD]}}
    prev=${{COMP_WORDS[COMP_CWORD-1]}}
    if [[ $cur == '=' ]]; then  # --option=value is three words
        cur=''
    elif [[ $prev == '=' ]]; then
        prev=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    while (( at < COMP_CWORD )); do
        word=${{COMP_WORDS[at]}}
        if [[ -z $command ]]; then
            [[ $word == -* ]] || command=$word
        elif _penstock_takes "$command" "$word"; then
            [[ ${{COMP_WORDS[at+1]}} != '=' ]] || (( at++ ))
            [[ ${{COMP_WORDS[at+1]}} == -* ]] || (( at++ ))
        elif [[ $word != -* ]]; then
            (( place++ ))
        fi
        (( at++ ))
    done
    case $command in
{cases}
    esac
}}

_penstock_words() {{
    COMPREPLY=($(compgen -W "$1" -- "$cur"))
}}

_penstock_paths() {{
    local IFS=$'\\n'
    compopt -o filenames 2>/dev/null
    COMPREPLY=($(compgen "$1" -- "$cur"))
}}

# Whether an option of a command takes a value.
_penstock_takes() {{
    case "$1 $2" in
{takes}
    esac
    return 1
}}

complete -F _penstock penstock
"""


def bash(program: Command, commands: Sequence[Command]) -> str:
    """The script."""
    names = " ".join([*(command.name for command in commands), *program.flags])
    cases = [f"        '') _penstock_words '{names}' ;;"]
    for command in commands:
        cases += [f"        {command.name})", *_case(command), "            ;;"]
    takes = [
        f"        {_patterns(command.name + ' ' + flag for flag in option.flags)}) return 0 ;;"
        for command in commands
        for option in command.options
        if option.value is not None
    ]
    return _SCRIPT.format(cases="\n".join(cases), takes="\n".join(takes))


def _case(command: Command) -> Iterator[str]:
    """An option, or what follows one, or what comes at this place."""
    if command.rest:
        yield f"            (( place < {len(command.values)} )) || {{ _penstock_paths -f; return; }}"
    yield f"            [[ $cur != -* ]] || {{ _penstock_words '{' '.join(command.flags)}'; return; }}"
    yield "            case $prev in"
    for option in command.options:
        if option.value is not None:
            yield f"                {_patterns(option.flags)}) {_offer(option.value)}; return ;;"
    yield "            esac"
    yield "            case $place in"
    for place, value in enumerate(command.values):
        yield f"                {place}) {_offer(value)} ;;"
    yield f"                *) _penstock_words '{' '.join(command.flags)}' ;;"
    yield "            esac"


def _offer(value: Value) -> str:
    if value.words:
        return f"_penstock_words '{' '.join(value.words)}'"
    return {"files": "_penstock_paths -f", "directories": "_penstock_paths -d", "": ":"}[value.paths]


def _patterns(words: Iterable[str]) -> str:
    return "|".join(f"'{word}'" for word in words)
