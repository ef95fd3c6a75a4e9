"""1F1B: as soon as the pipeline is full, every rank does one forward, one backward, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

from penstock.schedule.schedule import Action, Schedule, loop

__all__ = ["alternate", "one_f_one_b"]


def one_f_one_b(p: int, m: int) -> Schedule:
    """As fast as GPipe, with at most p micro-batches in flight: rank r never holds more than p - r.

    p=3, m=4; a column is the time of one forward, a backward ``B`` takes two::

        rank 0: F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
        rank 1: .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --
        rank 2: .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --
    """
    forwards = ([Action(r, "F", k) for k in range(m)] for r in range(p))
    backwards = ([Action(r, "B", k) for k in range(m)] for r in range(p))
    orders = (alternate(fs, bs, p - r) for r, (fs, bs) in enumerate(zip(forwards, backwards, strict=True)))
    return Schedule.of("1f1b", loop(p), orders, m)


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """The first ``warmup`` forwards; then a backward and a forward in turn, as long as there are any."""
    turns = chain.from_iterable(zip_longest(backwards, forwards[warmup:]))
    return [*forwards[:warmup], *(action for action in turns if action is not None)]
