"""A time that no cuts can be below, and where cuts can be that are below another one.

The ranks' times are weighed, with weights that add up to one: the busiest rank has as much as their mean, or more. The
cuts with the least mean are found at once, stage by stage, because it is a sum over the cuts; and so is the least mean
of cuts that have one at a given place. Weights for which it is large are those under which it does not pay to give one
rank's work to another.

It says most where there are hardly more layers than stages: a stage's layers must be about where it is.
"""

from __future__ import annotations

from itertools import accumulate, repeat
from math import exp, inf

from penstock.profile.planner.bounds import works_of
from penstock.profile.planner.segments import Ranks, Segments

__all__ = ["Weighed"]


class Weighed:
    """The least weighed sum of the ranks' times over all cuts, for weights that make it large.

    A cut between stages ``s - 1`` and ``s`` is before a layer from ``s`` up to ``s + extra``; in all lists here it is
    counted from ``s``. Cuts that take as long as ``below`` to cross are left out.
    """

    def __init__(
        self, segments: Segments, ranks: Ranks, placement: tuple[int, ...], below: float, passes: int, low: float
    ) -> None:
        self.p, self.stages, self.placement, self.speed = len(ranks), len(placement), placement, ranks.speed
        self.done = [0.0, *accumulate(works_of(segments, ranks))]
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
