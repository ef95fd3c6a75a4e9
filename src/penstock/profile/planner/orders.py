"""An order for stages of which some are recomputed, in the memory that every rank has left for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

from penstock.errors import ScheduleError
from penstock.schedule.auto import Found, auto
from penstock.schedule.costs import Costs
from penstock.schedule.flow import Edge

__all__ = ["COUNTED", "Stages", "order"]

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


def order(stages: Stages, *, seconds: float, seed: int = 0, choose: bool = False) -> Found | None:
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
