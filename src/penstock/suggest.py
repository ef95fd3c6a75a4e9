"""Suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str = "", cutoff: float = 0.6) -> str:
    """``": did you mean 'conv1'?"``, or ``otherwise`` if no known name has a similarity of ``cutoff`` (0 to 1)."""
    close = get_close_matches(name, list(known), 3, cutoff)
    return f": did you mean {' or '.join(map(repr, close))}?" if close else otherwise
