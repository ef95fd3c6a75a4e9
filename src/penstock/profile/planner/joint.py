"""Cuts and order together: uneven cuts pay only if the order knows them, and an order is only as good as its cuts.

    cuts that are even, or have the least busy ranks ──▶ an order for each ──▶ the best of them
    its neighbours: a few cuts moved by a layer      ──▶ an order for each ──▶ the best of them, and so on

          ┌▶ its neighbours with the same order ──▶ those that are best even so: improve the order ─┐
          └───────────────── the best of these and of what there was, improved as well ◀────────────┘

Where memory is scarce, it is searched in the same way which stages are recomputed: as few as it takes. Of these, micro-
batches are kept where the order has room for them.

How much is done is counted, not timed: the same arguments give the same answer on every machine, but for orders of many
thousand actions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from random import Random

from penstock.profile.planner.cuts import balanced, best_partition, placement_of
from penstock.profile.planner.schedule_cache import (
    COUNTED,
    AdaptedSchedule,
    StageProblem,
    adapt_schedule,
    find_order,
    seconds_per_move,
)
from penstock.profile.planner.segments import Cuts, Ranks, Segments, choose_recompute, stage_costs, static_bytes
from penstock.schedule.costs import Costs
from penstock.schedule.search import SearchResult

__all__ = ["JointResult", "joint_search"]

QUICK = 0.05  # seconds for the order of cuts to start from
TRACKS = 2  # orders that are gone on with
SHORT = 1 / 40  # the part of the time for an order to go on from: a better one would not change any more
STEPS, CLOSE = 150, 3  # changes that are tried on an order at a time, on so many of the neighbours
MOST = 4  # times as many are tried where none helps
LOOK = 4  # to look at a neighbour takes as long as so many changes

Point = tuple[Cuts, frozenset[int]]
"""The cuts, and the stages that are recomputed."""


@dataclass(frozen=True)
class JointResult:
    """Cuts, and the order for them."""

    cuts: Cuts
    again: frozenset[int]
    placement: tuple[int, ...]
    costs: Costs
    found: SearchResult
    static: tuple[float, ...]

    @property
    def memory(self) -> tuple[float, ...]:
        """For each rank, the bytes at its peak."""
        return tuple(map(sum, zip(self.static, self.found.peak_memory, strict=True)))


def joint_search(
    segments: Segments,
    ranks: Ranks,
    m: int,
    *,
    shape: str,
    v: int,
    seconds: float = 3.0,
    moves: bool = True,
    seed: int = 0,
) -> JointResult | None:
    """The best that is found in about ``seconds`` of a usual core; None if nothing keeps the ranks' memory.

    Without a limit on memory, a rank may keep what the fullest rank of 1F1B would; with one that leaves room for more,
    it keeps more if that makes a step shorter.
    """
    search = _Search(segments, ranks, m, placement_of(shape, len(ranks), v), seed)
    _search(search, shape, v, seconds, moves)
    return search.leaner(min(QUICK, seconds / 40)) if search.met else None


def _search(search: _Search, shape: str, v: int, seconds: float, moves: bool) -> None:
    segments, ranks, m = search.segments, search.ranks, search.m
    budget = _Budget(seconds, counted=3 * len(search.placement) * m <= COUNTED)
    quick = min(QUICK, seconds / 40)
    for point in dict.fromkeys(_beginnings(segments, ranks, m, shape, v, exact=moves and budget.counted)):
        search.try_(point, quick)
        budget.spend(quick)
        if not moves and (len(search.met) == 2 or (search.met and budget.left <= 0)):
            break
    if not search.met:
        return
    if not moves:
        if budget.left > 0:
            search.try_(search.points(1)[0], budget.left)
        return
    search.descend(quick, budget, (0.8 if budget.counted else 0.5) * budget.left)
    if not budget.counted:  # a change to such an order takes long, and so does each of many
        search.try_(search.points(1)[0], max(QUICK, budget.left))
        return
    tracks = [search.track(search.points(1)[0], SHORT * seconds, turn) for turn in range(TRACKS)]
    budget.spend(TRACKS * SHORT * seconds)
    left = max(0.0, budget.left)
    for track in tracks:
        track.go_on(0.5 * left / TRACKS)
    best = min(tracks, key=lambda track: track.draft.seconds)
    best.settle(0.25 * left)
    choose = ranks.recompute is None and bool(best.point[1])
    search.try_(best.point, 0.25 * left, choose=choose)


class _Budget:
    """The seconds that are left: of a usual core, where it is counted what is done; else of this one."""

    def __init__(self, seconds: float, *, counted: bool) -> None:
        self._seconds, self.counted, self._begin = seconds, counted, time.thread_time()

    def spend(self, seconds: float) -> None:
        if self.counted:
            self._seconds -= seconds

    @property
    def left(self) -> float:
        return self._seconds - (0.0 if self.counted else time.thread_time() - self._begin)


class _Search:
    """The best so far."""

    def __init__(self, segments: Segments, ranks: Ranks, m: int, placement: tuple[int, ...], seed: int) -> None:
        self.segments, self.ranks, self.m, self.placement, self.seed = segments, ranks, m, placement, seed
        self.met: dict[Point, JointResult] = {}
        self._stages: dict[Point, StageProblem | None] = {}

    @property
    def best(self) -> JointResult:
        return min(self.met.values(), key=lambda one: one.found.makespan)

    def leaner(self, seconds: float) -> JointResult:
        """The best; with an order in 1F1B's memory, if it keeps more than that and takes as long."""
        best = self.best
        stages = None if best.again else self.stages((best.cuts, best.again))
        if stages is None or stages.cap is None:
            return best
        found = find_order(replace(stages, room=(inf,) * len(stages.room)), seconds=seconds, seed=self.seed)
        if found is None or max(found.peak_memory) >= max(best.found.peak_memory):
            return best
        fits = all(peak <= room for peak, room in zip(found.peak_memory, stages.room, strict=True))
        return replace(best, found=found) if fits and found.makespan <= best.found.makespan * (1 + 1e-9) else best

    def points(self, count: int) -> list[Point]:
        """Those with the shortest orders."""
        return sorted(self.met, key=lambda point: self.met[point].found.makespan)[:count]

    def stages(self, point: Point) -> StageProblem | None:
        """None if the ranks have no room for what stays there."""
        if point not in self._stages:
            cuts, again = point
            costs = stage_costs(self.segments, self.ranks, self.placement, cuts)
            static = static_bytes(self.segments, self.placement, cuts, len(self.ranks))
            room = tuple(limit - held for limit, held in zip(self.ranks.memory, static, strict=True))
            self._stages[point] = None if min(room) < 0 else StageProblem(costs, again, self.placement, self.m, room)
        return self._stages[point]

    def try_(self, point: Point, seconds: float, turn: int = 0, *, choose: bool = False) -> SearchResult | None:
        """An order for a point; with ``choose``, for its cuts, whatever is recomputed."""
        stages = self.stages(point)
        found = None if stages is None else find_order(stages, seconds=seconds, seed=self.seed + turn, choose=choose)
        if stages is not None and found is not None:
            self.meet(point, stages, found)
        return found

    def descend(self, each: float, budget: _Budget, least: float) -> None:
        """Go to a better neighbour, as long as there is one and more than the least is left."""
        seen, before = set[Point](), None
        while self.best is not before:
            before = self.best
            for point in _neighbours((before.cuts, before.again), self.placement, self.ranks.recompute):
                stages = None if point in seen else self.stages(point)
                seen.add(point)
                if stages is not None and stages.floor < self.best.found.makespan:
                    if budget.left < least:
                        return
                    self.try_(point, each)
                    budget.spend(each + 60 * seconds_per_move(stages))

    def meet(self, point: Point, stages: StageProblem, found: SearchResult) -> None:
        old = self.met.get(point)
        if old is None or found.makespan < old.found.makespan * (1 - 1e-12):
            static = static_bytes(self.segments, self.placement, point[0], len(self.ranks))
            again = frozenset(a.stage for order in found.schedule.orders for a in order if a.kind == "R")
            self.met[point] = JointResult(point[0], again, self.placement, stages.costs, found, static)

    def track(self, point: Point, seconds: float, turn: int) -> _Descent:
        """One more order for a point that was met, to go on from."""
        stages = self.stages(point)
        assert stages is not None
        found = self.try_(point, seconds, turn) or self.met[point].found
        draft = adapt_schedule(stages, found.schedule, loose=self.ranks.recompute is None)
        return _Descent(self, point, draft, Random(self.seed + turn))


class _Descent:
    """Cuts that are moved and an order that is changed, in turns."""

    def __init__(self, search: _Search, point: Point, draft: AdaptedSchedule, random: Random) -> None:
        self.search, self.point, self.draft, self.random = search, point, draft, random
        self.effort = 1

    def go_on(self, seconds: float) -> None:
        """Do as much as a usual core does in that time."""
        left = seconds / seconds_per_move(self.draft.stages)
        while left > 0:
            near, looks = self._near()
            if not near and self.draft.seconds <= self.draft.floor_of(self.draft.stages) * (1 + 1e-9):
                break  # neither other cuts nor another order can be better
            steps, tried = STEPS * self.effort, list[tuple[Point, AdaptedSchedule]]()
            for point, draft in [(self.point, self.draft), *near[:CLOSE]]:
                tried.append((point, draft.improved(steps, self.random)))
            left -= LOOK * looks + steps * len(tried)
            before = self.draft.seconds
            self.point, self.draft = min(tried, key=lambda pair: pair[1].seconds)
            better = self.draft.seconds < before * (1 - 1e-9)
            self.effort = 1 if better or self.effort == MOST else 2 * self.effort
            if better and self.draft.seconds < self.search.best.found.makespan * 1.05:
                self._meet()

    def settle(self, seconds: float) -> None:
        """Improve the order alone, in one go."""
        self.draft = self.draft.improved(int(seconds / seconds_per_move(self.draft.stages)), self.random)
        self._meet()

    def _meet(self) -> None:
        found = self.draft.finished()
        if found is not None:
            self.search.meet(self.point, self.draft.stages, found)

    def _near(self) -> tuple[list[tuple[Point, AdaptedSchedule]], int]:
        """The neighbours with the order as it is, best first; and how many were looked at."""
        near, looks = [], 1
        for point in _neighbours(self.point, self.search.placement, self.search.ranks.recompute):
            stages = self.search.stages(point)
            if stages is not None and self.draft.floor_of(stages) < self.draft.seconds:
                draft = self.draft.adapted(stages)
                looks += 1
                if draft is not None and draft.seconds < inf:
                    near.append((point, draft))
        return sorted(near, key=lambda pair: pair[1].seconds), looks


def _beginnings(segments: Segments, ranks: Ranks, m: int, shape: str, v: int, *, exact: bool) -> Iterator[Point]:
    """Cuts to start from: for many micro-batches in flight, and for few. ``exact`` ones take longer to find."""
    p, placement = len(ranks), placement_of(shape, len(ranks), v)
    flights = [(float(count),) * p for count in sorted({min(m, p), min(m, max(1, p // 2)), 1})]
    flights.append(tuple(float(min(m, p - rank)) for rank in range(p)))
    for in_flight in flights:
        such = replace(ranks, in_flight=in_flight)
        even = balanced(segments, such, placement)
        if even is not None:
            yield even, _recomputed(segments, such, placement, even)
        if exact or even is None:
            found = best_partition(segments, such, shape, v)
            if found is not None:
                yield found.cuts, _recomputed(segments, such, placement, found.cuts)


def _recomputed(segments: Segments, ranks: Ranks, placement: tuple[int, ...], cuts: Cuts) -> frozenset[int]:
    runs = list(pairwise((0, *cuts)))
    again: set[int] = set()
    for rank in range(len(ranks)):
        own = [stage for stage, home in enumerate(placement) if home == rank]
        chosen = choose_recompute(segments, ranks, rank, [runs[stage] for stage in own])
        again.update(own[number] for number in chosen or ())
    return frozenset(again)


def _neighbours(point: Point, placement: tuple[int, ...], recompute: bool | None) -> Iterator[Point]:
    """A few neighbouring cuts moved by a layer; or one stage more or less recomputed, or another of the same rank."""
    cuts, again = point
    inner = cuts[:-1]
    for width in (1, 2, 4, 8):
        if width > max(1, len(inner)):
            break
        for k in range(len(inner) - width + 1):
            for step in (-1, 1):
                moved = (*inner[:k], *(at + step for at in inner[k : k + width]), *inner[k + width :], cuts[-1])
                if all(a < b for a, b in pairwise((0, *moved))):
                    yield moved, again
    if recompute is None:
        for stage, rank in enumerate(placement):
            yield cuts, again ^ {stage}
            for other, home in enumerate(placement):
                if home == rank and stage in again and other not in again:
                    yield cuts, again ^ {stage, other}
