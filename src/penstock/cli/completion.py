"""``penstock completion``: the TAB key completes commands, options, schedules and files."""

from __future__ import annotations

import argparse
import sys

from penstock.cli import parser
from penstock.completion.bash import bash
from penstock.completion.fish import fish
from penstock.completion.words import words_of
from penstock.completion.zsh import zsh

__all__ = ["configure", "run"]

_SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}

_DETAILS = """\
The script is made from the commands that are installed: write it again after an update.

examples:
  penstock completion bash > ~/.local/share/bash-completion/completions/penstock
  penstock completion zsh > ~/.zfunc/_penstock     with 'fpath+=~/.zfunc' before 'compinit' in ~/.zshrc
  penstock completion fish > ~/.config/fish/completions/penstock.fish
  source <(penstock completion bash)               in this shell only
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.epilog = _DETAILS
    parser.add_argument("shell", choices=tuple(_SHELLS), help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    """Do what ``args`` say."""
    sys.stdout.write(_SHELLS[args.shell](*words_of(parser())))
    return 0
