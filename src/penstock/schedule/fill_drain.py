"""GPipe and other schedules that run all forwards before the first backward, or no backward."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.one_f_one_b import even_groups
from penstock.schedule.registry import register
from penstock.schedule.schedule import Action, Schedule, loop


def fill_drain(placement: Sequence[int], m: int, *, backward: bool = True, name: str = "fill_drain") -> Schedule:
    """All forwards, then all backwards if ``backward``, for any placement. A rank runs one stage after another.

    placement (0, 1, 1, 0), m=2::

        rank 0: 0F0 0F1 .   .   .   3F0 3F1 | 3B0 3B1 ...
        rank 1: .   1F0 1F1 2F0 2F1 .   .   | ...
    """

    def order(rank: int) -> list[Action]:
        stages = [s for s, r in enumerate(placement) if r == rank]
        forwards = [Action(s, "F", k) for s in stages for k in range(m)]
        return forwards + [Action(s, "B", k) for s in reversed(stages) if backward for k in range(m)]

    return Schedule.of(name, placement, map(order, range(max(placement) + 1)), m)


@register("gpipe", "all forwards, then all backwards", memory="m")
def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards. All micro-batches are in flight at the same time: memory grows with m.

    p=3, m=3; a column is the time of one forward, a backward ``B`` takes two::

        rank 0: F0 F1 F2 .  .  .  .  .  .  B0 -- B1 -- B2 --
        rank 1: .  F0 F1 F2 .  .  .  B0 -- B1 -- B2 --
        rank 2: .  .  F0 F1 F2 B0 -- B1 -- B2 --
    """
    return fill_drain(loop(p), m, name="gpipe")


@register("looped_bfs", "GPipe with v stages per rank, breadth-first", v=None, default_v=2, memory="m")
def looped_bfs(p: int, m: int, v: int = 2) -> Schedule:
    """A rank runs all micro-batches through one stage before its next stage: breadth-first.

    It has the bubble of ``interleaved`` and the memory of GPipe. The micro-batches of a stage are contiguous, so
    sharded weights are gathered once per stage and step.

    p=2, m=2, v=2; the digit before the letter is the stage, a backward ``B`` takes two columns::

        rank 0: 0F0 0F1 2F0 2F1 .   .   .   2B0 --- 2B1 --- 0B0 --- 0B1 ---
        rank 1: .   1F0 1F1 3F0 3F1 3B0 --- 3B1 --- 1B0 --- 1B1 ---
    """
    return fill_drain(loop(p, v), m, name="looped_bfs")


@register("sharded", "one micro-batch at a time, without overlap", v=None, default_v=1, memory="1")
def sharded(p: int, m: int, v: int = 1) -> Schedule:
    """Each micro-batch completes its backward before the next one starts: for the least memory, and for debugging.

    p=2, m=2; a column is the time of one forward, a backward ``B`` takes two::

        rank 0: F0 .  .  .  B0 -- F1 .  .  .  B1 --
        rank 1: .  F0 B0 -- .  .  .  F1 B1 --
    """

    def order(r: int) -> list[Action]:
        stages = range(r, p * v, p)
        pass_of_one = [(s, "F") for s in stages] + [(s, "B") for s in reversed(stages)]
        return [Action(s, kind, k) for k in range(m) for s, kind in pass_of_one]

    return Schedule.of("sharded", loop(p, v), map(order, range(p)), m)


@register("forward_only", "forwards only, for evaluation", v=None, default_v=1, memory="0")
def forward_only(p: int, m: int, v: int = 1) -> Schedule:
    """Forwards only. With v > 1, micro-batches pass the ranks v times, in groups of at least p.

    p=3, m=4::

        rank 0: F0 F1 F2 F3
        rank 1: .  F0 F1 F2 F3
        rank 2: .  .  F0 F1 F2 F3
    """
    groups = even_groups(m, max(1, m // p))

    def order(r: int) -> list[Action]:
        return [Action(s, "F", k) for group in groups for s in range(r, p * v, p) for k in group]

    return Schedule.of("forward_only", loop(p, v), map(order, range(p)), m)
