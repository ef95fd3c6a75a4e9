"""Partition a chain of layers into stages so that the busiest rank has as little work as possible.

    straight   rank 0 │ rank 1 │ rank 2                 one range of layers per rank
    v          rank 0 │ rank 1 │ rank 2 │ 2 │ 1 │ 0      down and back up
    loop       rank 0 │ rank 1 │ rank 2 │ 0 │ 1 │ 2      round after round

The objective is the bottleneck: the time per micro-batch of the slowest rank (the sum of its stages, divided by its
speed) or of the slowest channel (the bytes that cross its cut). Every rank stays within its memory: the static bytes
of its stages, and the activations of its micro-batches in flight.

Straight partitions are exact, by dynamic programming. All others are balanced partitions, improved by local moves; the
joint search moves their cuts further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from operator import add

from penstock.profile.planner.segments import Cuts, Ranks, Segments, bottleneck, rank_bytes, rank_time
from penstock.schedule.schedule import loop, vee


def placement_of(shape: str, p: int, v: int) -> tuple[int, ...]:
    """The rank of each stage."""
    return vee(p) if shape == "v" else loop(p, v)


def find_cuts(segments: Segments, ranks: Ranks, placement: Sequence[int]) -> list[Cuts]:
    """Balanced cuts, then the best straight ones, if they have a smaller bottleneck; none if none fit the memory."""
    start = balanced(segments, ranks, placement)
    found = [] if start is None else [start]
    if len(placement) == len(ranks):
        limit = inf if start is None else bottleneck(segments, ranks, placement, start)
        straight = _best_straight(segments, ranks, limit)
        found += [] if straight is None else [straight]
    return found


def least_memory(segments: Segments, ranks: Ranks, placement: Sequence[int]) -> float:
    """Smallest factor by which device memory must grow for a feasible partition (±1 %)."""

    def is_feasible(factor: float) -> bool:
        return bool(find_cuts(segments, replace(ranks, memory=tuple(factor * m for m in ranks.memory)), placement))

    low, high = 0.0, 1.0
    while not is_feasible(high):
        low, high = high, 2 * high
    while high - low > 1e-2 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_feasible(middle) else (middle, high)
    return high


# ── one range of layers per rank ─────────────────────────────────────────────────────────────────────────────────


def _best_straight(segments: Segments, ranks: Ranks, limit: float) -> Cuts | None:
    """The straight cuts with the smallest bottleneck below ``limit``.

    Dynamic programming over ranks: ``best[j]`` is the smallest bottleneck of the ranks so far with the first j layers.
    """
    n, p = segments.n, len(ranks)
    best, begins = [0.0] + [inf] * n, list[list[int]]()
    for rank in range(p):
        before, best, begin_of = best, [inf] * (n + 1), [0] * (n + 1)
        for end in range(rank + 1, n - (p - rank - 1) + 1):
            value = limit
            for begin in range(end - 1, rank - 1, -1):
                if segments.work(begin, end) >= value * ranks.speed[rank]:
                    break  # so would all ranges that begin earlier
                reached = max(before[begin], segments.cut_seconds[begin] if begin else 0.0)
                if reached < value:
                    reached = max(reached, rank_time(segments, ranks, rank, [(begin, end)]))
                if reached < value:
                    value = best[end] = reached
                    begin_of[end] = begin
        begins.append(begin_of)
    if best[n] == inf:
        return None
    cuts = [n]
    for begin_of in reversed(begins[1:]):
        cuts.append(begin_of[cuts[-1]])
    return tuple(reversed(cuts))


# ── balanced start and local moves ───────────────────────────────────────────────────────────────────────────────


def balanced(segments: Segments, ranks: Ranks, placement: Sequence[int]) -> Cuts | None:
    """Stages of equal work, then moves of up to three neighbouring cuts by one layer while the objective falls.

    None if this finds no partition within the memory.
    """
    n, stages = segments.n, len(placement)
    if stages > n:
        return None
    shares = [ranks.speed]
    if min(ranks.memory) < inf and max(ranks.memory) > 0:
        by_memory = _memory_shares(segments, ranks)
        shares += [by_memory] if any(by_memory) else []  # all zero where layers take no time
    starts = {_even_cuts(segments, ranks, placement, share, avoid) for share in shares for avoid in (True, False)}
    searches = [_LocalSearch(segments, ranks, placement, list(cuts)) for cuts in starts]
    for search in searches:
        search.descend()
    best = min(searches, key=lambda search: (search.value, search.cuts))
    return None if best.value[0] else tuple(best.cuts)


def _memory_shares(segments: Segments, ranks: Ranks) -> tuple[float, ...]:
    """The share of the work that each rank can do in the same time within its memory, if all layers were equal."""
    whole = 0, segments.n
    work, recompute = segments.work(*whole), segments.recompute_work(*whole)
    static, kept = segments.static_bytes(*whole), segments.activation_bytes(*whole)
    parts = (1.0,) if ranks.recompute else (0.0,) if ranks.recompute is False else tuple(k / 8 for k in range(9))

    def share(rank: int, time: float) -> float:
        """The largest share over some fractions that are recomputed."""
        seconds, limit, in_flight = time * ranks.speed[rank], ranks.memory[rank], ranks.in_flight[rank]
        sizes = [(part, static + in_flight * (1 - part) * kept) for part in parts]
        return max(min(seconds / (work + part * recompute or 1.0), limit / (size or 1.0)) for part, size in sizes)

    low, high = 0.0, 2 * (work + recompute) / min(ranks.speed)
    for _ in range(30):  # the time in which all work is done; the longest one if the memory is too small
        middle = (low + high) / 2
        enough = sum(share(rank, middle) for rank in range(len(ranks))) >= 1
        low, high = (low, middle) if enough else (middle, high)
    return tuple(share(rank, high) for rank in range(len(ranks)))


def _even_cuts(segments: Segments, ranks: Ranks, placement: Sequence[int], share: Sequence[float], avoid: bool) -> Cuts:
    """Stages with work in proportion to ``share`` of their ranks; ``avoid`` cuts whose channel would be the bottleneck.

    Dynamic programming over stages minimises the squared distance of each cut from its ideal place.
    """
    n, stages = segments.n, len(placement)
    extra, before = n - stages, segments.work_before
    weights = [share[rank] for rank in placement]
    time = before[-1] / sum(weights)
    penalty = before[-1] ** 2 * stages  # above any sum of distances
    reached, ideal = [[0.0] * (extra + 1)], time * weights[0]
    for s in range(1, stages):
        costs = [(before[s + o] - ideal) ** 2 for o in range(extra + 1)]
        if avoid and placement[s - 1] != placement[s]:
            slow = time * stages / len(ranks)
            costs = [cost + penalty * (segments.cut_seconds[s + o] > slow) for o, cost in enumerate(costs)]
        reached.append(list(accumulate(map(add, reached[-1], costs), min)))
        ideal += time * weights[s]
    cuts, o = [n], extra
    for s in range(stages - 1, 0, -1):
        o = reached[s].index(reached[s][o])
        cuts.append(s + o)
    return tuple(reversed(cuts))


class _LocalSearch:
    """Cuts with the time of each rank. ``value`` is compared lexicographically: (missing memory as a fraction of the
    limit, bottleneck, sum of the 8th powers of all times relative to it), so that fewer ranks at the bottleneck are
    better."""

    def __init__(self, segments: Segments, ranks: Ranks, placement: Sequence[int], cuts: list[int]) -> None:
        self.segments, self.ranks, self.placement, self.cuts = segments, ranks, placement, cuts
        self.own = [[s for s, other in enumerate(placement) if other == rank] for rank in range(len(ranks))]
        self.channels = [s for s in range(1, len(placement)) if placement[s - 1] != placement[s]]
        self.missing = [0.0] * len(ranks)
        self.times = [self._evaluate(rank) for rank in range(len(ranks))]
        self.value = self._value()

    def descend(self) -> None:
        inner, moving = len(self.cuts) - 1, True
        while moving:
            moving = False
            for first in range(inner):
                for width in (1, 2, 3):
                    for step in (-1, 1):
                        moving |= self._move(first, min(first + width, inner), step)

    def _move(self, first: int, last: int, step: int) -> bool:
        """Move the cuts ``first`` up to ``last`` by one layer; undo it unless the value falls."""
        cuts = self.cuts
        begin = cuts[first - 1] if first else 0
        if cuts[first] + step <= begin or cuts[last - 1] + step >= cuts[last]:
            return False
        before, times, missing = self.value, self.times[:], self.missing[:]
        for at in range(first, last):
            cuts[at] += step
        for rank in set(self.placement[first : last + 1]):
            self.times[rank] = self._evaluate(rank)
        self.value = self._value()
        if self.value < before:
            return True
        for at in range(first, last):
            cuts[at] -= step
        self.value, self.times, self.missing = before, times, missing
        return False

    def _evaluate(self, rank: int) -> float:
        """The rank's time; infinite if its memory is too small, and then ``missing`` says by how much."""
        runs = [(self.cuts[s - 1] if s else 0, self.cuts[s]) for s in self.own[rank]]
        time, ranks = rank_time(self.segments, self.ranks, rank, runs), self.ranks
        self.missing[rank] = 0.0
        if time == inf:
            recomputed = {None: ((), range(len(runs))), True: (range(len(runs)),), False: ((),)}[ranks.recompute]
            size = min(rank_bytes(self.segments, runs, chosen, ranks.in_flight[rank]) for chosen in recomputed)
            self.missing[rank] = max(1e-9, size / (ranks.memory[rank] or 1.0) - 1)
        return time

    def _value(self) -> tuple[float, float, float]:
        channels = [self.segments.cut_seconds[self.cuts[s - 1]] for s in self.channels]
        times = [time for time in self.times if time < inf] + channels
        top = max(times, default=0.0)
        return sum(self.missing), top, sum((time / top) ** 8 for time in times) if top else 0.0
