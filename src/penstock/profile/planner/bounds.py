"""Times that no cuts can be below, whatever they are.

    floor          a rank's share of all work, the largest layer, or the several layers that come together somewhere
    by_kinds       ranks may have any layers, not only runs of them: but layers are whole, and of few kinds
    Weighed        the ranks' times are weighed and added up: the least such sum over all cuts is below their busiest

The first says little where layers are few for each rank. The second is mostly met where layers are alike but for the
first and the last: a rank has a whole number of them. The third knows that a stage's layers must be where it is: it says
most where there are hardly more layers than stages; and it says which places a cut can have in better cuts than those
that are known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from itertools import accumulate, repeat
from math import exp, inf

from penstock.profile.planner.segments import Segments
from penstock.profile.planner.times import Ranks

__all__ = ["Weighed", "by_kinds", "floor"]

_ROUNDING = 1 + 1e-9
_SUMS = 6000  # loads that are told apart


def floor(segments: Segments, ranks: Ranks) -> float:
    """A time that the busiest rank has in any case."""
    works = _works(segments, ranks)
    fastest, p = max(ranks.speed), len(ranks)
    time = max(sum(works) / sum(ranks.speed), max(works) / fastest)
    ordered = sorted(works, reverse=True)
    for count in range(1, (len(works) - 1) // p + 1):
        time = max(time, sum(ordered[count * p - count : count * p + 1]) / fastest)
    return time


def _works(segments: Segments, ranks: Ranks) -> list[float]:
    if not ranks.recompute:
        return segments.works
    return [work + segments.again(i, i + 1) for i, work in enumerate(segments.works)]


# ── any layers, but whole ones ───────────────────────────────────────────────────────────────────────────────────


def by_kinds(segments: Segments, ranks: Ranks, v: int, low: float, high: float) -> float:
    """The least time in which ranks could do all work, the first rank with the first layer, the last with the last.

    Every rank has one of the loads that layers add up to, and that fit its memory; ``low`` if these are too many.
    """
    p, n = len(ranks), segments.n
    if p == 1:
        return low
    every: list[list[tuple[float, float]]] = []
    met: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for rank in range(p):
        own = 0 if rank == 0 else n - 1 if rank == p - 1 else None
        such = (ranks.speed[rank], ranks.memory[rank], ranks.in_flight[rank], own)
        if such not in met:
            loads = _loads(segments, ranks, v, rank, own, high)
            if loads is None:
                return low
            met[such] = loads
        every.append(met[such])
    times = sorted({low, *(time for loads in met.values() for time, _ in loads if low < time <= high)})
    total = sum(_works(segments, ranks)) / _ROUNDING
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
    segments: Segments, ranks: Ranks, v: int, rank: int, own: int | None, high: float
) -> list[tuple[float, float]] | None:
    """Times that a rank can have, up to ``high``, and the most work that it does in each or less; None if too many."""
    n, speed, limit = segments.n, ranks.speed[rank], ranks.memory[rank]
    unit = high * speed * 1e-12
    most = round(high * speed * _ROUNDING / unit)
    ways = [_ways(segments, ranks, v, rank, i, unit) for i in range(n)]
    sums: dict[tuple[int, int], float] = {(0, 0): 0.0}  # load and work: the least bytes
    if own is not None:
        sums = {(load, work): size for load, work, size in ways[own] if load <= most and size <= limit}
    for kind, count in Counter(ways[1:-1]).items():
        more = {(0, 0, 0): 0.0}
        for load, work, size in kind:
            for (used, before, done), held in list(more.items()):
                for k in range(1, count - used + 1):
                    if before + k * load > most or held + k * size > limit:
                        break
                    more[used + k, before + k * load, done + k * work] = held + k * size
        fresh: dict[tuple[int, int], float] = {}
        for (load, work), size in sums.items():
            for (_, again, done), held in more.items():
                if load + again <= most and size + held <= limit:
                    key = load + again, work + done
                    if size + held < fresh.get(key, inf):
                        fresh[key] = size + held
            if len(fresh) > _SUMS:
                return None
        sums = fresh
    best = accumulate(sorted(sums), lambda one, two: (two[0], max(one[1], two[1])))
    return [(load * unit / speed, work * unit) for load, work in best]


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


# ── weighed ranks ────────────────────────────────────────────────────────────────────────────────────────────────


class Weighed:
    """The least weighed sum of the ranks' times over all cuts, for weights that make it large.

    A cut between stages ``s - 1`` and ``s`` is before a layer from ``s`` up to ``s + extra``; in all lists here it is
    counted from ``s``. Cuts that take as long as ``below`` to cross are left out.
    """

    def __init__(
        self, segments: Segments, ranks: Ranks, placement: tuple[int, ...], below: float, passes: int, low: float
    ) -> None:
        self.p, self.stages, self.placement, self.speed = len(ranks), len(placement), placement, ranks.speed
        self.done = [0.0, *accumulate(_works(segments, ranks))]
        self.extra = segments.n - self.stages
        self.below = below
        self.shut = [[0.0] * (self.extra + 1) for _ in placement]  # infinite where a cut cannot be
        for s in range(1, self.stages):
            for o in range(self.extra + 1):
                if segments.transfer[s + o] >= below and placement[s - 1] != placement[s]:
                    self.shut[s][o] = inf
        self.weights = [speed / sum(ranks.speed) for speed in ranks.speed]
        self.bound = low
        self._improve(passes)

    def _improve(self, passes: int) -> None:
        """Each rank alone, and then weights that grow where a rank has more than its share, by less and less."""
        trend, weights = [0.0] * self.p, self.weights
        for number in range(-self.p, passes):
            alone = [float(rank == self.p + number) for rank in range(self.p)]
            total, times = self._least(alone if number < 0 else weights)
            if total > self.bound:
                self.bound, self.weights = total, alone if number < 0 else weights
            if self.bound >= self.below:
                return
            if number >= 0 and total > 0:
                trend = [before / 2 + time / total - 1 for before, time in zip(trend, times, strict=True)]
                moves = [max(-9.0, min(9.0, more / (1 + number) ** 0.5)) for more in trend]
                moved = [max(1e-9, weight * exp(move)) for weight, move in zip(weights, moves, strict=True)]
                weights = [weight / sum(moved) for weight in moved]

    def prices(self, weights: list[float]) -> list[float]:
        """For each stage, the weight of a second of its work."""
        return [weights[rank] / self.speed[rank] for rank in self.placement]

    def _least(self, weights: list[float]) -> tuple[float, list[float]]:
        """The sum, and the times of the ranks with which it is so small."""
        prices, done, extra = self.prices(weights), self.done, self.extra
        reached = [[0.0] * (extra + 1)]
        for s in range(1, self.stages):
            price = prices[s - 1] - prices[s]
            sums = map(_sum, reached[-1], done[s : s + extra + 1], self.shut[s], repeat(price))
            reached.append(list(accumulate(sums, min)))
        total = reached[-1][-1] + prices[-1] * done[-1]
        times, o, end = [0.0] * self.p, extra, done[-1]
        if total < inf:
            for s in range(self.stages - 1, -1, -1):
                o = reached[s].index(reached[s][o]) if s else 0
                begin = done[s + o]
                times[self.placement[s]] += (end - begin) / self.speed[self.placement[s]]
                end = begin
        return total, times

    def places(self) -> list[list[int]]:
        """For each stage the places where it can begin in cuts that are below."""
        prices, done, extra, n = self.prices(self.weights), self.done, self.extra, len(self.done) - 1
        ahead = self.ahead(prices)
        reached, found = [0.0] * (extra + 1), [[0]]
        for s in range(1, self.stages):
            price = prices[s - 1] - prices[s]
            sums = list(map(_sum, reached, done[s : s + extra + 1], self.shut[s], repeat(price)))
            found.append([s + o for o in range(extra + 1) if sums[o] + ahead[s][o] < self.below * (1 - 1e-12)])
            reached = list(accumulate(sums, min))
        return [*found, [n]]

    def ahead(self, prices: list[float]) -> list[list[float]]:
        """For each stage and place where it begins, the least that the cuts behind it add."""
        extra, done = self.extra, self.done
        least = [[prices[-1] * done[-1]] * (extra + 1)]
        for s in range(self.stages - 1, 0, -1):
            price = prices[s - 1] - prices[s]
            sums = list(map(_sum, least[-1], done[s : s + extra + 1], self.shut[s], repeat(price)))
            least.append(list(accumulate(reversed(sums), min))[::-1])
        return least[::-1]


def _sum(before: float, done: float, shut: float, price: float) -> float:
    return before + price * done + shut
