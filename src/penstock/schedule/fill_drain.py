"""Fill, then drain, for stages that are placed already: what a plain call of a pipeline runs."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.interleaved import even_groups
from penstock.schedule.schedule import Action, Schedule, loop

__all__ = ["fill_drain", "forward_only", "gpipe", "looped_bfs", "sharded"]


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


# GPipe: fill the pipeline with every forward, then drain it with every backward.


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards. Simple, but every micro-batch is in flight at once: memory grows with m.

    p=3, m=3; a column is the time of one forward, a backward ``B`` takes two::

        rank 0: F0 F1 F2 .  .  .  .  .  .  B0 -- B1 -- B2 --
        rank 1: .  F0 F1 F2 .  .  .  B0 -- B1 -- B2 --
        rank 2: .  .  F0 F1 F2 B0 -- B1 -- B2 --
    """
    orders = ([Action(r, kind, k) for kind in "FB" for k in range(m)] for r in range(p))
    return Schedule.of("gpipe", loop(p), orders, m)


# Looped BFS: GPipe over v stages per rank, breadth first.


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


# Sharded: one micro-batch at a time. No overlap: to fit a model on several devices, and to debug.


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


# Forward only: evaluation and inference.


def forward_only(p: int, m: int, v: int = 1) -> Schedule:
    """Forwards, and no backward. With v > 1 stages per rank, micro-batches go round in groups of p or a few more.

    p=3, m=4::

        rank 0: F0 F1 F2 F3
        rank 1: .  F0 F1 F2 F3
        rank 2: .  .  F0 F1 F2 F3
    """
    groups = even_groups(m, max(1, m // p))

    def order(r: int) -> list[Action]:
        return [Action(s, "F", k) for group in groups for s in range(r, p * v, p) for k in group]

    return Schedule.of("forward_only", loop(p, v), map(order, range(p)), m)
