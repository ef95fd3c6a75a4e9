"""Ranks that are slower than others for the same work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from penstock.profile.report.balance import mapped
from penstock.profile.trace.measure import typical
from penstock.schedule.costs import Costs
from penstock.schedule.simulate import Simulation, simulate

if TYPE_CHECKING:
    from penstock.profile.trace.trace import Trace

__all__ = ["SLOW", "SlowRank", "slow_ranks"]

SLOW = 1.1
"""How many times as long as others a rank takes to be called slow."""


@dataclass(frozen=True)
class SlowRank:
    """A rank, by its number in the world: how much longer than others it takes, and what that costs a step."""

    rank: int
    factor: float
    saved: float

    @property
    def text(self) -> str:
        return (
            f"rank {self.rank} takes {self.factor:.2f} times as long as others for the same work: as fast as they are, "
            f"it saves {self.saved:.0%}"
        )


def slow_ranks(trace: Trace, base: Simulation) -> Iterator[SlowRank]:
    """The same work is that of one stage in several replicas, or of stages with as many layers and parameters.

    Of ranks that share a GPU none is slow by itself.
    """
    sharing = {track for tracks in trace.sharing for track in tracks}
    times = _times(trace)
    groups: dict[Hashable, list[tuple[int, float]]] = defaultdict(list)
    for (track, stage, kind), seconds in times.items():
        groups[_work(trace, stage), kind].append((track, seconds))
    for track in sorted(set(range(len(trace.tracks))) - sharing):
        own: dict[int, float] = defaultdict(float)
        others: dict[int, float] = defaultdict(float)
        for (t, stage, kind), seconds in times.items():
            peers = [s for other, s in groups[_work(trace, stage), kind] if other != track]
            if t == track and peers:
                own[stage] += seconds
                others[stage] += median(peers)
        usual = sum(others.values())
        if usual and sum(own.values()) > SLOW * usual:
            pooled = _pooled(base)
            slow, even = (
                simulate(base.schedule, _scaled(base, {s: x / pooled[s] for s, x in t.items()}), trace.edges).makespan
                for t in (own, others)
            )
            yield SlowRank(trace.tracks[track].rank, sum(own.values()) / usual, 1 - even / slow)


def _times(trace: Trace) -> dict[tuple[int, int, str], float]:
    """The median time of each kind of action of a stage on a track."""
    found: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for step in typical(trace):
        for part in step.parts:
            for done in part.actions:
                found[part.track, done.action.stage, done.action.kind].append(done.seconds)
    return {key: median(seconds) for key, seconds in found.items()}


def _work(trace: Trace, stage: int) -> Hashable:
    """Equal for stages that have the same to do, as far as the plan tells."""
    stages = trace.plan.get("stages", [])
    if len(stages) != trace.schedule.num_stages:
        return stage
    return len(stages[stage]["layers"]), stages[stage]["parameters"]


def _pooled(base: Simulation) -> list[float]:
    """What a stage takes for one micro-batch, by the costs of the simulation."""
    times = base.costs.durations(base.schedule.num_stages)
    kinds = base.schedule.kinds
    return [sum(times[kind][stage] for kind in kinds) for stage in range(base.schedule.num_stages)]


def _scaled(base: Simulation, factors: Mapping[int, float]) -> Costs:
    def scaled(numbers: list[float]) -> list[float]:
        return [x * factors.get(stage, 1.0) for stage, x in enumerate(numbers)]

    return mapped(base.costs, base.schedule.num_stages, scaled)
