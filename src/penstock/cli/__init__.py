"""The ``penstock`` command. Each subcommand is a file in ``penstock.cli``, imported when it is used.

Such a file has ``configure(parser)``, which adds its arguments, and ``run(args)``, which returns the exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Container, Sequence
from importlib import import_module
from importlib.util import find_spec

from penstock.errors import PenstockError
from penstock.version import __version__

__all__ = ["main", "parser"]

_COMMANDS = {
    "schedule": "draw, write or verify a pipeline schedule",
    "demo": "train a small network as a pipeline, beside the plain model",
    "plan": "cut a model into stages for the devices at hand",
    "run": "train a script as a pipeline",
    "report": "make a page of what a run measured",
    "doctor": "check that this machine is ready",
    "completion": "print a script that completes command lines in your shell",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (by default the process's own). Returns the exit code.

    0: done. 1: it failed, and why is on stderr. 2: the command line is wrong. ``run`` has that of the script.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        wanted = next((word for word in argv if not word.startswith("-")), None)
        args = parser(() if wanted is None else (wanted,)).parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read our output has seen enough. What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as exit:  # argparse has said what it had to say
        return exit.code if isinstance(exit.code, int) else 1


def parser(wanted: Container[str] | None = None) -> argparse.ArgumentParser:
    """All commands by name, with the arguments of those that are ``wanted``, by default all."""
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Train PyTorch models as pipelines of stages.",
        epilog="example: penstock schedule zbv -p 4 -m 8",
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in _COMMANDS.items():
        if find_spec(f"penstock.cli.{name}") is None:
            continue
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if wanted is None or name in wanted:
            module = import_module(f"penstock.cli.{name}")
            module.configure(command)
            command.set_defaults(run=module.run)
    return parser
