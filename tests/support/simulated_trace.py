"""A simulation as a trace, with known times for all actions."""

from __future__ import annotations

from collections.abc import Iterable

import penstock as ps
from penstock.profile.trace.records import (
    ActionRecord,
    RankRecord,
    SendRecord,
    StepRecord,
    Track,
    WaitRecord,
    with_memory,
)
from penstock.schedule.schedule import BACKWARD, Edge, edges_of, neighbours
from penstock.schedule.simulate import Simulation


def simulated_trace(simulation: Simulation, edges: Iterable[Edge] | None = None) -> ps.Trace:
    """A simulation as the trace of one step."""

    schedule, costs = simulation.schedule, simulation.costs
    edges = edges_of(schedule, edges)
    sources, targets = neighbours(schedule.num_stages, edges)
    sizes = {edge: int(costs.of_edge("bytes", edge)) for edge in edges}
    parts = []
    for rank, order in enumerate(schedule.orders):
        actions, now = [], 0.0
        for action, start, end in zip(order, simulation.starts[rank], simulation.ends[rank], strict=True):
            stage, kind, _ = action
            before = sources[stage] if kind == "F" else targets[stage] if kind in BACKWARD else []
            after = targets[stage] if kind == "F" else sources[stage] if kind in BACKWARD else []
            waits = tuple(WaitRecord(peer, now, start) for peer in before if schedule.placement[peer] != rank)
            sends = tuple(SendRecord(peer, end, end, sizes[min(stage, peer), max(stage, peer)]) for peer in after)
            actions.append(ActionRecord(action, start, end, waits=waits, sends=sends))
            now = end
        parts.append(RankRecord(rank, 0.0, simulation.makespan, tuple(actions)))
    saved = {stage: int(size) for stage, size in enumerate(costs.of_stages("activation", schedule.num_stages))}
    return ps.Trace(
        schedule,
        edges,
        tracks=tuple(Track(rank, 0, rank, "simulated") for rank in range(schedule.num_ranks)),
        steps=with_memory([StepRecord(0, "step", tuple(parts))], saved),
        saved=saved,
    )
