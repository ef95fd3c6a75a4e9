"""All cuts, tried one by one: where these are few, nothing finds the best of them faster."""

from __future__ import annotations

from itertools import combinations
from math import comb

from penstock.profile.planner.segments import Segments
from penstock.profile.planner.times import Cuts, Ranks, time_of

__all__ = ["best_of_all", "count"]


def count(segments: Segments, placement: tuple[int, ...]) -> int:
    """How many cuts there are."""
    return comb(segments.n - 1, len(placement) - 1)


def best_of_all(
    segments: Segments, ranks: Ranks, placement: tuple[int, ...], best: Cuts, value: float
) -> tuple[Cuts, float]:
    """The cuts with the least busiest rank or channel, and its time; the given ones if none are below their time."""
    n, stages = segments.n, len(placement)
    own = [[s for s, home in enumerate(placement) if home == rank] for rank in range(len(ranks))]
    between = [s for s in range(1, stages) if placement[s - 1] != placement[s]]
    met: dict[tuple[int, ...], float] = {}  # for a rank, and where its stages begin and end
    for inner in combinations(range(1, n), stages - 1):
        at = (0, *inner, n)
        busiest = max([0.0, *(segments.transfer[at[s]] for s in between)])
        for rank, mine in enumerate(own):
            if busiest >= value:
                break
            key = (rank, *(at[end] for s in mine for end in (s, s + 1)))
            if key not in met:
                met[key] = time_of(segments, ranks, rank, [(at[s], at[s + 1]) for s in mine])
            busiest = max(busiest, met[key])
        if busiest < value:
            best, value = at[1:], busiest
    return best, value
