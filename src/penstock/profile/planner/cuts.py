"""Where to cut, so that the busiest rank has as little to do for a micro-batch as it can.

    straight   rank 0 │ rank 1 │ rank 2                 one run of layers each
    v          rank 0 │ rank 1 │ rank 2 │ 2 │ 1 │ 0      there and back
    loop       rank 0 │ rank 1 │ rank 2 │ 0 │ 1 │ 2      round and round

A rank's time is that of its stages together, over its speed; a channel's is that of what crosses its cut. All ranks
keep within their memory: what stays, and the activations of as many micro-batches as are in flight.

Where there are few cuts, all are tried. How the best of many are found: even cuts are moved as long as it helps, and
compared with times that no cuts can be below (see ``bounds``). Where that leaves a gap, whether all can keep below some
time is decided by going through the ranks; the least such time is approached by halving, until no cuts do better than
those that were found. So straight cuts are exact: no others have a busiest rank with less to do. So are those of a V,
and of a loop with two stages a rank (see ``pairs``), up to several hundred layers: then there can be too many ways to
get there.

Where a loop has more stages a rank, cuts are moved at random, and two rounds are cut at a time, the others being as
they are. Then all cuts are gone through that can be better (see ``rounds``): these are few where there are not many
more layers than stages, or where what was found is close to a bound. Where they are too many, it is not proven.

The answer has a bound, which says how good it is for certain: it is exact where that leaves no gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf

import torch

from penstock.errors import PlanError
from penstock.profile.planner.bounds import by_counts, by_kinds, floor
from penstock.profile.planner.evened import evened
from penstock.profile.planner.pairs import Pairs, ThereAndBack, TwiceRound
from penstock.profile.planner.rounds import Rounds
from penstock.profile.planner.segments import Segments
from penstock.profile.planner.shaken import shaken
from penstock.profile.planner.times import Cuts, Ranks, bottleneck, fits
from penstock.profile.planner.tried import best_of_all, count
from penstock.profile.planner.weighed import Weighed
from penstock.schedule.placement import loop, vee

__all__ = ["Cut", "cut", "least_memory", "placement_of"]

_CLOSE = 2e-3  # by how much the halving may miss, before the rest is done exactly
_EFFORT = 2_000_000  # what is looked at, in about a microsecond each
_TWO_ROUNDS = _EFFORT // 16
_PART = _EFFORT // 5  # for moves at random, and for a proof: in much less than a microsecond
_SAME = 1 + 1e-9
_LESS = 1 + 1e-11  # what is less by rounding alone is not less
_FEW = 1000, 20_000  # cuts, which are tried one by one; where a rank has three or more stages, more of them
_PASSES = 500_000  # stages and places that are weighed
_NEXT = (1.003, 1.01, 1.03, 1.1, 1.3)  # times that are tried, over the least that there can be


@dataclass(frozen=True)
class Cut:
    """Cuts, the time of their busiest rank or channel, and a time that no cuts can be below."""

    cuts: Cuts
    busiest: float
    bound: float

    @property
    def gap(self) -> float:
        """How far above the bound: 0 where these are the best cuts."""
        return self.busiest / self.bound - 1 if self.bound else 0.0


def placement_of(shape: str, p: int, v: int) -> tuple[int, ...]:
    """The rank of each stage."""
    return vee(p) if shape == "v" else loop(p, v)


def cut(segments: Segments, ranks: Ranks, shape: str, v: int) -> Cut | None:
    """The cuts of the least busiest rank; None if no cuts keep the memory."""
    p, n = len(ranks), segments.n
    if p * v > n:
        return None
    if shape == "v" and v != 2:
        raise PlanError(f"a V has two stages a rank, not {v}")
    placement = placement_of(shape, p, v)
    start, low = evened(segments, ranks, placement), floor(segments, ranks)
    value = _any_time(segments, ranks) if start is None else bottleneck(segments, ranks, placement, start)
    few = _are_few(segments, placement, v)
    for bound in (by_counts, by_kinds) if start is not None and not few else (by_counts,):
        if value > low * _SAME:
            low = bound(segments, ranks, placement, low, value)
    known = Cut(start or (), value, min(low, value))
    if value > low * _SAME:
        known = _better(segments, ranks, placement, shape, known)
    return known if known.cuts else None


def _are_few(segments: Segments, placement: tuple[int, ...], v: int) -> bool:
    return count(segments, placement) <= _FEW[v > 2]


def _better(segments: Segments, ranks: Ranks, placement: tuple[int, ...], shape: str, known: Cut) -> Cut:
    v = len(placement) // len(ranks)
    if _are_few(segments, placement, v):
        best, value = best_of_all(segments, ranks, placement, known.cuts, known.busiest)
        return Cut(best, value, value)
    if v == 1:
        return _least(segments, ranks, placement, known, _Straight(segments, ranks))
    elsewhere = torch.get_default_device().type != "cpu"  # as it is where models are made that have no numbers yet
    with torch.device("cpu") if elsewhere else nullcontext():
        if v > 2:
            return _rounds(segments, ranks, placement, known)
        effort = _EFFORT if known.cuts else _EFFORT // 2  # there may be none
        ask = (ThereAndBack if shape == "v" else TwiceRound)(segments, ranks, known.busiest, effort)
        return _least(segments, ranks, placement, known, ask)


def least_memory(segments: Segments, ranks: Ranks, shape: str, v: int) -> float:
    """How many times the memory that they have ranks would need, for there to be cuts; to a hundredth."""
    placement = placement_of(shape, len(ranks), v)

    def enough(factor: float) -> bool:
        more = replace(ranks, memory=tuple(factor * size for size in ranks.memory))
        found = _straight(segments, more, inf) if v == 1 else evened(segments, more, placement)
        return found is not None

    low, high = 0.0, 1.0
    while not enough(high):
        low, high = high, 2 * high
    while high - low > 1e-2 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


class _Straight:
    """Straight cuts with which every rank keeps below a time."""

    def __init__(self, segments: Segments, ranks: Ranks) -> None:
        self.segments, self.ranks = segments, ranks
        self.bound = 0.0  # no cuts keep below this: that is sure

    def __call__(self, below: float) -> Cuts | None:
        found = _straight(self.segments, self.ranks, below)
        if found is None:
            self.bound = max(self.bound, below)
        return found


def _least(segments: Segments, ranks: Ranks, placement: Sequence[int], known: Cut, ask: _Straight | Pairs) -> Cut:
    """The best cuts, asked for at times closer and closer to what they have; first for any, where none are known."""
    best, high, floor = known.cuts, known.busiest, known.bound
    low, tries, many = floor, [floor * more for more in (1 + 1e-12, *_NEXT)], False
    while low < high and high > floor * (1 + 1e-12):
        near = high - low <= _CLOSE * high and not many
        middle = high if near or not best else (low + high) / 2
        if tries and (not best or tries[0] < middle):
            middle = min(tries.pop(0), high)
        found = ask(middle)
        if found is None:
            low, many = middle, False
            continue
        reached = bottleneck(segments, ranks, placement, found)
        if not reached < high:  # by rounding alone
            break
        many = near and reached > (low + high) / 2  # there are others that are hardly better
        best, high, tries = found, reached, []
    return Cut(best, high, min(high, max(floor, ask.bound)))


# ── one run of layers a rank ─────────────────────────────────────────────────────────────────────────────────────


def _straight(segments: Segments, ranks: Ranks, below: float) -> Cuts | None:
    n, p = segments.n, len(ranks)
    after = [0.0, *accumulate(below * speed for speed in reversed(ranks.speed))]
    lefts = [work * _SAME for work in after[-2::-1]]  # what the ranks after one can do
    came_from: list[dict[int, int]] = []
    reached = [0]
    for rank in range(p):
        fresh: dict[int, int] = {}
        last, left = n - (p - rank - 1), lefts[rank]
        end = 0
        for begin in reached:
            # Who begins later gets as far, or further; but not if what comes to the stage there is more to keep.
            end = max(end, begin + 1) if ranks.recompute is False else begin + 1
            while end <= last and fits(segments, ranks, rank, below, ((begin, end),)):
                if (segments.transfer[end] < below or end == n) and segments.work(end, n) <= left:
                    fresh[end] = begin
                end += 1
        came_from.append(fresh)
        reached = sorted(fresh)
    if n not in came_from[-1]:
        return None
    cuts = [n]
    for steps in reversed(came_from[1:]):
        cuts.append(steps[cuts[-1]])
    return tuple(reversed(cuts))


# ── more than two runs a rank ────────────────────────────────────────────────────────────────────────────────────


def _rounds(segments: Segments, ranks: Ranks, placement: tuple[int, ...], known: Cut) -> Cut:
    """Better cuts, or a proof that there are none, as far as the effort goes."""
    best, value, low = known.cuts, known.busiest, known.bound
    if best:
        for start in (best, shaken(segments, ranks, placement, best, low, _PART)):
            found, reached = _two_rounds_at_a_time(segments, ranks, placement, start, low)
            if reached < value:
                best, value = found, reached
    effort = _PART
    passes = max(20, min(200, _PASSES // (len(placement) * (segments.n - len(placement) + 10))))
    while value > low * _SAME and effort > 0:
        weighed = Weighed(segments, ranks, placement, value / _LESS, passes, low)
        low = min(value, max(low, weighed.bound))
        rounds = Rounds(segments, ranks, weighed, effort)
        better, effort = rounds.search(), rounds.effort
        if better is None:
            low = value / _LESS if effort >= 0 else low
            break
        best, value = better, bottleneck(segments, ranks, placement, better)
    return Cut(best, value, min(low, value))


def _any_time(segments: Segments, ranks: Ranks) -> float:
    """More than ranks or channels have to do with any cuts."""
    work = segments.work(0, segments.n) + segments.again(0, segments.n)
    return 1 + 2 * max(work / min(ranks.speed), *segments.transfer)


def _two_rounds_at_a_time(
    segments: Segments, ranks: Ranks, placement: Sequence[int], best: Cuts, low: float
) -> tuple[Cuts, float]:
    """Two neighbouring rounds are cut anew, as long as that lets the busiest rank have less."""
    p, v = len(ranks), len(placement) // len(ranks)
    value = bottleneck(segments, ranks, placement, best)
    first, tried, effort = 0, 0, _TWO_ROUNDS
    while tried < v - 1 and value > low * _SAME and effort > 0:
        begin, end = first * p, (first + 2) * p
        runs = list(pairwise((0, *best)))
        other = [[runs[stage] for stage in range(rank, v * p, p) if not begin <= stage < end] for rank in range(p)]
        ask = TwiceRound(segments, ranks, value, effort, (runs[begin][0], runs[end - 1][1]), other)
        tried += 1
        while (found := ask(low + (value - low) / 2) or ask(value)) is not None:
            whole = (*best[:begin], *found, *best[end:])
            reached = bottleneck(segments, ranks, placement, whole)
            if not reached < value:
                break
            best, value, tried = whole, reached, 0
        first, effort = (first + 1) % (v - 1), ask.effort
    return best, value
