"""Sizes, times and small tables for people, as plain text."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

__all__ = ["exact_size", "size_in_words", "table", "time_in_words"]

_UNITS = ((1024**4, "TiB"), (1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))


def size_in_words(size: float) -> str:
    """A number of bytes, rounded."""
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{math.ceil(size)} bytes"


def exact_size(size: float) -> str:
    """A number of bytes, with the bytes themselves where they were rounded."""
    words = size_in_words(size)
    return words if size < 1024 else f"{words} ({math.ceil(size):,} bytes)"


def time_in_words(seconds: float) -> str:
    """A time, rounded to three digits."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds:.3g} s"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The lines of a table, the columns ``right`` with their ends below each other."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return [line(heads), "  ".join("─" * width for width in widths), *map(line, rows)]
