"""Joint search of cuts and schedule: uneven cuts are faster only with an order that is optimized for them.

    balanced cuts ──▶ an order for each ──▶ the best of them

    ┌▶ neighbours: cuts moved by one layer, with the same order ──▶ improve the orders of the best neighbours ─┐
    └──────────────────── the best of these and of the current cuts ◀──────────────────────────────────────────┘

If memory is limited, neighbours also differ in the set of recomputed stages.

The budget is a number of moves, not time: the same arguments give the same result on every machine, except for orders
of several thousand actions. This is the only module outside ``schedule.search`` that uses its encoded orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from random import Random

from penstock.errors import ScheduleError
from penstock.profile.planner.cuts import (
    Cuts,
    Ranks,
    Segments,
    choose_recompute,
    find_cuts,
    placement_of,
    rank_runs,
    rank_static_bytes,
    stage_costs,
)
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Schedule
from penstock.schedule.search import SearchResult, auto
from penstock.schedule.search.lower_bound import lower_bound
from penstock.schedule.search.orders import encode, simulate_orders, with_recomputes, without_weight_grads
from penstock.schedule.search.place_weight_grads import evaluate, place_weight_grads
from penstock.schedule.search.problem import Orders, Problem, make_problem
from penstock.schedule.search.tabu import NodeTable, tabu_search

DETERMINISTIC_ACTIONS = 4000  # for more actions, ``auto`` has a time limit, and orders are not adapted
QUICK = 0.05  # seconds for the order of initial cuts
START_SHARE = 1 / 40  # share of the time for the first order; a better order adapts worse to other cuts
MOVES, NEIGHBOURS = 150, 3  # tabu moves per round and order; number of neighbours that are improved
MAX_EFFORT = 4  # largest factor for the number of moves, while no move helps
EVALUATION_MOVES = 4  # cost of evaluating a neighbour, in moves

Point = tuple[Cuts, frozenset[int]]
"""Cuts and recomputed stages."""


# ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class StageProblem:
    """Stages to schedule: their costs, the recomputed ones, and the memory for activations on each rank.

    With ``recompute_optional``, an order may keep activations of the recomputed stages if memory allows.
    """

    costs: Costs
    recomputed: frozenset[int]
    placement: tuple[int, ...]
    m: int
    memory: tuple[float, ...]
    recompute_optional: bool = False

    @property
    def cap(self) -> tuple[float, ...] | None:
        """Activation memory of each rank; None if no rank has a limit."""
        return None if min(self.memory) == inf else self.memory

    @property
    def seconds_per_move(self) -> float:
        """Typical CPU time of one tabu move, or of adapting an order to other stages."""
        return ((4 * len(self.placement) + len(self.recomputed)) * self.m + 250) / 3.2e6

    @cached_property
    def problem(self) -> Problem:
        """The problem for the search of orders. ``ScheduleError`` if no order fits the memory."""
        problem, _ = make_problem(self.costs, self.placement, self.m, self.cap, self.costs.edges, self.recomputed)
        return replace(problem, recompute_optional=self.recompute_optional)

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound of the makespan."""
        return lower_bound(self.problem)


def find_order(stages: StageProblem, seconds: float, seed: int = 0) -> SearchResult | None:
    """Search a schedule; None if none is found within the memory.

    Up to ``DETERMINISTIC_ACTIONS`` actions the result does not depend on the speed of the machine.
    """
    actions = 3 * len(stages.placement) * stages.m
    try:
        return auto(
            stages.costs, stages.placement, stages.m, cap=stages.cap, edges=stages.costs.edges, seconds=seconds,
            seed=seed, recompute=stages.recomputed, repeatable=actions <= DETERMINISTIC_ACTIONS,
        )  # fmt: skip
    except ScheduleError:  # no order within the cap
        return None


@dataclass(frozen=True)
class AdaptedSchedule:
    """An order of other stages, adapted to those of a point; ``seconds`` is infinite if it exceeds the memory.

    After a move of cuts, the order of actions is adapted to the new stages and improved by tabu search, instead of
    searched again. Optional recomputes are removed if memory allows.
    """

    point: Point
    stages: StageProblem
    orders: Orders
    seconds: float

    @classmethod
    def of(cls, point: Point, stages: StageProblem, orders: Orders | Schedule) -> AdaptedSchedule:
        """Adapt the orders, with the present or with new positions of weight gradients, whichever is faster."""
        problem = stages.problem
        fused = problem.fusing_pays
        orders = encode(orders, fused) if isinstance(orders, Schedule) else with_recomputes(problem, orders)
        variants = [(evaluate(problem, orders), orders)]
        others = without_weight_grads(problem, orders)
        for overrun in (0.0, 0.5):
            filled: Orders = [[] for _ in orders]
            variants.append((place_weight_grads(problem, others, overrun, filled=filled), filled))
        seconds, best = min(variants, key=lambda pair: pair[0])
        return cls(point, stages, best, seconds)

    def improved(self, moves: int, random: Random) -> AdaptedSchedule:
        """The best order after ``moves`` moves of tabu search."""
        if self.seconds == inf:
            return self
        table, goal = NodeTable(self.stages.problem), self.stages.lower_bound
        seconds, orders = tabu_search(table, self.orders, moves, random, goal, lambda: False)
        return replace(self, orders=orders, seconds=seconds)


# ── search ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class JointResult:
    """Cuts with a schedule for them."""

    cuts: Cuts
    costs: Costs
    result: SearchResult
    memory: tuple[float, ...]  # peak bytes of each rank


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
    """Search cuts and a schedule for about ``seconds`` of CPU time; None if nothing fits the memory.

    Without a memory limit, a rank holds at most as many activations as any rank of 1F1B. With a limit it may hold more,
    if that makes the step faster. Without ``moves``, only the initial cuts are evaluated.
    """
    search = _Search(segments, ranks, m, placement_of(shape, len(ranks), v), seed)
    search.run(seconds, moves)
    return search.best if search.found else None


class _Search:
    """The state of a search: the results so far, by cuts and recomputed stages."""

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

    def run(self, seconds: float, moves: bool) -> None:
        adaptable = 3 * len(self.placement) * self.m <= DETERMINISTIC_ACTIONS
        quick, left = min(QUICK, seconds / 40), seconds
        for point in dict.fromkeys(self._initial_points()):
            self.try_point(point, quick)
            left -= quick
            if not moves and (len(self.found) == 2 or (self.found and left <= 0)):
                break
        if not self.found:
            return
        if not (moves and adaptable):
            self.try_point(self.best_point, max(QUICK if moves else 0.0, left))
            return
        start, random = self.first_order(self.best_point, START_SHARE * seconds), Random(self.seed)
        left = max(0.0, left - START_SHARE * seconds)
        best = self.alternate(start, random, 0.5 * left)
        self.add_adapted(best.improved(int(0.25 * left / best.stages.seconds_per_move), random))
        self.try_point(best.point, 0.25 * left)

    def stages(self, point: Point) -> StageProblem | None:
        """The scheduling problem of a point; None if no order of it fits the memory."""
        if point not in self._stages:
            cuts, recomputed = point
            costs = stage_costs(self.segments, self.ranks, self.placement, cuts)
            static = rank_static_bytes(self.segments, self.placement, cuts, len(self.ranks))
            left = tuple(limit - size for limit, size in zip(self.ranks.memory, static, strict=True))
            stages = StageProblem(costs, recomputed, self.placement, self.m, left, self.ranks.recompute is None)
            self._stages[point] = None
            with suppress(ScheduleError):  # no order fits
                _ = stages.problem
                self._stages[point] = stages
        return self._stages[point]

    def try_point(self, point: Point, seconds: float) -> SearchResult | None:
        stages = self.stages(point)
        found = None if stages is None or seconds <= 0 else find_order(stages, seconds, self.seed)
        if stages is not None and found is not None:
            self.add(point, stages, found)
        return found

    def add(self, point: Point, stages: StageProblem, found: SearchResult) -> None:
        old = self.found.get(point)
        if old is None or found.makespan < old.result.makespan * (1 - 1e-12):
            static = rank_static_bytes(self.segments, self.placement, point[0], len(self.ranks))
            memory = tuple(map(sum, zip(static, found.peak_memory, strict=True)))
            self.found[point] = JointResult(point[0], stages.costs, found, memory)

    def first_order(self, point: Point, seconds: float) -> AdaptedSchedule:
        """Search the order of a point that is adapted to other points."""
        stages = self.stages(point)
        assert stages is not None
        found = self.try_point(point, seconds) or self.found[point].result
        return AdaptedSchedule.of(point, stages, found.schedule)

    def alternate(self, current: AdaptedSchedule, random: Random, seconds: float) -> AdaptedSchedule:
        """Move cuts and improve the order in alternation, for about ``seconds`` of typical CPU time."""
        effort, left = 1, seconds / current.stages.seconds_per_move
        while left > 0:
            near, before = [], current.seconds
            left -= EVALUATION_MOVES
            for point in self._neighbours(current.point):
                stages = self.stages(point)
                if stages is not None and stages.lower_bound < before:
                    left -= EVALUATION_MOVES
                    near.append(AdaptedSchedule.of(point, stages, current.orders))
            near = sorted((one for one in near if one.seconds < inf), key=lambda one: one.seconds)
            if not near and before <= current.stages.lower_bound * (1 + 1e-9):
                break  # no neighbour and no order can be better
            improved = [one.improved(MOVES * effort, random) for one in (current, *near[:NEIGHBOURS])]
            left -= MOVES * effort * len(improved)
            current = min(improved, key=lambda one: one.seconds)
            better = current.seconds < before * (1 - 1e-9)
            effort = 1 if better or effort == MAX_EFFORT else 2 * effort
            if better and current.seconds < self.best.result.makespan * 1.05:
                self.add_adapted(current)
        return current

    def add_adapted(self, adapted: AdaptedSchedule) -> None:
        if adapted.seconds < inf:
            stages, costs = adapted.stages, adapted.stages.costs
            simulation = simulate_orders(stages.problem, adapted.orders, costs, costs.edges or ())
            makespan, bound = simulation.makespan, min(simulation.makespan, stages.lower_bound)
            found = SearchResult(simulation.schedule, makespan, bound, simulation.peak_memory, stages.problem.cap)
            self.add(adapted.point, stages, found)

    def _initial_points(self) -> Iterator[Point]:
        """Initial cuts for different numbers of micro-batches in flight, with the stages to recompute for each."""
        p, m = len(self.ranks), self.m
        in_flight = [(float(count),) * p for count in sorted({min(m, p), min(m, max(1, p // 2)), 1})]
        in_flight.append(tuple(float(min(m, p - rank)) for rank in range(p)))
        for counts in in_flight:
            limits = replace(self.ranks, in_flight=counts)
            for cuts in find_cuts(self.segments, limits, self.placement):
                recomputed = set[int]()
                for rank, runs in enumerate(rank_runs(self.placement, cuts, p)):
                    own = [stage for stage, other in enumerate(self.placement) if other == rank]
                    chosen = choose_recompute(self.segments, limits, rank, runs)
                    recomputed.update(own[number] for number in chosen or ())
                yield cuts, frozenset(recomputed)

    def _neighbours(self, point: Point) -> Iterator[Point]:
        """Points with some adjacent cuts moved by one layer; or with a stage added to the recomputed ones, removed from
        them, or exchanged with another stage of its rank."""
        cuts, recomputed = point
        inner = cuts[:-1]
        for width in (1, 2, 4, 8):
            for k in range(len(inner) - width + 1):
                for step in (-1, 1):
                    moved = (*inner[:k], *(at + step for at in inner[k : k + width]), *inner[k + width :], cuts[-1])
                    if all(a < b for a, b in pairwise((0, *moved))):
                        yield moved, recomputed
        if self.ranks.recompute is None:
            for stage, rank in enumerate(self.placement):
                yield cuts, recomputed ^ {stage}
                for other, rank_of_other in enumerate(self.placement):
                    if rank_of_other == rank and stage in recomputed and other not in recomputed:
                        yield cuts, recomputed ^ {stage, other}
