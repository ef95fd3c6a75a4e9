"""Schedules for the stages of a partition: searched for it, or adapted from those of a similar one.

While cuts move, the order of actions is not searched again: it is adapted to the new stages and improved by tabu
search. This is the only module outside ``schedule.search`` that works on its encoded orders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from random import Random

from penstock.errors import ScheduleError
from penstock.schedule import SearchResult, auto
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Edge, Schedule
from penstock.schedule.search.lower_bound import lower_bound
from penstock.schedule.search.op_graph import NodeTable
from penstock.schedule.search.orders import encode, simulate_orders, with_recomputes, without_weight_grads
from penstock.schedule.search.place_weight_grads import evaluate, place_weight_grads
from penstock.schedule.search.problem import Orders, Problem, make_problem
from penstock.schedule.search.tabu import tabu_search

DETERMINISTIC_ACTIONS = 4000
"""Up to this many actions, search effort is counted and not timed."""


@dataclass(frozen=True)
class StageProblem:
    """Stages to schedule: their costs, which are recomputed, and the memory left on each rank for activations."""

    costs: Costs
    recomputed: frozenset[int]
    placement: tuple[int, ...]
    m: int
    memory: tuple[float, ...]

    @property
    def edges(self) -> tuple[Edge, ...] | None:
        return tuple(self.costs.bytes) if isinstance(self.costs.bytes, dict) else None

    @property
    def cap(self) -> tuple[float, ...] | None:
        """Activation memory of each rank; None without a limit."""
        return None if max(self.memory) == inf else self.memory

    @cached_property
    def lower_bound(self) -> float:
        """No order is faster: a rank has to do its work after the first micro-batch has reached it."""
        return self._lower_bound(self.recomputed)

    @cached_property
    def lower_bound_without_recompute(self) -> float:
        return self._lower_bound(frozenset())

    def _lower_bound(self, recomputed: frozenset[int]) -> float:
        costs, placement = self.costs, self.placement
        times = costs.durations(len(placement))
        latency = costs.latency if isinstance(costs.latency, float) else 0.0
        work = [0.0] * len(self.memory)
        first_arrival = [inf] * len(work)
        elapsed = 0.0
        for stage, rank in enumerate(placement):
            if stage and placement[stage - 1] != rank:
                elapsed += latency
            first_arrival[rank] = min(first_arrival[rank], elapsed)
            elapsed += times["F"][stage]
            work[rank] += times["F"][stage] + min(times["B"][stage], times["I"][stage] + times["W"][stage])
            if stage in recomputed:
                work[rank] += times["R"][stage]
        return max(head + self.m * each for head, each in zip(first_arrival, work, strict=True))


def find_order(
    stages: StageProblem, *, seconds: float, seed: int = 0, choose_recompute: bool = False
) -> SearchResult | None:
    """Search a schedule; None if none is found within the memory.

    With ``choose_recompute`` the search decides what is recomputed. Up to ``DETERMINISTIC_ACTIONS`` actions the result
    does not depend on the speed of the machine.
    """
    actions = 3 * len(stages.placement) * stages.m
    try:
        return auto(
            stages.costs, stages.placement, stages.m, cap=stages.cap, edges=stages.edges, seconds=seconds, seed=seed,
            recompute=None if choose_recompute else stages.recomputed, repeatable=actions <= DETERMINISTIC_ACTIONS,
        )  # fmt: skip
    except ScheduleError:  # no order within the cap
        return None


@dataclass(frozen=True)
class AdaptedSchedule:
    """Stages with an order of their actions; ``seconds`` is infinite if it exceeds the memory."""

    stages: StageProblem
    problem: Problem
    orders: Orders
    seconds: float

    def lower_bound_for(self, stages: StageProblem) -> float:
        """No adaptation of this order to ``stages`` is faster."""
        return stages.lower_bound_without_recompute if self.problem.recompute_optional else stages.lower_bound

    def adapted(self, stages: StageProblem) -> AdaptedSchedule | None:
        """The same order for other stages; None if no order of these fits the memory."""
        try:
            problem = _problem(stages, self.problem.recompute_optional)
        except ScheduleError:
            return None
        return _with_best_weight_grads(stages, problem, with_recomputes(problem, self.orders))

    def improved(self, moves: int, random: Random) -> AdaptedSchedule:
        """The best order found by tabu search with this many moves."""
        if self.seconds == inf:
            return self
        goal = lower_bound(self.problem)
        seconds, orders = tabu_search(NodeTable(self.problem), self.orders, moves, random, goal, lambda: False)
        return AdaptedSchedule(self.stages, self.problem, orders, seconds)

    def result(self) -> SearchResult | None:
        """The schedule of this order; None if it exceeds the memory."""
        if self.seconds == inf:
            return None
        simulation = simulate_orders(self.problem, self.orders, self.stages.costs, self.stages.edges or ())
        bound = min(simulation.makespan, lower_bound(self.problem))
        return SearchResult(simulation.schedule, simulation.makespan, bound, simulation.peak_memory, self.problem.cap)


def adapt_schedule(stages: StageProblem, schedule: Schedule, *, recompute_optional: bool) -> AdaptedSchedule:
    """A schedule to start from. With ``recompute_optional``, recomputes are dropped where there is memory for it."""
    problem = _problem(stages, recompute_optional)
    return _with_best_weight_grads(stages, problem, encode(problem, schedule))


def seconds_per_move(stages: StageProblem) -> float:
    """Typical CPU time of one tabu move, or of adapting an order to other stages."""
    return ((4 * len(stages.placement) + len(stages.recomputed)) * stages.m + 250) / 3.2e6


def _problem(stages: StageProblem, recompute_optional: bool) -> Problem:
    problem, _ = make_problem(stages.costs, stages.placement, stages.m, stages.cap, stages.edges, stages.recomputed)
    return replace(problem, recompute_optional=recompute_optional)


def _with_best_weight_grads(stages: StageProblem, problem: Problem, orders: Orders) -> AdaptedSchedule:
    """The order with weight gradients where they are, or placed anew, whichever is faster."""
    variants = [(evaluate(problem, orders), orders)]
    others = without_weight_grads(problem, orders)
    for overrun in (0.0, 0.5):
        filled: Orders = [[] for _ in orders]
        variants.append((place_weight_grads(problem, others, overrun, filled=filled), filled))
    seconds, best = min(variants, key=lambda pair: pair[0])
    return AdaptedSchedule(stages, problem, best, seconds)
