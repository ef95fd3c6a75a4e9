"""Looped BFS: GPipe over v stages per rank, breadth first."""

from __future__ import annotations

from penstock.schedule.action import Action
from penstock.schedule.placement import loop
from penstock.schedule.schedule import Schedule

__all__ = ["looped_bfs"]


def looped_bfs(p: int, m: int, v: int = 2) -> Schedule:
    """Every micro-batch through a stage before the rank's next stage: the bubble of interleaved, the memory of GPipe.

    A stage's micro-batches are contiguous, so sharded weights are gathered once per stage and step.

    p=2, m=2, v=2; the digit before the letter is the stage, a backward ``B`` takes two columns::

        rank 0: 0F0 0F1 2F0 2F1 .   .   .   2B0 --- 2B1 --- 0B0 --- 0B1 ---
        rank 1: .   1F0 1F1 3F0 3F1 3B0 --- 3B1 --- 1B0 --- 1B1 ---
    """

    def order(r: int) -> list[Action]:
        stages = range(r, p * v, p)
        forwards = [Action(s, "F", k) for s in stages for k in range(m)]
        return forwards + [Action(s, "B", k) for s in reversed(stages) for k in range(m)]

    return Schedule.of("looped_bfs", loop(p, v), map(order, range(p)), m)
