"""Interleaved 1F1B: v stages on each rank, so that the pipeline fills v times faster."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from penstock.schedule.one_f_one_b import alternate, one_f_one_b
from penstock.schedule.schedule import Action, Schedule, loop

__all__ = ["even_groups", "interleaved"]


def interleaved(p: int, m: int, v: int = 2) -> Schedule:
    """1F1B over stages dealt round the ranks: 1/v of its bubble, for more memory and v times the traffic.

    Micro-batches go in groups: a rank takes a whole group through its first stage, then the same group through
    its second, and so on; backwards the same, last stage first. A group of p comes round to rank 0 just when
    rank 0 has done its last. Micro-batches left over make the groups larger when they are few (no time is
    lost, a little memory is), and are a group with gaps when they are many.

    p=2, m=4, v=2; the digit before the letter is the stage, a column is a forward, a backward ``B`` takes two::

        rank 0: 0F0 0F1 2F0 2F1 0F2 .   2B0 --- 0F3 2B1 --- 2F2 0B0 --- 2F3 0B1 --- .   2B2 --- .   2B3 ...
        rank 1: .   1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1F2 1B0 --- 1F3 1B1 --- 3F2 3B2 --- 3F3 3B3 --- 1B2 ...
    """
    if v == 1:
        return replace(one_f_one_b(p, m), name="interleaved")
    full, rest = divmod(m, p)
    if 2 * rest > p:
        return interleaved(p, m - rest + p, v).first(m)
    groups = even_groups(m, max(1, full))

    def order(r: int) -> list[Action]:
        stages = range(r, p * v, p)
        forwards = [Action(s, "F", k) for group in groups for s in stages for k in group]
        backwards = [Action(s, "B", k) for group in groups for s in reversed(stages) for k in group]
        # The rank's last stage starts after v - 1 groups; its first gradient is 2 (p - r - 1) hops later.
        return alternate(forwards, backwards, (v - 1) * len(groups[0]) + 2 * (p - r - 1) + 1)

    return Schedule.of("interleaved", loop(p, v), map(order, range(p)), m)


def even_groups(m: int, num_groups: int) -> list[range]:
    """Micro-batches in groups, as even as can be, the larger ones first."""
    return [range(*pair) for pair in pairwise(-(-m * g // num_groups) for g in range(num_groups + 1))]
