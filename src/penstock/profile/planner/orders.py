"""An order for stages of which some are recomputed, and what every rank keeps then.

``auto`` knows no recomputes. To it such a stage keeps what came to it, and has a longer input gradient; what the one
micro-batch takes that is there again is put aside. In its order each ``R`` is then put before its backward, where it
runs while the gradient is awaited. A weight gradient that waits keeps all that its stage made, so it is brought forward
where the rank's memory would not last.

    auto               1F0 1F1 1F2 1I0 1F3 1I1 1W0 1W1
    with recomputes    1F0 1F1 1F2 1R0 1I0 1W0 1F3 1R1 1I1 1W1      one micro-batch there at a time
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from penstock.errors import ScheduleError
from penstock.schedule.action import Action
from penstock.schedule.auto import Found, auto
from penstock.schedule.costs import Costs
from penstock.schedule.flow import Edge
from penstock.schedule.recompute import with_recompute
from penstock.schedule.schedule import Schedule
from penstock.schedule.simulate import simulate

__all__ = ["COUNTED", "Stages", "order", "with_recomputes"]

_SLACK = 1 + 1e-9
COUNTED = 4000
"""For orders of up to so many actions it is counted what is done, and not timed."""


@dataclass(frozen=True)
class Stages:
    """Stages to find an order for: what they cost, which are recomputed, and what each rank has room for."""

    costs: Costs
    again: frozenset[int]
    placement: tuple[int, ...]
    m: int
    room: tuple[float, ...]

    @cached_property
    def plain(self) -> Costs:
        """Costs in which a recompute is part of the backward that it is for."""
        count = len(self.placement)
        times = self.costs.durations(count)
        more = [times["R"][s] if s in self.again else 0.0 for s in range(count)]
        sizes, part = self.sizes
        return replace(
            self.costs,
            i=tuple(time + extra for time, extra in zip(times["I"], more, strict=True)),
            b=tuple(time + extra for time, extra in zip(times["B"], more, strict=True)),
            activation=tuple(size * part[s] if s in self.again else size for s, size in enumerate(sizes)),
        )

    @cached_property
    def sizes(self) -> tuple[list[float], list[float]]:
        """What each stage keeps of a micro-batch, and the part of that which came to it."""
        count = len(self.placement)
        return self.costs.of_stages("activation", count), self.costs.of_stages("checkpoint", count)

    @property
    def edges(self) -> tuple[Edge, ...] | None:
        return tuple(self.costs.bytes) if isinstance(self.costs.bytes, dict) else None

    @cached_property
    def cap(self) -> list[float] | None:
        """What ranks may keep of the micro-batches that wait; None without a limit."""
        if max(self.room) == inf:
            return None
        sizes, part = self.sizes
        cap = list(self.room)
        for rank in range(len(cap)):
            own = (sizes[s] * (1 - part[s]) for s in self.again if self.placement[s] == rank)
            cap[rank] = max(0.0, cap[rank] - max(own, default=0.0))
        return cap

    @cached_property
    def floor(self) -> float:
        """No order takes less: a rank has its work to do, once the first micro-batch has come to it."""
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
            if stage in self.again:
                work[rank] += times["R"][stage]
        return max(head + self.m * each for head, each in zip(comes, work, strict=True))


def order(stages: Stages, *, seconds: float, seed: int = 0) -> Found | None:
    """A short order; None if none was found that keeps the ranks' room.

    How much is searched does not depend on the machine, up to ``COUNTED`` actions; beyond, it ends when time is up.
    """
    actions = 3 * len(stages.placement) * stages.m
    try:
        found = auto(
            stages.plain, stages.placement, stages.m, cap=stages.cap, edges=stages.edges, seconds=seconds, seed=seed,
            repeatable=actions <= COUNTED,
        )  # fmt: skip
    except ScheduleError:  # no order keeps such a cap
        return None
    return with_recomputes(stages, found)


def with_recomputes(stages: Stages, found: Found) -> Found | None:
    """The order with its recomputes, as it will be run; None if a rank keeps more than it has room for."""
    if not stages.again:
        return found
    modes = ["always" if s in stages.again else "never" for s in range(len(stages.placement))]
    schedule = with_recompute(found.schedule, modes)
    if stages.cap is not None:
        schedule = _within(schedule, *stages.sizes, stages.room)
    simulation = simulate(schedule, stages.costs, stages.edges)
    if any(peak > limit * _SLACK for peak, limit in zip(simulation.peak_memory, stages.room, strict=True)):
        return None
    floor = min(simulation.makespan, stages.floor)
    return Found(schedule, simulation.makespan, floor, simulation.peak_memory, stages.room)


def _within(schedule: Schedule, sizes: Sequence[float], part: Sequence[float], room: Sequence[float]) -> Schedule:
    """Bring weight gradients forward, where what they keep is needed; a rank that lacks room even so stays above it."""
    orders = []
    for own, limit in zip(schedule.orders, room, strict=True):
        again = {(a.stage, a.microbatch) for a in own if a.kind == "R"}
        out: list[Action] = []
        waiting: list[Action] = []  # weight gradients that could run
        kept = 0.0
        for action in own:
            stage, kind, k = action
            if kind == "W":
                if action not in waiting:
                    continue  # it was brought forward
                waiting.remove(action)
            more = {"F": sizes[stage], "R": sizes[stage] * (1 - part[stage])}.get(kind, 0.0)
            while waiting and kept + more > limit * _SLACK:
                first = waiting.pop(0)
                kept -= sizes[first.stage]
                out.append(first)
            out.append(action)
            if kind == "F":
                kept += sizes[stage] * (part[stage] if (stage, k) in again else 1)
            elif kind == "R":
                kept += more
            elif kind == "I":
                waiting.append(Action(stage, "W", k))
            else:
                kept -= sizes[stage]
        orders.append(tuple(out))
    return replace(schedule, orders=tuple(orders))
