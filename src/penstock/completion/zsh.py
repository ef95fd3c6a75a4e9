"""Completion for zsh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.completion.words import Command, Option, Value

__all__ = ["zsh"]

_SCRIPT = """\
#compdef penstock
# Completion of penstock for zsh, made by 'penstock completion zsh'.
_penstock() {{
    local curcontext="$curcontext" state line
    local -a commands
    local -A opt_args
    commands=(
{commands}
    )
    _arguments -C \\
{options} \\
        '1:command:->command' \\
        '*::argument:->argument'
    case $state in
        command) _describe command commands ;;
        argument)
            case $words[1] in
{cases}
            esac
            ;;
    esac
}}

if [ "$funcstack[1]" = "_penstock" ]; then
    _penstock "$@"
else
    compdef _penstock penstock
fi
"""


def zsh(program: Command, commands: Sequence[Command]) -> str:
    """The script. It works from a file named ``_penstock`` in ``$fpath``, and when it is sourced."""
    cases: list[str] = []
    for command in commands:
        specs = [spec for option in command.options for spec in _option(option)]
        specs += [f"'{number}{_place(value)}'" for number, value in enumerate(command.values, 1)]
        if command.rest:
            specs.append("'*:argument:_files'")
        start = "_arguments -A '-*'" if command.rest else "_arguments"  # after its first word, options are not ours
        lines = " \\\n".join([f"                    {start}", *(f"                        {spec}" for spec in specs)])
        cases += [f"                {command.name})", lines, "                    ;;"]
    described = [f"{command.name}:{_escaped(command.help, ':')}" for command in commands]
    return _SCRIPT.format(
        commands="\n".join(f"        '{text}'" for text in described),
        options=" \\\n".join(f"        {spec}" for option in program.options for spec in _option(option)),
        cases="\n".join(cases),
    )


def _option(option: Option) -> Iterator[str]:
    """One spec for each name; each rules out the others."""
    others = f"({' '.join(option.flags)})" if len(option.flags) > 1 else ""
    takes = "" if option.value is None else _place(option.value)
    for flag in option.flags:
        equals = "=" if takes and flag.startswith("--") else ""
        yield f"'{others}{flag}{equals}[{_escaped(option.help)}]{takes}'"


def _place(value: Value) -> str:
    """What goes there, and how it is completed: a space stands for not at all."""
    actions = {"files": "_files", "directories": "_path_files -/", "": " "}  # _files -/ has files, too, where none is
    action = f"({' '.join(value.words)})" if value.words else actions[value.paths]
    return f"{':' * (1 + value.optional)}{_escaped(value.name)}:{action}"


def _escaped(text: str, special: str = ":[]") -> str:
    """For use between single quotes, where zsh's functions take some signs for their own."""
    for sign in f"\\{special}":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("'", "'\\''")
