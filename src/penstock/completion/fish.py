"""Completion for fish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.completion.words import Command, Option, Value

__all__ = ["fish"]


def fish(program: Command, commands: Sequence[Command]) -> str:
    """The script: a line for each thing that can be said, and when."""
    first = "__fish_use_subcommand"
    lines = ["# Completion of penstock for fish, made by 'penstock completion fish'.", "complete -c penstock -f"]
    lines += [f"complete -c penstock -n {first} {_option(option)}" for option in program.options]
    lines += [f"complete -c penstock -n {first} -a {c.name} -d {_quoted(c.help)}" for c in commands]
    for command in commands:
        when = f"complete -c penstock -n '__fish_seen_subcommand_from {command.name}'"
        lines += [f"{when} {_option(option)}" for option in command.options]
        lines += [f"{when} {words}" for words in _places(command)]
    return "\n".join(lines) + "\n"


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
