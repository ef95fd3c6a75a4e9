"""When everything in a schedule would happen: times, bubbles and memory, without running it.

rank 0  F0  F1  ..  ..  B0  B1      a rank starts an action when the one before it is done
rank 1  ..  F0  F1  B0  B1  ..      and its inputs have arrived
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Edge, Schedule, edges_of, topological_runs
from penstock.schedule.verify import MemoryReport, verify

__all__ = ["Costs", "Prediction", "Simulation", "simulate"]


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
        """When the last rank is done."""
        return max(ends[-1] for ends in self.ends)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the time it works."""
        times = self.costs.durations(self.schedule.num_stages)
        return tuple(sum(times[kind][stage] for stage, kind, _ in order) for order in self.schedule.orders)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each rank, the fraction of the makespan in which it is idle."""
        return tuple(_idle(busy, self.makespan) for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time, up to the makespan, in which they are idle."""
        return _idle(sum(self.busy), self.makespan * self.schedule.num_ranks)

    @property
    def span_bubble(self) -> float:
        """The bubble when the next step may start on each rank as soon as it is done with this one.

        Time then counts from a rank's own first action to its own last, and the longest such span decides.
        This is the bubble that "zero bubble" schedules bring to zero; ``bubble`` is what a barrier leaves.
        """
        span = max(ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True))
        return _idle(sum(self.busy), span * self.schedule.num_ranks)

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each rank, the curve of what it keeps: (time, memory from then on)."""
        return tuple(self._curve(rank) for rank in range(self.schedule.num_ranks))

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """For each rank, the most it keeps."""
        return tuple(max(kept for _, kept in curve) for curve in self.memory)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from penstock.viz import simulation_html

        return simulation_html(self)

    def _repr_svg_(self) -> str | None:
        from penstock.viz import simulation_svg

        return simulation_svg(self)

    def _curve(self, rank: int) -> tuple[tuple[float, float], ...]:
        """A rank does one thing at a time, so its order is also the order of its memory's changes."""
        curve = [(0.0, 0.0)]
        if not self.schedule.trains:
            return tuple(curve)
        order, starts, ends = self.schedule.orders[rank], self.starts[rank], self.ends[rank]
        sizes, waits_of, kept_of = (
            self.costs.of_stages(name, self.schedule.num_stages) for name in ("activation", "keep", "checkpoint")
        )
        recomputed = {(a.stage, a.microbatch) for a in order if a.kind == "R"}
        kept = 0.0
        for (stage, kind, microbatch), start, end in zip(order, starts, ends, strict=True):
            size, keep, checkpoint = sizes[stage], waits_of[stage], kept_of[stage]
            if kind == "F":
                kept += size
                curve.append((start, kept))
                if (stage, microbatch) in recomputed:
                    kept -= size * (1 - checkpoint)
                    curve.append((end, kept))
            elif kind == "R":
                kept += size * (1 - checkpoint)
                curve.append((start, kept))
            else:
                kept -= size * {"B": 1.0, "I": 1 - keep, "W": keep}[kind]
                curve.append((end, kept))
        return tuple(curve)


class _Link:
    """One edge, in one direction: when the value of each micro-batch arrives at its other end."""

    __slots__ = ("arrival", "channel", "latency", "transfer")

    def __init__(self, num_microbatches: int, latency: float, transfer: float, channel: list[float]) -> None:
        self.arrival = [0.0] * num_microbatches
        self.latency = latency
        self.transfer = transfer
        self.channel = channel  # [when the channel is free again], shared by the edges that use it

    def send(self, microbatch: int, now: float) -> None:
        if self.transfer:
            now = max(now, self.channel[0]) + self.transfer
            self.channel[0] = now
        self.arrival[microbatch] = now + self.latency


_Links = dict[str, list[list[_Link]]]
"""By kind of work and stage."""


def _links(schedule: Schedule, costs: Costs, edges: Iterable[Edge]) -> tuple[_Links, _Links]:
    """The wires that each stage's work waits for, and those it sends on.

    Forward and backward traffic have channels of their own: one per direction between two ranks.
    """
    stages, m = range(schedule.num_stages), schedule.num_microbatches
    forward_in, forward_out, backward_in, backward_out = ([list[_Link]() for _ in stages] for _ in range(4))
    channels: dict[tuple[str, int, int], list[float]] = {}
    for src, dst in edges:
        here, there = schedule.placement[src], schedule.placement[dst]
        latency = transfer = 0.0
        if here != there:
            latency = costs.of_edge("latency", (src, dst))
            transfer = costs.of_edge("bytes", (src, dst)) / costs.of_edge("bandwidth", (src, dst))
        forth = _Link(m, latency, transfer, channels.setdefault(("F", here, there), [0.0]))
        forward_out[src].append(forth)
        forward_in[dst].append(forth)
        back = _Link(m, latency, transfer, channels.setdefault(("B", there, here), [0.0]))
        backward_out[dst].append(back)
        backward_in[src].append(back)
    none: list[list[_Link]] = [[] for _ in stages]
    incoming = {"F": forward_in, "B": backward_in, "I": backward_in, "R": none, "W": none}
    outgoing = {"F": forward_out, "B": backward_out, "I": backward_out, "R": none, "W": none}
    return incoming, outgoing


def simulate(schedule: Schedule, costs: Costs | None = None, edges: Iterable[Edge] | None = None) -> Simulation:
    """Run ``schedule`` on paper: every action as early as its rank and its inputs allow.

    One pass over the actions, in an order in which every input is known before it is needed. The schedule
    is verified first.
    """
    costs = costs or Costs()
    edges = edges_of(schedule, edges)
    report = verify(schedule, edges)
    times = costs.durations(schedule.num_stages)
    incoming, outgoing = _links(schedule, costs, edges)
    starts: list[list[float]] = [[] for _ in schedule.orders]
    ends: list[list[float]] = [[] for _ in schedule.orders]
    for rank, begin, stop in topological_runs(schedule, edges).runs:
        now = ends[rank][-1] if begin else 0.0
        for stage, kind, microbatch in schedule.orders[rank][begin:stop]:
            for wire in incoming[kind][stage]:
                if wire.arrival[microbatch] > now:
                    now = wire.arrival[microbatch]
            starts[rank].append(now)
            now += times[kind][stage]
            ends[rank].append(now)
            for wire in outgoing[kind][stage]:
                wire.send(microbatch, now)
    return Simulation(schedule, costs, report, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _idle(busy: float, total: float) -> float:
    """The fraction of ``total`` that is not ``busy``; nothing is idle where nothing takes time."""
    return max(0.0, 1 - busy / total) if total else 0.0


# What a step should take, said before it is run.


@dataclass(frozen=True)
class Prediction:
    """The time of a step, and for each rank of the pipeline the bytes at its peak, as far as they are known.

    ``by`` says whose it is: ``"plan"`` is what a planner found, ``"costs"`` what the ``costs`` of a pipeline come to,
    ``"replan"`` those of ``pipe.replan``; ``"trace"`` is no prediction in the strict sense, but the simulation of a run
    with the times that were measured in it.
    """

    seconds: float
    by: str
    memory: tuple[float, ...] | None = None  # all of it: parameters, gradients, states of the optimizer, activations
    saved: tuple[float, ...] | None = None  # for backwards to come
    samples: int | None = None  # of a micro-batch, for which it holds; None: of any

    @classmethod
    def simulated(cls, by: str, schedule: Schedule, costs: Costs, edges: Iterable[Edge]) -> Prediction:
        """Of costs in seconds; and in bytes, where activations are not just counted."""
        found = simulate(schedule, costs, edges)
        known = costs.activation != Costs.activation and any(found.peak_memory)
        return cls(found.makespan, by, saved=tuple(found.peak_memory) if known else None)
