"""The answer: a schedule with its certificate."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.schedule.action import Action
from penstock.schedule.auto.problem import SLACK, Problem, Words
from penstock.schedule.costs import Costs
from penstock.schedule.flow import Edge
from penstock.schedule.schedule import Schedule
from penstock.schedule.simulate import Simulation, simulate

__all__ = ["Found", "simulated"]


@dataclass(frozen=True)
class Found:
    """A schedule, how long it takes, and how good that is: no order under the cap takes less than ``floor``."""

    schedule: Schedule
    makespan: float
    floor: float
    peak: tuple[float, ...]
    """What each rank keeps at its peak, in the unit of ``Costs.activation``."""
    cap: tuple[float, ...]
    """What each rank may keep."""

    @property
    def gap(self) -> float:
        """How far above the floor the makespan is, as a fraction of the floor; the best order is not further below."""
        return self.makespan / self.floor - 1 if self.floor else 0.0

    def __str__(self) -> str:
        rank = max(range(len(self.peak)), key=lambda r: self.peak[r])
        return (
            f"makespan {self.makespan:.4g}, floor {self.floor:.4g}: "
            + ("no order is faster" if self.gap <= SLACK else f"at most {self.gap:.1%} slower than the best order")
            + f"\npeak memory {self.peak[rank]:.4g} on rank {rank}, of {self.cap[rank]:.4g} that it may keep"
        )


def simulated(problem: Problem, words: Words, costs: Costs, edges: Sequence[Edge]) -> Simulation:
    """The words as a schedule, run on paper. I and W that stand together are a B where that delays nothing."""
    schedule = _to_schedule(problem, words)
    split = simulate(schedule, costs, edges)
    fused = simulate(_fuse(problem, split), costs, edges)
    return fused if fused.makespan <= split.makespan * (1 + 1e-12) else split


def _to_schedule(problem: Problem, words: Words) -> Schedule:
    """Letters with their micro-batches."""
    count = problem.num_stages
    forwards, backwards = [0] * count, [0] * count
    deferred: list[deque[int]] = [deque() for _ in range(count)]
    dropped: list[deque[int]] = [deque() for _ in range(count)]
    orders = []
    for word in words:
        order = []
        for letter in word:
            kind, stage = divmod(letter, count)
            if kind in (0, 5):
                k = forwards[stage]
                forwards[stage] += 1
                if kind == 5:
                    dropped[stage].append(k)
            elif kind == 3:
                k = deferred[stage].popleft()
            elif kind == 4:
                k = dropped[stage].popleft()
            else:
                k = backwards[stage]
                backwards[stage] += 1
                if kind == 1:
                    deferred[stage].append(k)
            order.append(Action(stage, "FIBWRF"[kind], k))
        orders.append(order)
    return Schedule.of("auto", problem.placement, orders, problem.m)


def _fuse(problem: Problem, simulation: Simulation) -> Schedule:
    """One B for an I and the W right after it, where nobody starts before the later gradient arrives."""
    schedule = simulation.schedule
    count, times = problem.num_stages, problem.durations
    starts = {
        (a.stage, a.microbatch): start
        for order, begins in zip(schedule.orders, simulation.starts, strict=True)
        for a, start in zip(order, begins, strict=True)
        if a.kind in "IB"
    }
    sends: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    for src, dst, time in problem.arcs:
        sends[dst].append((src, time))
    orders = []
    for order, begins in zip(schedule.orders, simulation.starts, strict=True):
        out: list[Action] = []
        at = 0
        while at < len(order):
            action = order[at]
            stage, kind, k = action
            together = kind == "I" and at + 1 < len(order) and order[at + 1] == (stage, "W", k)
            if together and times[2 * count + stage] <= times[count + stage] + times[3 * count + stage]:
                end = begins[at] + times[2 * count + stage]
                if all(starts[src, k] >= (end + time) * (1 - 1e-15) for src, time in sends[stage]):
                    action = Action(stage, "B", k)
                    at += 1
            out.append(action)
            at += 1
        orders.append(tuple(out))
    return replace(schedule, orders=tuple(orders))
