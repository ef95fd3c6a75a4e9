"""An order that goes on to be improved while its stages change: for other cuts it is not made anew, but adapted.

This is the one place that works with the parts of ``auto``: its words, into whose gaps weight gradients are filled, and
its tabu search.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from random import Random

from penstock.errors import ScheduleError
from penstock.profile.planner.orders import Stages, with_recomputes
from penstock.schedule.auto import Found
from penstock.schedule.auto.fill import evaluate, fill
from penstock.schedule.auto.floor import lower_bound
from penstock.schedule.auto.found import simulated
from penstock.schedule.auto.pieces import Pieces
from penstock.schedule.auto.problem import Problem, Words, make_problem
from penstock.schedule.auto.seeds import to_skeleton, to_words
from penstock.schedule.auto.tabu import improve
from penstock.schedule.schedule import Schedule

__all__ = ["Draft", "first_draft", "seconds_of_a_step"]


@dataclass(frozen=True)
class Draft:
    """Stages with an order for them, without its recomputes; infinitely long, if it does not keep the memory."""

    stages: Stages
    problem: Problem
    words: Words
    seconds: float

    def adapted(self, stages: Stages) -> Draft | None:
        """The same order for other stages; None if these fit in no order."""
        try:
            problem, _ = make_problem(stages.plain, stages.placement, stages.m, stages.cap, stages.edges)
        except ScheduleError:
            return None
        return _draft(stages, problem, self.words)

    def improved(self, steps: int, random: Random) -> Draft:
        """The best order that so many small changes lead to."""
        if self.seconds == inf:
            return self
        goal = lower_bound(self.problem)
        seconds, words = improve(Pieces(self.problem), self.words, steps, random, goal, lambda: False)
        return Draft(self.stages, self.problem, words, seconds)

    def finished(self) -> Found | None:
        """The order as it will be run."""
        if self.seconds == inf:
            return None
        simulation = simulated(self.problem, self.words, self.stages.plain, self.stages.edges or ())
        floor = min(simulation.makespan, lower_bound(self.problem))
        found = Found(simulation.schedule, simulation.makespan, floor, simulation.peak_memory, self.problem.cap)
        return with_recomputes(self.stages, found)


def first_draft(stages: Stages, schedule: Schedule) -> Draft:
    """A schedule, to go on from; one with recomputes is taken without them."""
    problem, _ = make_problem(stages.plain, stages.placement, stages.m, stages.cap, stages.edges)
    orders = tuple(tuple(a for a in order if a.kind != "R") for order in schedule.orders)
    words = to_words(problem, Schedule.of(schedule.name, schedule.placement, orders, schedule.num_microbatches))
    return _draft(stages, problem, words)


def seconds_of_a_step(stages: Stages) -> float:
    """What one change to an order takes on a usual core, or to look at it for other stages."""
    return (4 * len(stages.placement) * stages.m + 250) / 3.2e6


def _draft(stages: Stages, problem: Problem, words: Words) -> Draft:
    """The order, with weight gradients where they stand, or where they fit better."""
    tried = [(evaluate(problem, words), words)]
    skeleton = to_skeleton(problem, words)
    for overrun in (0.0, 0.5):
        filled: Words = [[] for _ in words]
        tried.append((fill(problem, skeleton, overrun, filled=filled), filled))
    seconds, best = min(tried, key=lambda pair: pair[0])
    return Draft(stages, problem, best, seconds)
