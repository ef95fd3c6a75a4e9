"""Cuts that are moved at random, less and less: a way out of where no single move helps any more."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf
from random import Random

from penstock.profile.planner.segments import Segments
from penstock.profile.planner.times import Cuts, Ranks, bottleneck, price, time_of

__all__ = ["shaken"]

_POWER = 24  # so that the busiest rank counts most, and the next ones a little
_HOT, _COLD = 0.5, 1e-3  # by how much a move may be worse
_LACKING = 4.0  # a rank that lacks memory, or a slow cut, is like one that takes so many times what it should


def shaken(
    segments: Segments, ranks: Ranks, placement: Sequence[int], cuts: Cuts, low: float, effort: int, seed: int = 0
) -> Cuts:
    """The best cuts that are met on the way from these; ``low`` is what the busiest rank could have at the least.

    Of the moves, one in some takes several neighbouring cuts along: up to a round of them, which leaves all stages but
    two of one rank as they are where layers are alike.
    """
    p, stages, draw = len(ranks), len(placement), Random(seed)
    at = [0, *cuts]
    own = [[s for s, home in enumerate(placement) if home == rank] for rank in range(p)]
    crossing = [s > 0 and placement[s - 1] != placement[s] for s in range(stages)]

    def energy(rank: int) -> float:
        time = time_of(segments, ranks, rank, [(at[s], at[s + 1]) for s in own[rank]])
        return min(_LACKING, time / low) ** _POWER

    def slow(s: int) -> float:
        time = segments.transfer[at[s]] / low
        return 0.0 if time <= 1 or not crossing[s] else min(_LACKING, time) ** _POWER

    now = [energy(rank) for rank in range(p)]
    best, value = cuts, bottleneck(segments, ranks, placement, cuts)
    top = min(max(now), (value / low) ** _POWER) if value < _LACKING * low else inf
    steps = max(1, effort // (10 + 2 * price(ranks, stages // p)))
    for step in range(steps):
        heat = _HOT * (_COLD / _HOT) ** (step / steps) * max(1.0, max(now))
        first = draw.randrange(1, stages)
        wide = draw.random()
        last = min(stages, first + (1 if wide < 0.6 else p if wide > 0.9 else draw.randint(2, p + 1)))
        way = draw.choice((-1, 1))
        if (at[first] + way <= at[first - 1]) if way < 0 else (at[last - 1] + way >= at[last]):
            continue
        touched = {placement[s] for s in range(first - 1, last)}
        before = sum(now[rank] for rank in touched) + sum(map(slow, range(first, last)))
        for s in range(first, last):
            at[s] += way
        fresh = {rank: energy(rank) for rank in touched}
        after = sum(fresh.values()) + sum(map(slow, range(first, last)))
        if after <= before or draw.random() < exp((before - after) / heat):
            for rank in touched:
                now[rank] = fresh[rank]
            if after < before and max(now) < top * (1 - 1e-9):
                reached = bottleneck(segments, ranks, placement, tuple(at[1:]))
                if reached < value:
                    best, value, top = tuple(at[1:]), reached, max(now)
                    if value <= low * (1 + 1e-9):
                        break
        else:
            for s in range(first, last):
                at[s] -= way
    return best
