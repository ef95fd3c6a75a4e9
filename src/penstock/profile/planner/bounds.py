"""Times that no cuts can be below, whatever they are.

    floor        a rank's share of all work, or the largest layer
    by_counts    ranks may have any layers, the smallest of them: but as many as there are
    by_kinds     ranks may have any layers, not only runs of them: but whole ones, of few kinds

The second and third are mostly met where layers are alike but for the first and the last: a rank has a whole number of
them. Both know that memory lets a rank have only so many, or that it has to recompute some.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from math import ceil, inf

from penstock.profile.planner.segments import Ranks, Segments

__all__ = ["by_counts", "by_kinds", "floor", "works_of"]

_ROUNDING = 1 + 1e-11
_SUMS = 6000  # loads that are told apart


def floor(segments: Segments, ranks: Ranks) -> float:
    """A time that the busiest rank has in any case."""
    works = works_of(segments, ranks)
    return max(sum(works) / sum(ranks.speed), max(works) / max(ranks.speed))


def works_of(segments: Segments, ranks: Ranks) -> list[float]:
    """What layers take: with their forward once more, where all are recomputed."""
    if not ranks.recompute:
        return segments.works
    return [work + segments.again(i, i + 1) for i, work in enumerate(segments.works)]


# ── as many layers as there are ──────────────────────────────────────────────────────────────────────────────────


def by_counts(segments: Segments, ranks: Ranks, placement: Sequence[int], low: float, high: float) -> float:
    """The least time in which ranks could have all layers, or all from some size on, if each had the smallest of them.

    A rank has a layer for each of its stages; the first and the last layer are where the first and the last stage are.
    The time is found by halving between ``low`` and ``high``.
    """
    n, v = segments.n, len(placement) // len(ranks)
    if len(placement) == 1:
        return low
    works = works_of(segments, ranks)
    sums = [0.0, *accumulate(sorted(works[1:-1]))]
    alike: Counter[tuple[float, float, tuple[float, ...]]] = Counter()
    for rank, speed in enumerate(ranks.speed):
        ends = _ends(segments, placement, rank)
        own, extra = sum(works[i] for i in ends), _extra(segments, ranks, v, rank)
        alike[speed, own, extra] += 1
        low = max(low, (own + sums[v - len(ends)] + extra[v]) / speed / _ROUNDING)

    def enough(time: float) -> bool:
        for first in range(n - 2):
            count = 0
            for (speed, own, extra), times in alike.items():
                room = time * speed * _ROUNDING - own + sums[first]
                if room < sums[first]:
                    return False
                at = bisect_right(range(first, n - 1), room, key=lambda at: sums[at] + extra[at - first])
                count += times * (at - 1)
            if count < n - 2 - first:
                return False
        return True

    if low >= high or enough(low):
        return min(low, high)
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low


def _extra(segments: Segments, ranks: Ranks, v: int, rank: int) -> tuple[float, ...]:
    """How much longer a rank takes for so many layers, because it has to recompute some, whichever they are."""
    n, limit = segments.n, ranks.memory[rank]
    if limit == inf:
        return (0.0,) * (n + 1)
    ways = [_ways(segments, ranks, v, rank, i, 1.0) for i in range(n)]
    sizes = accumulate(sorted(way[0][2] for way in ways))
    most = max(way[0][2] - way[-1][2] for way in ways)
    again = [0.0, *accumulate(sorted(segments.again(i, i + 1) for i in range(n)))]
    extra = [0.0]
    for size in sizes:
        lacking = size / _ROUNDING - limit
        count = 0 if lacking <= 0 else n + 1 if lacking > n * most else ceil(lacking / most)
        extra.append(again[count] if count <= len(extra) else inf)
    return tuple(extra)


# ── any layers, but whole ones ───────────────────────────────────────────────────────────────────────────────────


def by_kinds(segments: Segments, ranks: Ranks, placement: Sequence[int], low: float, high: float) -> float:
    """The least time in which ranks could do all work, with the first and the last layer where these are.

    Every rank has one of the loads that layers add up to, and that fit its memory; ``low`` if these are too many.
    """
    if len(placement) == 1:
        return low
    every: list[list[tuple[float, float]]] = []
    met: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for rank in range(len(ranks)):
        such = (ranks.speed[rank], ranks.memory[rank], ranks.in_flight[rank], *_ends(segments, placement, rank))
        if such not in met:
            loads = _loads(segments, ranks, placement, rank, high)
            if loads is None:
                return low
            met[such] = loads
        every.append(met[such])
    times = sorted({low, *(time for loads in met.values() for time, _ in loads if low < time <= high)})
    total = sum(works_of(segments, ranks)) / _ROUNDING
    first, last = 0, len(times) - 1
    while first < last:  # the least time that is enough
        middle = (first + last) // 2
        enough = 0.0
        for loads in every:
            at = bisect_right(loads, (times[middle] * _ROUNDING, inf))
            enough += loads[at - 1][1] if at else -inf
        first, last = (first, middle) if enough >= total else (middle + 1, last)
    return times[first]


def _loads(
    segments: Segments, ranks: Ranks, placement: Sequence[int], rank: int, high: float
) -> list[tuple[float, float]] | None:
    """Times that a rank can have, up to ``high``, and the most work that it does in each or less; None if too many."""
    n, speed, limit = segments.n, ranks.speed[rank], ranks.memory[rank]
    unit = high * speed * 1e-14
    most = round(high * speed * _ROUNDING / unit)
    ways = [_ways(segments, ranks, len(placement) // len(ranks), rank, i, unit) for i in range(n)]
    sums: dict[tuple[int, int], float] = {(0, 0): 0.0}  # load and work: the least bytes
    ends = [(ways[i], 1, 1) for i in _ends(segments, placement, rank)]
    for kind, least, count in (*ends, *((kind, 0, count) for kind, count in Counter(ways[1:-1]).items())):
        several = {(0, 0, 0): 0.0}  # how many of this kind, their load and work
        for load, work, size in kind:
            for (used, before, done), held in list(several.items()):
                for k in range(1, count - used + 1):
                    if before + k * load > most or held + k * size > limit:
                        break
                    key = used + k, before + k * load, done + k * work
                    several[key] = min(several.get(key, inf), held + k * size)
        if len(sums) * len(several) > 20 * _SUMS:
            return None
        fresh: dict[tuple[int, int], float] = {}
        for (load, work), size in sums.items():
            for (used, again, done), held in several.items():
                if used >= least and load + again <= most and size + held <= limit:
                    both = load + again, work + done
                    fresh[both] = min(fresh.get(both, inf), size + held)
            if len(fresh) > _SUMS:
                return None
        sums = fresh
    best = accumulate(sorted(sums), lambda one, two: (two[0], max(one[1], two[1])))
    return [(load * unit / speed, work * unit) for load, work in best]


def _ends(segments: Segments, placement: Sequence[int], rank: int) -> list[int]:
    """Of the first and the last layer those that a rank has in any case."""
    return [i for i, home in ((0, placement[0]), (segments.n - 1, placement[-1])) if home == rank]


Way = tuple[int, int, float]
"""What a layer adds to its rank's load, and to the work that is done; and its bytes."""


def _ways(segments: Segments, ranks: Ranks, v: int, rank: int, i: int, unit: float) -> tuple[Way, ...]:
    """A layer that is kept, or recomputed: of the stages that are, one is there at a time, and so at least the mean."""
    work, again = segments.works[i], segments.again(i, i + 1)
    stays, kept = segments.own(i)
    count = ranks.in_flight[rank]
    whole = round(work / unit), round(work / unit), stays + count * kept
    longer = round((work + again) / unit)
    twice = longer, longer if ranks.recompute else whole[1], stays + min(1.0, count) * kept / v
    return (twice,) if ranks.recompute else (whole,) if ranks.recompute is False else (whole, twice)
