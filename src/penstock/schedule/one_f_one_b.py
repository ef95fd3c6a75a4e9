"""1F1B: once the pipeline is full, every rank alternates one forward and one backward.

Interleaved 1F1B has v stages on each rank, so that the pipeline fills v times faster. Zero-bubble H1 and H2 split the
backward, and run weight gradients where 1F1B is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise, zip_longest
from typing import TypeVar

from penstock.schedule.registry import register
from penstock.schedule.schedule import Action, Schedule, loop

T = TypeVar("T")


@register("1f1b", "alternates one forward and one backward; p activations", memory="p")
def one_f_one_b(p: int, m: int) -> Schedule:
    """The time of GPipe with at most p micro-batches in flight: rank r holds at most p - r.

    p=3, m=4; a column is the time of one forward, a backward ``B`` takes two::

        rank 0: F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
        rank 1: .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --
        rank 2: .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --
    """

    def order(r: int) -> list[Action]:
        forwards, backwards = ([Action(r, kind, k) for k in range(m)] for kind in "FB")
        return alternate(forwards, backwards, p - r)

    return Schedule.of("1f1b", loop(p), map(order, range(p)), m)


@register(
    "interleaved", "1F1B with v stages per rank; 1/v of its bubble", v=None, default_v=2, memory="p + (p - 1) / v"
)
def interleaved(p: int, m: int, v: int = 2) -> Schedule:
    """1F1B with v looped stages per rank: 1/v of the bubble, for more memory and v times the communication.

    Micro-batches are in groups. A rank runs the forwards of a group on its first stage, then on its second stage, and
    so on, and the backwards of a group from its last stage to its first. In a group of p, the first micro-batch returns
    to rank 0 when rank 0 has finished the last one. A small remainder of m / p enlarges the groups, which takes no
    time and a little memory. A large remainder is a group of its own.

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


def alternate(forwards: Sequence[T], backwards: Sequence[T], warmup: int) -> list[T]:
    """The first ``warmup`` forwards, then alternating backwards and forwards, then the remaining backwards."""
    steady = chain.from_iterable(zip_longest(backwards, forwards[warmup:]))
    return [*forwards[:warmup], *(action for action in steady if action is not None)]


def even_groups(m: int, num_groups: int) -> list[range]:
    """Divide ``m`` micro-batches into groups whose sizes differ by at most one, larger groups first."""
    return [range(*pair) for pair in pairwise(-(-m * g // num_groups) for g in range(num_groups + 1))]


@register("zb_h1", "split backward; a third of 1F1B's bubble, with its memory", memory="p")
def zb_h1(p: int, m: int) -> Schedule:
    """A third of 1F1B's bubble with 1F1B's memory: rank r has p - r micro-batches in flight and r deferred.

    p=3, m=4; every action takes one column::

        rank 0: F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1: .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2: .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return Schedule.of("zb_h1", loop(p), (_zero_bubble_order(r, m, p - r, r) for r in range(p)), m)


@register("zb_h2", "split backward; no idle time after the first action, twice 1F1B's memory", memory="2 * p - 1")
def zb_h2(p: int, m: int) -> Schedule:
    """No rank is idle between its first and its last action; twice the memory of 1F1B.

    p=3, m=5; every action takes one column::

        rank 0: F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        rank 1: .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        rank 2: .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    return Schedule.of("zb_h2", loop(p), (_zero_bubble_order(r, m, 2 * (p - r) - 1, 2 * r) for r in range(p)), m)


def _zero_bubble_order(r: int, m: int, warmup: int, lag: int) -> list[Action]:
    """The order of rank r: ``warmup`` forwards; then I, the W of ``lag`` micro-batches earlier, and F in turn; then
    the remaining W.

    After the last forward, a W follows each I, regardless of ``lag``.
    """
    order = [Action(r, "F", k) for k in range(min(warmup, m))]
    weights = iter([Action(r, "W", k) for k in range(m)])
    for k in range(m):
        order.append(Action(r, "I", k))
        if k >= lag or k + warmup >= m:
            order.append(next(weights))
        if k + warmup < m:
            order.append(Action(r, "F", k + warmup))
    return [*order, *weights]
