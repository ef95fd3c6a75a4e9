"""Files on a command line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

__all__ = ["positive", "unwritable"]


def unwritable(path: str) -> str | None:
    """Why no file can be written there, if none can: to be asked before the work of which it is to tell."""
    place = Path(path)
    if place.is_dir():
        return "it is a directory"
    if not place.parent.is_dir():
        return f"there is no directory {str(place.parent)!r}"
    return None if os.access(place if place.exists() else place.parent, os.W_OK) else "it is not yours to write"


# Numbers on a command line.


def positive(text: str) -> int:
    """A whole number from 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return number
