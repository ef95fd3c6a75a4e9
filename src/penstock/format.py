"""Format sizes, times and tables as plain text, and parse sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Any

from penstock.errors import PlanError

_UNITS = ((1024**4, "TiB"), (1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))


def format_size(size: float) -> str:
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{math.ceil(size)} bytes"


def format_size_exact(size: float) -> str:
    """A number of bytes, followed by the exact number if it is rounded."""
    words = format_size(size)
    return words if size < 1024 else f"{words} ({math.ceil(size):,} bytes)"


def count_noun(number: int, noun: str) -> str:
    """``1 stage``, ``2 stages``."""
    plural = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def format_time(seconds: float) -> str:
    """A time, rounded to three digits."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds:.3g} s"


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The lines of a table; the columns ``right`` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return [line(heads), "  ".join("─" * width for width in widths), *map(line, rows)]


_UNIT_BYTES = {"": 1} | {
    f"{letter}{i}b": (1024 if i else 1000) ** n for n, letter in enumerate("kmgt", 1) for i in ("", "i")
}
_UNIT_BYTES["b"] = 1


def parse_bytes(size: Any, name: str = "memory") -> int:
    """Parse a number of bytes, given as a number or a text such as "16GiB" or "500 MB"."""
    number, unit = size, ""
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _UNIT_BYTES:
            raise PlanError(f'{name}={size!r} is not a size: write a number of bytes, "16GiB" or "500MB"')
        number, unit = float(match[1]), match[2].lower()
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
        raise PlanError(f'{name}={size!r} is not a size: write a number of bytes, "16GiB" or "500MB"')
    return int(number * _UNIT_BYTES[unit])
