"""Fill, then drain, for stages that are placed already: what a plain call of a pipeline runs."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.action import Action
from penstock.schedule.schedule import Schedule

__all__ = ["fill_drain"]


def fill_drain(placement: Sequence[int], m: int, *, backward: bool = True) -> Schedule:
    """All forwards, then all backwards if ``backward``; every rank goes through its stages one after the other.

    placement (0, 1, 1, 0), m=2::

        rank 0: 0F0 0F1 .   .   .   3F0 3F1 | 3B0 3B1 ...
        rank 1: .   1F0 1F1 2F0 2F1 .   .   | ...
    """

    def order(rank: int) -> list[Action]:
        stages = [s for s, r in enumerate(placement) if r == rank]
        forwards = [Action(s, "F", k) for s in stages for k in range(m)]
        return forwards + [Action(s, "B", k) for s in reversed(stages) if backward for k in range(m)]

    return Schedule.of("fill_drain", placement, map(order, range(max(placement) + 1)), m)
