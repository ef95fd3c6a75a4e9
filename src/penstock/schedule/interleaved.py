"""Interleaved 1F1B: v stages on each rank, so that the pipeline fills v times faster."""

from __future__ import annotations

from dataclasses import replace

from penstock.schedule.one_f_one_b import alternate, even_groups, one_f_one_b
from penstock.schedule.registry import register
from penstock.schedule.schedule import Action, Schedule, loop


@register(
    "interleaved", "1F1B over v stages per rank; 1/v of its bubble", v=None, default_v=2, memory="p + (p - 1) / v"
)
def interleaved(p: int, m: int, v: int = 2) -> Schedule:
    """1F1B with v stages per rank, looped: 1/v of its bubble, for more memory and v times the traffic.

    Micro-batches go in groups: a rank runs a whole group through its first stage, then the same group through
    its second, and so on; backwards the same, last stage first. The first micro-batch of a group of p returns to
    rank 0 just when rank 0 is done with the last. A small remainder of m / p enlarges the groups, which costs no
    time and a little memory; a large one becomes an incomplete group.

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
