"""Search cuts and schedule together: uneven cuts pay off only with an order that is made for them.

    balanced and annealed cuts              ──▶ an order for each ──▶ the best of them
    neighbours: cuts moved by one layer     ──▶ an order for each ──▶ the best of them, and so on

          ┌▶ neighbours with the same order ──▶ improve the order of the best of these ─┐
          └───────────── the best of them and of the current one, improved ◀────────────┘

Where memory is scarce, the set of recomputed stages is searched in the same way: as few as possible.

Effort is counted, not timed: the same arguments give the same result on every machine, except for orders of several
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
    DETERMINISTIC_ACTIONS,
    AdaptedSchedule,
    StageProblem,
    adapt_schedule,
    find_order,
    seconds_per_move,
)
from penstock.profile.planner.segments import Cuts, Ranks, Segments, choose_recompute, rank_static_bytes, stage_costs
from penstock.schedule.costs import Costs
from penstock.schedule.search import SearchResult

QUICK = 0.05  # seconds for the order of initial cuts
DESCENTS = 2  # descents from the best cuts, with different orders
START_SHARE = 1 / 40  # share of the time for the first order of a descent: a better one would not adapt any more
MOVES, NEIGHBOURS = 150, 3  # tabu moves at a time, on this many neighbours
MAX_EFFORT = 4  # times as many moves where none helps
EVALUATION_MOVES = 4  # evaluating a neighbour takes as long as this many moves

Point = tuple[Cuts, frozenset[int]]
"""The cuts, and the recomputed stages."""


@dataclass(frozen=True)
class JointResult:
    """Cuts with a schedule for them."""

    cuts: Cuts
    recomputed: frozenset[int]
    placement: tuple[int, ...]
    costs: Costs
    result: SearchResult
    static: tuple[float, ...]

    @property
    def memory(self) -> tuple[float, ...]:
        """Peak bytes of each rank."""
        return tuple(map(sum, zip(self.static, self.result.peak_memory, strict=True)))


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
    """The best cuts and schedule found in about ``seconds`` of CPU time; None if nothing fits the memory.

    Without a memory limit, a rank stores no more activations than the fullest rank of 1F1B. Within a limit it stores
    more if that makes the step faster. Without ``moves``, only the initial cuts are tried.
    """
    search = _Search(segments, ranks, m, placement_of(shape, len(ranks), v), seed)
    search.run(shape, v, seconds, moves)
    return search.with_least_memory(min(QUICK, seconds / 40)) if search.found else None


class _Budget:
    """The seconds that are left: counted as typical CPU time, or measured."""

    def __init__(self, seconds: float, *, counted: bool) -> None:
        self._seconds, self.counted, self._begin = seconds, counted, time.thread_time()

    def spend(self, seconds: float) -> None:
        if self.counted:
            self._seconds -= seconds

    @property
    def left(self) -> float:
        return self._seconds - (0.0 if self.counted else time.thread_time() - self._begin)


class _Search:
    """All results so far, by their cuts and recomputed stages."""

    def __init__(self, segments: Segments, ranks: Ranks, m: int, placement: tuple[int, ...], seed: int) -> None:
        self.segments, self.ranks, self.m, self.placement, self.seed = segments, ranks, m, placement, seed
        self.found: dict[Point, JointResult] = {}
        self._stages: dict[Point, StageProblem | None] = {}

    @property
    def best(self) -> JointResult:
        return self.found[self.best_point]

    @property
    def best_point(self) -> Point:
        return min(self.found, key=lambda point: self.found[point].result.makespan)

    def run(self, shape: str, v: int, seconds: float, moves: bool) -> None:
        budget = _Budget(seconds, counted=3 * len(self.placement) * self.m <= DETERMINISTIC_ACTIONS)
        quick = min(QUICK, seconds / 40)
        starts = _initial_points(self.segments, self.ranks, self.m, shape, v, annealed=moves and budget.counted)
        for point in dict.fromkeys(starts):
            self.try_point(point, quick)
            budget.spend(quick)
            if not moves and (len(self.found) == 2 or (self.found and budget.left <= 0)):
                break
        if not self.found:
            return
        if not moves:
            if budget.left > 0:
                self.try_point(self.best_point, budget.left)
            return
        self.descend(quick, budget, (0.8 if budget.counted else 0.5) * budget.left)
        if not budget.counted:  # orders of so many actions are too slow to adapt
            self.try_point(self.best_point, max(QUICK, budget.left))
            return
        descents = [self.begin_descent(self.best_point, START_SHARE * seconds, turn) for turn in range(DESCENTS)]
        budget.spend(DESCENTS * START_SHARE * seconds)
        left = max(0.0, budget.left)
        for descent in descents:
            descent.run(0.5 * left / DESCENTS)
        best = min(descents, key=lambda descent: descent.adapted.seconds)
        best.improve_order(0.25 * left)
        choose_recompute = self.ranks.recompute is None and bool(best.point[1])
        self.try_point(best.point, 0.25 * left, choose_recompute=choose_recompute)

    def with_least_memory(self, seconds: float) -> JointResult:
        """The best result; with an order that needs no more memory than 1F1B, if that takes as long."""
        best = self.best
        stages = None if best.recomputed else self.stages((best.cuts, best.recomputed))
        if stages is None or stages.cap is None:
            return best
        found = find_order(replace(stages, memory=(inf,) * len(stages.memory)), seconds=seconds, seed=self.seed)
        if found is None or max(found.peak_memory) >= max(best.result.peak_memory):
            return best
        fits = all(peak <= limit for peak, limit in zip(found.peak_memory, stages.memory, strict=True))
        same = found.makespan <= best.result.makespan * (1 + 1e-9)
        return replace(best, result=found) if fits and same else best

    def stages(self, point: Point) -> StageProblem | None:
        """The scheduling problem of a point; None if a rank has no memory for the static bytes."""
        if point not in self._stages:
            cuts, recomputed = point
            costs = stage_costs(self.segments, self.ranks, self.placement, cuts)
            static = rank_static_bytes(self.segments, self.placement, cuts, len(self.ranks))
            left = tuple(limit - size for limit, size in zip(self.ranks.memory, static, strict=True))
            problem = StageProblem(costs, recomputed, self.placement, self.m, left)
            self._stages[point] = None if min(left) < 0 else problem
        return self._stages[point]

    def try_point(
        self, point: Point, seconds: float, turn: int = 0, *, choose_recompute: bool = False
    ) -> SearchResult | None:
        """Search an order for a point; with ``choose_recompute``, for its cuts only."""
        stages = self.stages(point)
        if stages is None:
            return None
        found = find_order(stages, seconds=seconds, seed=self.seed + turn, choose_recompute=choose_recompute)
        if found is not None:
            self.add(point, stages, found)
        return found

    def descend(self, each: float, budget: _Budget, reserve: float) -> None:
        """Move to better neighbours while there are any and more than ``reserve`` of the budget is left."""
        seen, before = set[Point](), None
        while self.best is not before:
            before = self.best
            for point in _neighbours((before.cuts, before.recomputed), self.placement, self.ranks.recompute):
                stages = None if point in seen else self.stages(point)
                seen.add(point)
                if stages is not None and stages.lower_bound < self.best.result.makespan:
                    if budget.left < reserve:
                        return
                    self.try_point(point, each)
                    budget.spend(each + 60 * seconds_per_move(stages))

    def add(self, point: Point, stages: StageProblem, found: SearchResult) -> None:
        old = self.found.get(point)
        if old is None or found.makespan < old.result.makespan * (1 - 1e-12):
            static = rank_static_bytes(self.segments, self.placement, point[0], len(self.ranks))
            recomputed = frozenset(a.stage for order in found.schedule.orders for a in order if a.kind == "R")
            self.found[point] = JointResult(point[0], recomputed, self.placement, stages.costs, found, static)

    def begin_descent(self, point: Point, seconds: float, turn: int) -> _Descent:
        """A descent from a point, with one more order for it."""
        stages = self.stages(point)
        assert stages is not None
        found = self.try_point(point, seconds, turn) or self.found[point].result
        adapted = adapt_schedule(stages, found.schedule, recompute_optional=self.ranks.recompute is None)
        return _Descent(self, point, adapted, Random(self.seed + turn))


class _Descent:
    """Alternately moves cuts and improves the order."""

    def __init__(self, search: _Search, point: Point, adapted: AdaptedSchedule, random: Random) -> None:
        self.search, self.point, self.adapted, self.random = search, point, adapted, random
        self.effort = 1

    def run(self, seconds: float) -> None:
        """Spend about ``seconds`` of typical CPU time."""
        left = seconds / seconds_per_move(self.adapted.stages)
        while left > 0:
            near, evaluated = self._adapted_neighbours()
            bound = self.adapted.lower_bound_for(self.adapted.stages)
            if not near and self.adapted.seconds <= bound * (1 + 1e-9):
                break  # neither other cuts nor another order can be better
            moves, improved = MOVES * self.effort, list[tuple[Point, AdaptedSchedule]]()
            for point, adapted in [(self.point, self.adapted), *near[:NEIGHBOURS]]:
                improved.append((point, adapted.improved(moves, self.random)))
            left -= EVALUATION_MOVES * evaluated + moves * len(improved)
            before = self.adapted.seconds
            self.point, self.adapted = min(improved, key=lambda pair: pair[1].seconds)
            better = self.adapted.seconds < before * (1 - 1e-9)
            self.effort = 1 if better or self.effort == MAX_EFFORT else 2 * self.effort
            if better and self.adapted.seconds < self.search.best.result.makespan * 1.05:
                self._add_result()

    def improve_order(self, seconds: float) -> None:
        """Improve the order alone."""
        self.adapted = self.adapted.improved(int(seconds / seconds_per_move(self.adapted.stages)), self.random)
        self._add_result()

    def _add_result(self) -> None:
        found = self.adapted.result()
        if found is not None:
            self.search.add(self.point, self.adapted.stages, found)

    def _adapted_neighbours(self) -> tuple[list[tuple[Point, AdaptedSchedule]], int]:
        """The neighbours with the current order, best first, and the number of evaluations."""
        near, evaluated = [], 1
        for point in _neighbours(self.point, self.search.placement, self.search.ranks.recompute):
            stages = self.search.stages(point)
            if stages is not None and self.adapted.lower_bound_for(stages) < self.adapted.seconds:
                adapted = self.adapted.adapted(stages)
                evaluated += 1
                if adapted is not None and adapted.seconds < inf:
                    near.append((point, adapted))
        return sorted(near, key=lambda pair: pair[1].seconds), evaluated


def _initial_points(segments: Segments, ranks: Ranks, m: int, shape: str, v: int, *, annealed: bool) -> Iterator[Point]:
    """Cuts to start from, for many micro-batches in flight and for few; ``annealed`` ones take longer to find."""
    p, placement = len(ranks), placement_of(shape, len(ranks), v)
    in_flight = [(float(count),) * p for count in sorted({min(m, p), min(m, max(1, p // 2)), 1})]
    in_flight.append(tuple(float(min(m, p - rank)) for rank in range(p)))
    for counts in in_flight:
        limits = replace(ranks, in_flight=counts)
        cuts = balanced(segments, limits, placement)
        if cuts is not None:
            yield cuts, _recomputed(segments, limits, placement, cuts)
        if annealed or cuts is None:
            found = best_partition(segments, limits, shape, v)
            if found is not None:
                yield found.cuts, _recomputed(segments, limits, placement, found.cuts)


def _recomputed(segments: Segments, ranks: Ranks, placement: tuple[int, ...], cuts: Cuts) -> frozenset[int]:
    """The stages to recompute so that every rank fits its memory."""
    runs = list(pairwise((0, *cuts)))
    recomputed: set[int] = set()
    for rank in range(len(ranks)):
        own = [stage for stage, other in enumerate(placement) if other == rank]
        chosen = choose_recompute(segments, ranks, rank, [runs[stage] for stage in own])
        recomputed.update(own[number] for number in chosen or ())
    return frozenset(recomputed)


def _neighbours(point: Point, placement: tuple[int, ...], recompute: bool | None) -> Iterator[Point]:
    """Some adjacent cuts moved by one layer; or one stage more, less or instead of another on its rank recomputed."""
    cuts, recomputed = point
    inner = cuts[:-1]
    for width in (1, 2, 4, 8):
        if width > max(1, len(inner)):
            break
        for k in range(len(inner) - width + 1):
            for step in (-1, 1):
                moved = (*inner[:k], *(at + step for at in inner[k : k + width]), *inner[k + width :], cuts[-1])
                if all(a < b for a, b in pairwise((0, *moved))):
                    yield moved, recomputed
    if recompute is None:
        for stage, rank in enumerate(placement):
            yield cuts, recomputed ^ {stage}
            for other, rank_of_other in enumerate(placement):
                if rank_of_other == rank and stage in recomputed and other not in recomputed:
                    yield cuts, recomputed ^ {stage, other}
