"""Sharded: one micro-batch at a time. No overlap: to fit a model on several devices, and to debug."""

from __future__ import annotations

from penstock.schedule.action import Action
from penstock.schedule.placement import loop
from penstock.schedule.schedule import Schedule

__all__ = ["sharded"]


def sharded(p: int, m: int, v: int = 1) -> Schedule:
    """A micro-batch goes through all stages and back before the next one starts.

    p=2, m=2; a column is the time of one forward, a backward ``B`` takes two::

        rank 0: F0 .  .  .  B0 -- F1 .  .  .  B1 --
        rank 1: .  F0 B0 -- .  .  .  F1 B1 --
    """

    def order(r: int) -> list[Action]:
        there, back = range(r, p * v, p), reversed(range(r, p * v, p))
        visit = [(s, "F") for s in there] + [(s, "B") for s in back]
        return [Action(s, kind, k) for k in range(m) for s, kind in visit]

    return Schedule.of("sharded", loop(p, v), map(order, range(p)), m)
