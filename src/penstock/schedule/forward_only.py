"""Forward only: evaluation and inference."""

from __future__ import annotations

from penstock.schedule.action import Action
from penstock.schedule.interleaved import deal
from penstock.schedule.placement import loop
from penstock.schedule.schedule import Schedule

__all__ = ["forward_only"]


def forward_only(p: int, m: int, v: int = 1) -> Schedule:
    """Forwards, and no backward. With v > 1 stages per rank, micro-batches go round in groups of p or a few more.

    p=3, m=4::

        rank 0: F0 F1 F2 F3
        rank 1: .  F0 F1 F2 F3
        rank 2: .  .  F0 F1 F2 F3
    """
    groups = deal(m, max(1, m // p))

    def order(r: int) -> list[Action]:
        return [Action(s, "F", k) for group in groups for s in range(r, p * v, p) for k in group]

    return Schedule.of("forward_only", loop(p, v), map(order, range(p)), m)
