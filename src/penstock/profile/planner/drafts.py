"""An order that goes on to be improved while its stages change: for other cuts it is not made anew, but adapted.

This is the one place that works with the parts of ``auto``: its words, into whose gaps weight gradients are filled, and
its tabu search, which also keeps what is to be recomputed where there is room for it, if the planner may choose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from random import Random

from penstock.errors import ScheduleError
from penstock.profile.planner.orders import Stages
from penstock.schedule.auto import Found
from penstock.schedule.auto.drops import dropping
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
    """Stages with an order for them; infinitely long, if it does not keep the memory."""

    stages: Stages
    problem: Problem
    words: Words
    seconds: float

    def floor_of(self, stages: Stages) -> float:
        """No order that this one could become for these stages takes less."""
        return stages.loose_floor if self.problem.loose else stages.floor

    def adapted(self, stages: Stages) -> Draft | None:
        """The same order for other stages; None if these fit in no order."""
        try:
            problem = _problem(stages, self.problem.loose)
        except ScheduleError:
            return None
        return _draft(stages, problem, dropping(problem, self.words))

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
        simulation = simulated(self.problem, self.words, self.stages.costs, self.stages.edges or ())
        floor = min(simulation.makespan, lower_bound(self.problem))
        return Found(simulation.schedule, simulation.makespan, floor, simulation.peak_memory, self.problem.cap)


def first_draft(stages: Stages, schedule: Schedule, *, loose: bool) -> Draft:
    """A schedule, to go on from. If ``loose``, its stages may keep some of what is to be recomputed."""
    problem = _problem(stages, loose)
    return _draft(stages, problem, to_words(problem, schedule))


def seconds_of_a_step(stages: Stages) -> float:
    """What one change to an order takes on a usual core, or to look at it for other stages."""
    return ((4 * len(stages.placement) + len(stages.again)) * stages.m + 250) / 3.2e6


def _problem(stages: Stages, loose: bool) -> Problem:
    how = stages.placement, stages.m, stages.cap, stages.edges, stages.again
    problem, _ = make_problem(stages.costs, *how)
    return replace(problem, loose=loose)


def _draft(stages: Stages, problem: Problem, words: Words) -> Draft:
    """The order, with weight gradients where they stand, or where they fit better."""
    tried = [(evaluate(problem, words), words)]
    skeleton = to_skeleton(problem, words)
    for overrun in (0.0, 0.5):
        filled: Words = [[] for _ in words]
        tried.append((fill(problem, skeleton, overrun, filled=filled), filled))
    seconds, best = min(tried, key=lambda pair: pair[0])
    return Draft(stages, problem, best, seconds)
