"""A new order for a pipeline that runs: made for what its stages were seen to cost, in the memory of the old one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.schedule.auto import auto
from penstock.schedule.costs import Costs
from penstock.schedule.flow import Edge
from penstock.schedule.schedule import Schedule
from penstock.schedule.simulate import simulate

__all__ = ["Replanned", "reordered"]

WORTH = 0.01  # what a new order must save, as a fraction, to be taken


@dataclass(frozen=True)
class Replanned:
    """What ``pipe.replan()`` has found: the times of a step, as simulated, and whether the order is a new one."""

    before: float
    after: float
    changed: bool

    def __str__(self) -> str:
        if not self.changed:
            return f"the order stays: a step of {self.before:.4g} s, and no other order was found that saves 1 %"
        saved = 1 - self.after / self.before
        return f"a new order: a step of {self.after:.4g} s instead of {self.before:.4g} s, {saved:.1%} less"


def reordered(schedule: Schedule, costs: Costs, edges: Sequence[Edge], seconds: float) -> tuple[Replanned, Schedule]:
    """The order for these costs that is to be run: a new one, if it is worth it; without recomputes, which come back.

    The same arguments give the same answer, on every rank.
    """
    orders = tuple(tuple(action for action in order if action.kind != "R") for order in schedule.orders)
    again = {action.stage for order in schedule.orders for action in order if action.kind == "R"}
    plain, costs = replace(schedule, orders=orders), _with_recompute(costs, again, schedule.num_stages)
    if not any(costs.of_stages("activation", schedule.num_stages)):
        costs = replace(costs, activation=1.0)  # of which nothing is known: as many micro-batches as before
    old = simulate(plain, costs, edges)
    found = auto(
        costs, schedule.placement, schedule.num_microbatches, cap=old.peak_memory, edges=edges, seconds=seconds,
        repeatable=True,
    )  # fmt: skip
    if found.makespan > old.makespan * (1 - WORTH):
        return Replanned(old.makespan, old.makespan, False), plain
    return Replanned(old.makespan, found.makespan, True), found.schedule


def _with_recompute(costs: Costs, stages: set[int], count: int) -> Costs:
    """Costs in which a recompute is part of the backward that it is for."""
    if not stages:
        return costs
    times = costs.durations(count)

    def more(kind: str) -> tuple[float, ...]:
        return tuple(times[kind][s] + (times["R"][s] if s in stages else 0.0) for s in range(count))

    return replace(costs, i=more("I"), b=more("B"))
