"""Completion for fish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.completion.words import Command, Option, Value

__all__ = ["fish"]


_SCRIPT = """\
# Completion of penstock for fish, made by 'penstock completion fish'.
function __penstock_command
    set -l words (commandline -opc)
    test "$words[2]" = "$argv[1]"
end
{functions}
complete -c penstock -f
{lines}
"""

# After the first word that is not an option, or belongs to one, options are not ours. One whose value is still to come
# makes argparse fail.
_OWN = """\
function __penstock_{name}_itself
    __penstock_command {name}; or return
    set -l words (commandline -opc)
    if argparse --stop-nonopt {options} -- $words[3..] 2>/dev/null
        not set -q argv[1]
    end
end
"""


def fish(program: Command, commands: Sequence[Command]) -> str:
    """The script: a line for each thing that can be said, and when."""
    lines = [f"complete -c penstock -n '__penstock_command \\'\\'' {_option(option)}" for option in program.options]
    lines += [f"complete -c penstock -n '__penstock_command \\'\\'' -a {c.name} -d {_quoted(c.help)}" for c in commands]
    for command in commands:
        here = f"complete -c penstock -n '__penstock_command {command.name}'"
        itself = f"complete -c penstock -n __penstock_{command.name}_itself" if command.rest else here
        lines += [f"{itself} {_option(option)}" for option in command.options]
        lines += [f"{here} {words}" for words in _places(command)]
    functions = "".join(_OWN.format(name=c.name, options=_parsed(c)) for c in commands if c.rest)
    return _SCRIPT.format(functions=functions, lines="\n".join(lines))


def _parsed(command: Command) -> str:
    """The options of a command as argparse has them."""
    found = []
    for option in command.options:
        taken = "" if option.value is None else "=?" if option.value.optional else "="
        found.append(f"{'/'.join(sorted((flag.lstrip('-') for flag in option.flags), key=len))}{taken}")
    return " ".join(map(_quoted, found))


def _option(option: Option) -> str:
    names = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags]
    taken = [] if option.value is None else ["-x" if option.value.paths != "files" else "-r -F", *_words(option.value)]
    return " ".join([*names, *taken, f"-d {_quoted(option.help)}"])


def _places(command: Command) -> Iterator[str]:
    """Fish does not count places: what may stand at one is offered at all."""
    for value in command.values:
        yield from _words(value)
    if command.rest or any(value.paths for value in command.values):
        yield "-F"


def _words(value: Value) -> Iterator[str]:
    if value.words:
        yield f"-a {_quoted(' '.join(value.words))}"
    elif value.paths == "directories":
        yield "-a '(__fish_complete_directories)'"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
