"""An order for stages of which some are recomputed, in the memory that every rank has left for it."""

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

__all__ = ["COUNTED", "AdaptedSchedule", "StageProblem", "adapt_schedule", "find_order", "seconds_per_move"]

COUNTED = 4000
"""For orders of up to so many actions it is counted what is done, and not timed."""


@dataclass(frozen=True)
class StageProblem:
    """Stages to find an order for: what they cost, which are recomputed, and what each rank has room for."""

    costs: Costs
    again: frozenset[int]
    placement: tuple[int, ...]
    m: int
    room: tuple[float, ...]

    @property
    def edges(self) -> tuple[Edge, ...] | None:
        return tuple(self.costs.bytes) if isinstance(self.costs.bytes, dict) else None

    @property
    def cap(self) -> tuple[float, ...] | None:
        """What ranks may keep; None without a limit."""
        return None if max(self.room) == inf else self.room

    @cached_property
    def floor(self) -> float:
        """No order takes less: a rank has its work to do, once the first micro-batch has come to it."""
        return self._floor(self.again)

    @cached_property
    def loose_floor(self) -> float:
        """The same if nothing need be recomputed."""
        return self._floor(frozenset())

    def _floor(self, again: frozenset[int]) -> float:
        costs, placement = self.costs, self.placement
        times = costs.durations(len(placement))
        latency = costs.latency if isinstance(costs.latency, float) else 0.0
        work = [0.0] * len(self.room)
        comes = [inf] * len(work)
        passed = 0.0
        for stage, rank in enumerate(placement):
            if stage and placement[stage - 1] != rank:
                passed += latency
            comes[rank] = min(comes[rank], passed)
            passed += times["F"][stage]
            work[rank] += times["F"][stage] + min(times["B"][stage], times["I"][stage] + times["W"][stage])
            if stage in again:
                work[rank] += times["R"][stage]
        return max(head + self.m * each for head, each in zip(comes, work, strict=True))


def find_order(stages: StageProblem, *, seconds: float, seed: int = 0, choose: bool = False) -> SearchResult | None:
    """A short order; None if none was found that keeps the ranks' room.

    With ``choose`` it is free to recompute what it likes. How much is searched does not depend on the machine, up to
    ``COUNTED`` actions; beyond, it ends when time is up.
    """
    actions = 3 * len(stages.placement) * stages.m
    try:
        return auto(
            stages.costs, stages.placement, stages.m, cap=stages.cap, edges=stages.edges, seconds=seconds, seed=seed,
            recompute=None if choose else stages.again, repeatable=actions <= COUNTED,
        )  # fmt: skip
    except ScheduleError:  # no order keeps such a cap
        return None


# An order that goes on to be improved while its stages change: for other cuts it is not made anew, but adapted.
#
# This is the one place that works with the parts of ``auto``: its words, into whose gaps weight gradients are filled,
# and its tabu search, which also keeps what is to be recomputed where there is room for it, if the planner may choose.


@dataclass(frozen=True)
class AdaptedSchedule:
    """Stages with an order for them; infinitely long, if it does not keep the memory."""

    stages: StageProblem
    problem: Problem
    words: Orders
    seconds: float

    def floor_of(self, stages: StageProblem) -> float:
        """No order that this one could become for these stages takes less."""
        return stages.loose_floor if self.problem.recompute_optional else stages.floor

    def adapted(self, stages: StageProblem) -> AdaptedSchedule | None:
        """The same order for other stages; None if these fit in no order."""
        try:
            problem = _problem(stages, self.problem.recompute_optional)
        except ScheduleError:
            return None
        return _adapted(stages, problem, with_recomputes(problem, self.words))

    def improved(self, steps: int, random: Random) -> AdaptedSchedule:
        """The best order that so many small changes lead to."""
        if self.seconds == inf:
            return self
        goal = lower_bound(self.problem)
        seconds, words = tabu_search(NodeTable(self.problem), self.words, steps, random, goal, lambda: False)
        return AdaptedSchedule(self.stages, self.problem, words, seconds)

    def finished(self) -> SearchResult | None:
        """The order as it will be run."""
        if self.seconds == inf:
            return None
        simulation = simulate_orders(self.problem, self.words, self.stages.costs, self.stages.edges or ())
        floor = min(simulation.makespan, lower_bound(self.problem))
        return SearchResult(simulation.schedule, simulation.makespan, floor, simulation.peak_memory, self.problem.cap)


def adapt_schedule(stages: StageProblem, schedule: Schedule, *, loose: bool) -> AdaptedSchedule:
    """A schedule, to go on from. If ``loose``, its stages may keep some of what is to be recomputed."""
    problem = _problem(stages, loose)
    return _adapted(stages, problem, encode(problem, schedule))


def seconds_per_move(stages: StageProblem) -> float:
    """What one change to an order takes on a usual core, or to look at it for other stages."""
    return ((4 * len(stages.placement) + len(stages.again)) * stages.m + 250) / 3.2e6


def _problem(stages: StageProblem, loose: bool) -> Problem:
    how = stages.placement, stages.m, stages.cap, stages.edges, stages.again
    problem, _ = make_problem(stages.costs, *how)
    return replace(problem, recompute_optional=loose)


def _adapted(stages: StageProblem, problem: Problem, words: Orders) -> AdaptedSchedule:
    """The order, with weight gradients where they stand, or where they fit better."""
    tried = [(evaluate(problem, words), words)]
    skeleton = without_weight_grads(problem, words)
    for overrun in (0.0, 0.5):
        filled: Orders = [[] for _ in words]
        tried.append((place_weight_grads(problem, skeleton, overrun, filled=filled), filled))
    seconds, best = min(tried, key=lambda pair: pair[0])
    return AdaptedSchedule(stages, problem, best, seconds)
