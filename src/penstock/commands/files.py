"""Files on a command line."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["unwritable"]


def unwritable(path: str) -> str | None:
    """Why no file can be written there, if none can: to be asked before the work of which it is to tell."""
    place = Path(path)
    if place.is_dir():
        return "it is a directory"
    if not place.parent.is_dir():
        return f"there is no directory {str(place.parent)!r}"
    return None if os.access(place if place.exists() else place.parent, os.W_OK) else "it is not yours to write"
