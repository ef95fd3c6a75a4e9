"""Simulation of a schedule: start and end of each action, bubbles, and memory over time.

rank 0  F0  F1  ..  ..  B0  B1      a rank starts an action when the previous one is done
rank 1  ..  F0  F1  B0  B1  ..      and its inputs have arrived
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from penstock import _registry
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Edge, Schedule, edges_of, topological_runs
from penstock.schedule.verify import MemoryReport, verify


@dataclass(frozen=True)
class Simulation:
    """The times of a schedule. ``starts[r][n]`` and ``ends[r][n]`` belong to ``schedule.orders[r][n]``."""

    schedule: Schedule
    costs: Costs
    report: MemoryReport
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """The end of the last action."""
        return max(ends[-1] for ends in self.ends)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The sum of the durations of its actions, per rank."""
        times = self.costs.durations(self.schedule.num_stages)
        return tuple(sum(times[kind][stage] for stage, kind, _ in order) for order in self.schedule.orders)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The idle fraction of the makespan, per rank."""
        return tuple(_idle_fraction(busy, self.makespan) for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The idle fraction of the makespan, over all ranks."""
        return _idle_fraction(sum(self.busy), self.makespan * self.schedule.num_ranks)

    @property
    def span_bubble(self) -> float:
        """The bubble without a barrier between steps: each rank starts the next step when it has finished this one.

        The period of a step is then the longest time from a rank's first action to its last. "Zero-bubble" schedules
        have a ``span_bubble`` of 0, and a ``bubble`` above 0.
        """
        span = max(ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True))
        return _idle_fraction(sum(self.busy), span * self.schedule.num_ranks)

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Memory over time, per rank, as pairs (time, memory from this time on)."""
        if not self.schedule.trains:
            return (((0.0, 0.0),),) * self.schedule.num_ranks
        sizes, keeps, checkpoints = (
            self.costs.of_stages(name, self.schedule.num_stages) for name in ("activation", "keep", "checkpoint")
        )
        curves = []
        for order, starts, ends in zip(self.schedule.orders, self.starts, self.ends, strict=True):
            curve, kept = [(0.0, 0.0)], 0.0  # memory changes in the order of the rank's actions
            for (stage, kind, microbatch), start, end in zip(order, starts, ends, strict=True):
                size, keep, checkpoint = sizes[stage], keeps[stage], checkpoints[stage]
                if kind == "F":
                    kept += size
                    curve.append((start, kept))
                    if (stage, microbatch) in self.schedule.recomputed:
                        kept -= size * (1 - checkpoint)
                        curve.append((end, kept))
                elif kind == "R":
                    kept += size * (1 - checkpoint)
                    curve.append((start, kept))
                else:
                    kept -= size * {"B": 1.0, "I": 1 - keep, "W": keep}[kind]
                    curve.append((end, kept))
            curves.append(tuple(curve))
        return tuple(curves)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The maximum of ``memory``, per rank."""
        return tuple(max(kept for _, kept in curve) for curve in self.memory)

    def _repr_html_(self) -> str:
        return str(_registry.viz().simulation_html(self))


def simulate(schedule: Schedule, costs: Costs | None = None, edges: Iterable[Edge] | None = None) -> Simulation:
    """Verify a schedule, and compute the times of its actions if each starts as early as its rank and inputs allow.

    The simulation is one pass over the actions in topological order.
    """
    costs = costs or Costs()
    edges = edges_of(schedule, edges)
    report = verify(schedule, edges)
    times = costs.durations(schedule.num_stages)
    # By kind of action and stage: the arrival times of its inputs; and for each outgoing edge the arrival times, the
    # latency, the transfer time, and the time from which its channel is free. Forward and backward messages have
    # separate channels, one per direction between two ranks.
    stages = range(schedule.num_stages)
    incoming: dict[str, list[list[list[float]]]] = {kind: [[] for _ in stages] for kind in "FBW"}
    outgoing: dict[str, list[list[tuple[list[float], float, float, list[float]]]]] = {
        kind: [[] for _ in stages] for kind in "FBW"
    }
    channels: dict[tuple[str, int, int], list[float]] = {}
    for edge in edges:
        latency = transfer = 0.0
        if schedule.placement[edge[0]] != schedule.placement[edge[1]]:
            latency = costs.of_edge("latency", edge)
            transfer = costs.of_edge("bytes", edge) / costs.of_edge("bandwidth", edge)
        for kind, (src, dst) in (("F", edge), ("B", edge[::-1])):
            arrivals = [0.0] * schedule.num_microbatches
            channel = channels.setdefault((kind, schedule.placement[src], schedule.placement[dst]), [0.0])
            incoming[kind][dst].append(arrivals)
            outgoing[kind][src].append((arrivals, latency, transfer, channel))
    incoming["I"], incoming["R"] = incoming["B"], incoming["W"]
    outgoing["I"], outgoing["R"] = outgoing["B"], outgoing["W"]
    starts: list[list[float]] = [[] for _ in schedule.orders]
    ends: list[list[float]] = [[] for _ in schedule.orders]
    for rank, begin, stop in topological_runs(schedule, edges)[0]:
        now = ends[rank][-1] if begin else 0.0
        for stage, kind, microbatch in schedule.orders[rank][begin:stop]:
            for arrivals in incoming[kind][stage]:
                if arrivals[microbatch] > now:
                    now = arrivals[microbatch]
            starts[rank].append(now)
            now += times[kind][stage]
            ends[rank].append(now)
            for arrivals, latency, transfer, channel in outgoing[kind][stage]:
                sent = now
                if transfer:
                    sent = channel[0] = max(now, channel[0]) + transfer
                arrivals[microbatch] = sent + latency
    return Simulation(schedule, costs, report, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _idle_fraction(busy: float, total: float) -> float:
    """The fraction of ``total`` that is not ``busy``; 0 where ``total`` is 0."""
    return max(0.0, 1 - busy / total) if total else 0.0


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step and, where known, the peak memory of each rank in bytes.

    ``by`` names its origin: ``"plan"`` the planner, ``"costs"`` the ``costs`` argument of a pipeline, ``"replan"``
    those of ``pipe.replan``, and ``"trace"`` the simulation of a recorded run with its own measured times.
    """

    seconds: float
    by: str
    memory: tuple[float, ...] | None = None  # in total: parameters, gradients, optimizer states, activations
    saved: tuple[float, ...] | None = None  # activations saved for the backward
    samples: int | None = None  # samples per micro-batch that it is valid for; None: any number
