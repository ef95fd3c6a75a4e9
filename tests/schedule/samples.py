"""Schedules to test with: all that can be built, and any that one can draw."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from penstock.schedule import SCHEDULES, Action, Schedule, build

__all__ = ["SMALL", "VARIANTS", "label", "placed", "schedules", "staircase"]

VARIANTS: list[tuple[str, int | None]] = [
    (name, v) for name, kind in SCHEDULES.items() for v in ((1, 2, 3) if kind.takes_v else (None,))
]
"""(name, v) of every schedule."""

SMALL = [(1, 1), (1, 3), (2, 1), (2, 2), (2, 5), (3, 4), (4, 3)]
"""(p, m) small enough to try everything."""


def schedules(sizes: Iterable[tuple[int, int]] = SMALL) -> Iterator[Schedule]:
    """Every schedule for each (p, m)."""
    for p, m in sizes:
        for name, v in VARIANTS:
            yield _build(name, p, m, v)


_build = cache(build)


def label(value: object) -> str:
    return f"v{value}" if isinstance(value, int) else str(value or "")


def staircase(*rows: str) -> Schedule:
    """One stage per rank, written as ``F0 F1 .  B0 B1``; the dots are only for the eye."""
    rows = tuple(" ".join(f"{r}{cell}" for cell in row.split() if cell != ".") for r, row in enumerate(rows))
    return placed(range(len(rows)), *rows)


def placed(placement: Iterable[int], *rows: str) -> Schedule:
    """Any stages on any ranks, written as ``0F0 3F0 3B0 0B0``."""
    orders = [[Action.parse(cell) for cell in row.split()] for row in rows]
    num_microbatches = 1 + max(action.microbatch for order in orders for action in order)
    return Schedule.of("drawn", tuple(placement), orders, num_microbatches)
