"""An order that goes on to be improved while its stages change: for other cuts it is not made anew, but adapted.

This is the one place that works with the parts of ``auto``: its words, into whose gaps weight gradients are filled, and
its annealing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from random import Random

from penstock.errors import ScheduleError
from penstock.profile.planner.orders import Stages, with_recomputes
from penstock.schedule.auto import Found
from penstock.schedule.auto.anneal import Plan, anneal
from penstock.schedule.auto.fill import Record, fill
from penstock.schedule.auto.floor import lower_bound
from penstock.schedule.auto.found import simulated
from penstock.schedule.auto.problem import Problem, make_problem
from penstock.schedule.auto.seeds import to_skeleton, to_words
from penstock.schedule.schedule import Schedule

__all__ = ["Draft", "first_draft", "seconds_of_a_step"]


@dataclass(frozen=True)
class Draft:
    """Stages with an order for them, without its recomputes; infinitely long, if it does not keep the memory."""

    stages: Stages
    problem: Problem
    plan: Plan

    @property
    def seconds(self) -> float:
        return self.plan.makespan

    def adapted(self, stages: Stages) -> Draft | None:
        """The same order for other stages; None if these fit in no order."""
        try:
            problem, _ = make_problem(stages.plain, stages.placement, stages.m, stages.cap, stages.edges)
        except ScheduleError:
            return None
        seconds = fill(problem, self.plan.skeleton, self.plan.overrun)
        return Draft(stages, problem, Plan(seconds, self.plan.skeleton, self.plan.overrun))

    def improved(self, steps: int, random: Random) -> Draft:
        """The best order that so many small changes lead to."""
        goal = lower_bound(self.problem)
        return Draft(self.stages, self.problem, anneal(self.problem, self.plan, steps, random, goal, lambda: False))

    def finished(self) -> Found | None:
        """The order as it will be run."""
        record = Record(self.problem.num_ranks, every=sum(map(len, self.plan.skeleton)) + 1)
        if fill(self.problem, self.plan.skeleton, self.plan.overrun, record=record) == inf:
            return None
        simulation = simulated(self.problem, record.words, self.stages.plain, self.stages.edges or ())
        floor = min(simulation.makespan, lower_bound(self.problem))
        found = Found(simulation.schedule, simulation.makespan, floor, simulation.peak_memory, self.problem.cap)
        return with_recomputes(self.stages, found)


def first_draft(stages: Stages, schedule: Schedule) -> Draft:
    """A schedule, to go on from; one with recomputes is taken without them."""
    problem, _ = make_problem(stages.plain, stages.placement, stages.m, stages.cap, stages.edges)
    orders = tuple(tuple(a for a in order if a.kind != "R") for order in schedule.orders)
    words = to_words(problem, Schedule.of(schedule.name, schedule.placement, orders, schedule.num_microbatches))
    skeleton = to_skeleton(problem, words)  # weight gradients find other places as the stages change
    plans = [
        Plan(fill(problem, skeleton, overrun), skeleton, overrun)
        for overrun in ([0.0] * problem.num_ranks, [0.5] * problem.num_ranks)
    ]
    return Draft(stages, problem, min(plans, key=lambda plan: plan.makespan))


def seconds_of_a_step(stages: Stages) -> float:
    """What one change to an order takes on a usual core, or to look at it for other stages."""
    return (3 * len(stages.placement) * stages.m + 300) / 4e6
