"""1F1B: once the pipeline is full, every rank alternates one forward and one backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise, zip_longest
from typing import TypeVar

from penstock.schedule.registry import register
from penstock.schedule.schedule import Action, Schedule, loop

T = TypeVar("T")


@register("1f1b", "one forward, one backward in turn; p activations", memory="p")
def one_f_one_b(p: int, m: int) -> Schedule:
    """As fast as GPipe, with at most p micro-batches in flight: rank r never holds more than p - r.

    p=3, m=4; a column is the time of one forward, a backward ``B`` takes two::

        rank 0: F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
        rank 1: .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --
        rank 2: .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --
    """

    def order(r: int) -> list[Action]:
        forwards, backwards = ([Action(r, kind, k) for k in range(m)] for kind in "FB")
        return alternate(forwards, backwards, p - r)

    return Schedule.of("1f1b", loop(p), map(order, range(p)), m)


def alternate(forwards: Sequence[T], backwards: Sequence[T], warmup: int) -> list[T]:
    """The first ``warmup`` forwards, then backwards and forwards alternating, then the remaining backwards."""
    steady = chain.from_iterable(zip_longest(backwards, forwards[warmup:]))
    return [*forwards[:warmup], *(action for action in steady if action is not None)]


def even_groups(m: int, num_groups: int) -> list[range]:
    """``m`` micro-batches in groups whose sizes differ by at most one, larger groups first."""
    return [range(*pair) for pair in pairwise(-(-m * g // num_groups) for g in range(num_groups + 1))]
