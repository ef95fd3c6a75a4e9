"""What can be said on a command line, taken from its parsers. Plain data."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

from penstock.schedule.registry import SCHEDULES

__all__ = ["Command", "Option", "Value", "words_of"]

Paths = Literal["", "files", "directories"]

_FILES = ("FILE", "TRACE", "train.py")
_DIRECTORIES = ("DIR",)


@dataclass(frozen=True)
class Value:
    """What follows an option, or stands by itself: one of ``words``, a path, or anything. It may be left out."""

    name: str
    words: tuple[str, ...] = ()
    paths: Paths = ""
    optional: bool = False


@dataclass(frozen=True)
class Option:
    """The names of an option, what it is for, and its value if it takes one."""

    flags: tuple[str, ...]
    help: str
    value: Value | None = None


@dataclass(frozen=True)
class Command:
    """``rest``: after the values come words that are not ours, among them names of files."""

    name: str
    help: str
    options: tuple[Option, ...]
    values: tuple[Value, ...] = ()
    rest: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(flag for option in self.options for flag in option.flags)


def words_of(parser: argparse.ArgumentParser) -> tuple[Command, tuple[Command, ...]]:
    """The program without a command, and each of its commands."""
    subparsers = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: _help(action) for action in subparsers._choices_actions}
    commands = tuple(_command(name, helps.get(name, ""), its) for name, its in subparsers.choices.items())
    return _command(parser.prog, parser.description or "", parser), commands


def _command(name: str, summary: str, parser: argparse.ArgumentParser) -> Command:
    options, values, rest = [], [], False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
            continue
        if action.nargs == argparse.REMAINDER:
            rest = True
        elif action.option_strings:
            taken = None if action.nargs == 0 else _value(action)
            options.append(Option(tuple(action.option_strings), _help(action), taken))
        else:
            values.append(_value(action))
    return Command(name, summary, tuple(options), tuple(values), rest)


def _value(action: argparse.Action) -> Value:
    """What goes there: by the choices that it has, or by the name that the help gives it."""
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    words: tuple[str, ...] = ()
    if action.choices is not None:
        words = tuple(map(str, action.choices))
    elif name == "SCHEDULE" or "--schedule" in action.option_strings:
        words = (*SCHEDULES, "auto")
    paths: Paths = "files" if name in _FILES else "directories" if name in _DIRECTORIES else ""
    return Value(name, words, paths, action.nargs == "?")


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%")
