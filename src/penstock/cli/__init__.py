"""The ``penstock`` command, on Typer.

Each subcommand is a module of this package with an ``app``. The module is imported when the command is run or
completed, so that ``penstock --help`` does not import torch.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

try:
    from typer import TyperException
except ImportError:  # before typer had its own copy of click
    from click import ClickException as TyperException  # type: ignore[assignment]

from penstock.errors import PenstockError
from penstock.version import __version__

_COMMANDS = {
    "schedule": "Draw, write or verify a pipeline schedule.",
    "demo": "Train a small network as a pipeline, and compare it with the plain model.",
    "plan": "Pick stages, micro-batches and a schedule for a model.",
    "run": "Run a training script in the processes of a pipeline.",
    "report": "Write an HTML report of a saved trace.",
    "doctor": "Check this machine for problems.",
}


class UsageError(TyperException):
    """A command line with invalid values or combinations of options: exit code 2."""

    exit_code = 2


class _LazyGroup(TyperGroup):
    """Imports a subcommand before its arguments are parsed. ``--help`` needs only its name and its summary."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            command = get_command(import_module(f"penstock.cli.{name}").app)
            command.name = name
        return name, command, rest


app = typer.Typer(cls=_LazyGroup, epilog="Example: penstock schedule zbv -p 4 -m 8")
for _name, _summary in _COMMANDS.items():
    app.command(_name, help=_summary)(lambda: None)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def penstock(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, help="Show the version.")] = False,
) -> None:
    """Train PyTorch models as pipelines of stages."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (by default that of the process) and return the exit code.

    0: success. 1: an error, with a message on stderr. 2: an invalid command line. 130: interrupted. The exit code of
    ``run`` is that of the script.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for drawings on a terminal without Unicode
    try:
        code = get_command(app).main(argv, "penstock", standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except TyperException as error:
        print(f"penstock: {error.format_message()}", file=sys.stderr)
        return error.exit_code
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of the output has closed the pipe. Without this, flushing the buffer at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as exit:  # from shell completion, or from a script that a command ran
        return exit.code if isinstance(exit.code, int) else 1


@contextmanager
def usage_errors(problem: str, *kinds: type[Exception]) -> Iterator[None]:
    """Convert errors of these kinds to a ``UsageError`` with the problem and the reason."""
    try:
        yield
    except kinds as error:
        raise UsageError(f"{problem}: {getattr(error, 'strerror', None) or error}") from None


def option(help: str, *names: str, **settings: Any) -> Any:
    """``typer.Option`` with the help text as the first argument."""
    return typer.Option(*names, help=help, **settings)


def unwritable(path: str | Path) -> str | None:
    """The reason why ``path`` cannot be written, or None. Commands check it before the work for its contents."""
    place = Path(path)
    if place.is_dir():
        return "it is a directory"
    if not place.parent.is_dir():
        return f"there is no directory {str(place.parent)!r}"
    return None if os.access(place if place.exists() else place.parent, os.W_OK) else "permission denied"


def complete_schedule(incomplete: str) -> list[str]:
    """The names of schedules, for shell completion."""
    from penstock.schedule.registry import SCHEDULES

    return [name for name in (*SCHEDULES, "auto") if name.startswith(incomplete)]
