"""Any number of runs of layers on every rank of a loop: whether all can keep below a time, and with which cuts.

The rounds' beginnings are tried, and for each choice of them it is gone through the ranks: a *front* is how far each
round has got, and all fronts are kept.

    round   0          1          2
    rank 0  ██▌        █▌         ███
    rank 1     ██         ███▌       ▌           a front: where rank 1 is to begin in each round
    ...

What keeps these few are the weights of the ranks (see ``Weighed``): the ranks behind a front can keep below the time
only if the least of their weighed work does; and beginnings are of no use with which the least of all of it does not.
An answer that takes more than the effort is a no that is not sure.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import inf

from penstock.profile.planner.segments import Cuts, Ranks, Segments, fits, price
from penstock.profile.planner.weighed import Weighed

__all__ = ["Rounds"]

_SURE = 1 - 1e-12

Front = tuple[int, ...]


class Rounds:
    """Cuts below a time, for weights of the ranks; ``effort`` is how much may be looked at, and what is left."""

    def __init__(self, segments: Segments, ranks: Ranks, weighed: Weighed, effort: int) -> None:
        self.segments, self.ranks, self.effort = segments, ranks, effort
        self.p, self.v = len(ranks), weighed.stages // len(ranks)
        self.done, self.below = weighed.done, weighed.below
        self.prices = weighed.prices(weighed.weights)
        self.places = weighed.places()
        self.most = [self.below * speed for speed in ranks.speed]
        after = list(accumulate(reversed(weighed.weights)))[::-1]
        self.left = [self.below * weight for weight in (*after[1:], 0.0)]  # the weighed time of the ranks behind one

    def search(self) -> Cuts | None:
        """The cuts, or None; it is sure if there is effort left."""
        for begins in self._beginnings():
            found = self._through(begins)
            if found is not None or self.effort < 0:
                return found
        return None

    # ── where the rounds begin ───────────────────────────────────────────────────────────────────────────────────

    def _beginnings(self) -> Iterator[tuple[int, ...]]:
        """All choices whose weighed sum may be below, the most likely first."""
        p, n = self.p, self.segments.n
        rest = [{n: 0.0}]  # for each round, from where it begins: the least of it and of those behind it
        for k in range(self.v - 1, -1, -1):
            rest.append(self._round_costs(k, rest[-1]))
        rest.reverse()
        choices: list[tuple[float, tuple[int, ...]]] = [(0.0, (0,))]
        for k in range(self.v - 1):
            fresh = []
            for before, begins in choices:
                for end, cost in self._from(k, begins[-1]).items():
                    if end in rest[k + 1] and before + cost + rest[k + 1][end] < self.below * _SURE:
                        fresh.append((before + cost, (*begins, end)))
                self.effort -= sum(map(len, self.places[k * p : (k + 1) * p]))
                if self.effort < 0:
                    return
            if len(fresh) > self.effort:
                self.effort = -1
                return
            choices = fresh
        rated = sorted((before + rest[-2][begins[-1]], begins) for before, begins in choices)
        for _, begins in rated:
            yield (*begins, n)

    def _round_costs(self, k: int, behind: dict[int, float]) -> dict[int, float]:
        """The least of round ``k`` and of those behind it, from each place where it can begin."""
        costs = behind
        for s in range((k + 1) * self.p - 1, k * self.p - 1, -1):
            costs = self._back(s, costs)
        return costs

    def _back(self, s: int, costs: dict[int, float]) -> dict[int, float]:
        """From each place where stage ``s`` can begin, given what it is from where it ends."""
        price, done, found = self.prices[s], self.done, dict[int, float]()
        ends = sorted(costs, reverse=True)
        least, at = inf, 0
        for begin in reversed(self.places[s]):
            while at < len(ends) and ends[at] > begin:
                least = min(least, costs[ends[at]] + price * done[ends[at]])
                at += 1
            if least < inf:
                found[begin] = least - price * done[begin]
        return found

    def _from(self, k: int, begin: int) -> dict[int, float]:
        """The least of round ``k`` from one beginning to each of its ends."""
        costs = {begin: 0.0}
        for s in range(k * self.p, (k + 1) * self.p):
            price, done, found = self.prices[s], self.done, dict[int, float]()
            begins = sorted(costs)
            least, at = inf, 0
            for end in self.places[s + 1]:
                while at < len(begins) and begins[at] < end:
                    least = min(least, costs[begins[at]] - price * done[begins[at]])
                    at += 1
                if least < inf:
                    found[end] = least + price * done[end]
            costs = found
        return costs

    # ── through the ranks ────────────────────────────────────────────────────────────────────────────────────────

    def _through(self, begins: tuple[int, ...]) -> Cuts | None:
        p, v = self.p, self.v
        ahead = []  # for each round and rank, from where its stage begins: the least of the round that is left
        for k in range(v):
            costs = [{begins[k + 1]: 0.0}]
            for s in range((k + 1) * p - 1, k * p - 1, -1):
                costs.append(self._back(s, costs[-1]))
            ahead.append(costs[::-1])
        self.effort -= 10 * v * p
        fronts: dict[Front, Front] = {begins[:-1]: ()}
        steps = []
        for rank in range(p):
            fresh: dict[Front, Front] = {}
            nexts = [ahead[k][rank + 1] for k in range(v)]
            for front in fronts:
                for reached in self._next(rank, front, nexts):
                    fresh.setdefault(reached, front)
                if self.effort < 0:
                    return None
            steps.append(fresh)
            fronts = fresh
        if begins[1:] not in fronts:
            return None
        chain = [begins[1:]]
        for step in reversed(steps):
            chain.append(step[chain[-1]])
        return tuple(front[k] for k in range(v) for front in chain[-2::-1])

    def _next(self, rank: int, front: Front, nexts: list[dict[int, float]]) -> list[Front]:
        """All fronts behind the rank, if it begins at one."""
        done, v = self.done, self.v
        most, left = self.most[rank], self.left[rank] + 1e-12 * self.below
        ways = []
        for begin, ends in zip(front, nexts, strict=True):
            ways.append(sorted((done[end] - done[begin], cost, end) for end, cost in ends.items() if end > begin))
            if not ways[-1]:
                return []
        works = [0.0, *accumulate(min(way)[0] for way in reversed(ways))][-2::-1]
        costs = [0.0, *accumulate(min(cost for _, cost, _ in way) for way in reversed(ways))][-2::-1]
        parts: list[tuple[float, float, Front]] = [(0.0, 0.0, ())]
        for k in range(v):
            room, rest, fresh = most - works[k], left - costs[k], list[tuple[float, float, Front]]()
            for work, cost, reached in parts:
                for more, ahead, end in ways[k]:
                    if work + more >= room:
                        break
                    if cost + ahead <= rest:
                        fresh.append((work + more, cost + ahead, (*reached, end)))
            parts = fresh
            self.effort -= len(parts) + 2
            if self.effort < 0:
                return []
        if self.ranks.recompute is False and self.ranks.memory[rank] == inf:
            return [reached for _, _, reached in parts]
        self.effort -= price(self.ranks, v) * len(parts)
        runs = (tuple(zip(front, reached, strict=True)) for _, _, reached in parts)
        return [tuple(end for _, end in own) for own in runs if fits(self.segments, self.ranks, rank, self.below, own)]
