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

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from math import comb, exp, inf
from operator import add
from random import Random

import torch

from penstock.errors import PlanError
from penstock.profile.planner.bounds import by_counts, by_kinds, floor
from penstock.profile.planner.pairs import Pairs, ThereAndBack, TwiceRound
from penstock.profile.planner.rounds import Rounds
from penstock.profile.planner.segments import Cuts, Ranks, Segments, bottleneck, fits, price, rank_bytes, rank_time
from penstock.profile.planner.weighed import Weighed
from penstock.schedule.schedule import loop, vee

__all__ = [
    "Partition",
    "anneal",
    "balanced",
    "best_partition",
    "brute_force",
    "count_partitions",
    "least_memory",
    "placement_of",
]


# Cuts that are good enough to start from, at once: even stages, moved as long as a move helps.

Value = tuple[float, float, float]
"""How much memory ranks lack, the time of the busiest rank or channel, and how uneven these are."""


def balanced(segments: Segments, ranks: Ranks, placement: Sequence[int]) -> Cuts | None:
    """Even stages, moved until no move of up to three neighbouring cuts by a layer lets the busiest rank have less."""
    n, stages = segments.n, len(placement)
    if stages > n:
        return None
    shares = [ranks.speed]
    if min(ranks.memory) < inf and max(ranks.memory) > 0:
        shares += [share for share in [_shares(segments, ranks)] if any(share)]  # none where layers take no time
    starts = {_even_cuts(segments, ranks, placement, share, avoid) for share in shares for avoid in (True, False)}
    states = [_moved(_State(segments, ranks, placement, list(cuts))) for cuts in starts]
    best = min(states, key=lambda state: (state.value, state.cuts))
    return None if best.value[0] else tuple(best.cuts)


def _moved(state: _State) -> _State:
    moving = True
    while moving:
        moving = False
        for k, width, step in _moves(len(state.cuts) - 1):
            moving |= state.move(k, min(k + width, len(state.cuts) - 1), step)
    return state


def _shares(segments: Segments, ranks: Ranks) -> tuple[float, ...]:
    """How much of the work ranks can do in the same time, with the memory that they have, if all layers were alike."""
    whole = 0, segments.n
    work, again = segments.work(*whole), segments.again(*whole)
    stays, kept = segments.static(*whole), segments.activation(*whole)
    parts = (1.0,) if ranks.recompute else (0.0,) if ranks.recompute is False else tuple(k / 8 for k in range(9))

    def share(rank: int, time: float) -> float:
        """Of all work; the best of some parts that are recomputed."""
        seconds, limit, flight = time * ranks.speed[rank], ranks.memory[rank], ranks.in_flight[rank]
        sizes = [(part, stays + flight * (1 - part) * kept) for part in parts]
        return max(min(seconds / (work + part * again or 1.0), limit / (size or 1.0)) for part, size in sizes)

    low, high = 0.0, 2 * (work + again) / min(ranks.speed)
    for _ in range(30):  # the time in which they do all of it; in the longest one, if their memory is too small
        middle = (low + high) / 2
        enough = sum(share(rank, middle) for rank in range(len(ranks))) >= 1
        low, high = (low, middle) if enough else (middle, high)
    return tuple(share(rank, high) for rank in range(len(ranks)))


def _even_cuts(segments: Segments, ranks: Ranks, placement: Sequence[int], share: Sequence[float], avoid: bool) -> Cuts:
    """Stages of as much work as their ranks' shares; cuts that take longer than a rank are avoided, or not.

    Of all cuts they are those with the least distance, squared, from where the work of the stages before would end.
    """
    n, stages = segments.n, len(placement)
    extra, done = n - stages, segments.done
    speeds = [share[rank] for rank in placement]
    time = done[-1] / sum(speeds)
    slow = done[-1] ** 2 * stages  # worse than any distance
    reached, ends = [[0.0] * (extra + 1)], time * speeds[0]
    for s in range(1, stages):
        far = [(done[s + o] - ends) ** 2 for o in range(extra + 1)]
        if avoid and placement[s - 1] != placement[s]:
            far = [one + slow * (segments.transfer[s + o] > time * stages / len(ranks)) for o, one in enumerate(far)]
        reached.append(list(accumulate(map(add, reached[-1], far), min)))
        ends += time * speeds[s]
    cuts, o = [n], extra
    for s in range(stages - 1, 0, -1):
        o = reached[s].index(reached[s][o])
        cuts.append(s + o)
    return tuple(reversed(cuts))


def _moves(inner: int) -> Iterator[tuple[int, int, int]]:
    for k in range(inner):
        for width in (1, 2, 3):
            for step in (-1, 1):
                yield k, width, step


class _State:
    """Cuts, and what each rank takes with them."""

    def __init__(self, segments: Segments, ranks: Ranks, placement: Sequence[int], cuts: list[int]) -> None:
        self.segments, self.ranks, self.placement, self.cuts = segments, ranks, placement, cuts
        self.own = [[s for s, home in enumerate(placement) if home == rank] for rank in range(len(ranks))]
        self.between = [s for s in range(1, len(cuts)) if placement[s - 1] != placement[s]]
        self.lacking = [0.0] * len(ranks)
        self.times = [self._time(rank) for rank in range(len(ranks))]
        self.value = self._value()

    def move(self, first: int, last: int, step: int) -> bool:
        """Move the cuts from the first up to the last by a layer, if that is better."""
        cuts = self.cuts
        begin = cuts[first - 1] if first else 0
        if cuts[first] + step <= begin or cuts[last - 1] + step >= cuts[last]:
            return False
        touched = set(self.placement[first : last + 1])
        before, times, lacking = self.value, self.times[:], self.lacking[:]
        self._shift(first, last, step)
        for rank in touched:
            self.times[rank] = self._time(rank)
        self.value = self._value()
        if self.value < before:
            return True
        self._shift(first, last, -step)
        self.value, self.times, self.lacking = before, times, lacking
        return False

    def _shift(self, first: int, last: int, step: int) -> None:
        for at in range(first, last):
            self.cuts[at] += step

    def _time(self, rank: int) -> float:
        runs = [(self.cuts[s - 1] if s else 0, self.cuts[s]) for s in self.own[rank]]
        time, ranks = rank_time(self.segments, self.ranks, rank, runs), self.ranks
        self.lacking[rank] = 0.0
        if time == inf:
            choices = (False, True) if ranks.recompute is None else (ranks.recompute,)
            every = range(len(runs))
            size = min(
                rank_bytes(self.segments, runs, every if again else (), ranks.in_flight[rank]) for again in choices
            )
            self.lacking[rank] = max(1e-9, size / (ranks.memory[rank] or 1.0) - 1)
        return time

    def _value(self) -> Value:
        """Of two equal bottlenecks the one with fewer such ranks is less."""
        transfer = self.segments.transfer
        lacking = sum(self.lacking)
        fine = [time for time in self.times if time < inf] + [transfer[self.cuts[s - 1]] for s in self.between]
        top = max(fine, default=0.0)
        return lacking, top, sum((time / top) ** 8 for time in fine) if top else 0.0


# Cuts that are moved at random, less and less: a way out of where no single move helps any more.

_POWER = 24  # so that the busiest rank counts most, and the next ones a little
_HOT, _COLD = 0.5, 1e-3  # by how much a move may be worse
_LACKING = 4.0  # a rank that lacks memory, or a slow cut, is like one that takes so many times what it should


def anneal(
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
        time = rank_time(segments, ranks, rank, [(at[s], at[s + 1]) for s in own[rank]])
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


# All cuts, tried one by one: where these are few, nothing finds the best of them faster.


def count_partitions(segments: Segments, placement: tuple[int, ...]) -> int:
    """How many cuts there are."""
    return comb(segments.n - 1, len(placement) - 1)


def brute_force(
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
                met[key] = rank_time(segments, ranks, rank, [(at[s], at[s + 1]) for s in mine])
            busiest = max(busiest, met[key])
        if busiest < value:
            best, value = at[1:], busiest
    return best, value


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
class Partition:
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


def best_partition(segments: Segments, ranks: Ranks, shape: str, v: int) -> Partition | None:
    """The cuts of the least busiest rank; None if no cuts keep the memory."""
    p, n = len(ranks), segments.n
    if p * v > n:
        return None
    if shape == "v" and v != 2:
        raise PlanError(f"a V has two stages a rank, not {v}")
    placement = placement_of(shape, p, v)
    start, low = balanced(segments, ranks, placement), floor(segments, ranks)
    value = _any_time(segments, ranks) if start is None else bottleneck(segments, ranks, placement, start)
    few = _are_few(segments, placement, v)
    for bound in (by_counts, by_kinds) if start is not None and not few else (by_counts,):
        if value > low * _SAME:
            low = bound(segments, ranks, placement, low, value)
    known = Partition(start or (), value, min(low, value))
    if value > low * _SAME:
        known = _better(segments, ranks, placement, shape, known)
    return known if known.cuts else None


def _are_few(segments: Segments, placement: tuple[int, ...], v: int) -> bool:
    return count_partitions(segments, placement) <= _FEW[v > 2]


def _better(segments: Segments, ranks: Ranks, placement: tuple[int, ...], shape: str, known: Partition) -> Partition:
    v = len(placement) // len(ranks)
    if _are_few(segments, placement, v):
        best, value = brute_force(segments, ranks, placement, known.cuts, known.busiest)
        return Partition(best, value, value)
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
        found = _straight(segments, more, inf) if v == 1 else balanced(segments, more, placement)
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


def _least(
    segments: Segments, ranks: Ranks, placement: Sequence[int], known: Partition, ask: _Straight | Pairs
) -> Partition:
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
    return Partition(best, high, min(high, max(floor, ask.bound)))


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


def _rounds(segments: Segments, ranks: Ranks, placement: tuple[int, ...], known: Partition) -> Partition:
    """Better cuts, or a proof that there are none, as far as the effort goes."""
    best, value, low = known.cuts, known.busiest, known.bound
    if best:
        for start in (best, anneal(segments, ranks, placement, best, low, _PART)):
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
    return Partition(best, value, min(low, value))


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
