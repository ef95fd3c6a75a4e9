"""GPipe: fill the pipeline with every forward, then drain it with every backward."""

from __future__ import annotations

from penstock.schedule.action import Action
from penstock.schedule.placement import loop
from penstock.schedule.schedule import Schedule

__all__ = ["gpipe"]


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards. Simple, but every micro-batch is in flight at once: memory grows with m.

    p=3, m=3; a column is the time of one forward, a backward ``B`` takes two::

        rank 0: F0 F1 F2 .  .  .  .  .  .  B0 -- B1 -- B2 --
        rank 1: .  F0 F1 F2 .  .  .  B0 -- B1 -- B2 --
        rank 2: .  .  F0 F1 F2 B0 -- B1 -- B2 --
    """
    orders = ([Action(r, kind, k) for kind in "FB" for k in range(m)] for r in range(p))
    return Schedule.of("gpipe", loop(p), orders, m)
