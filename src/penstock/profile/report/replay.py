"""A simulation as a trace, so that what is said of one can be said of the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.profile.trace.account import with_memory
from penstock.profile.trace.steps import Done, Part, Sent, Step, Track, Wait
from penstock.schedule.action import BACKWARD
from penstock.schedule.flow import edges_of, neighbours
from penstock.schedule.simulate import Simulation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.profile.trace.trace import Trace
    from penstock.schedule.flow import Edge

__all__ = ["replay"]


def replay(simulation: Simulation, edges: Iterable[Edge] | None = None) -> Trace:
    """A trace of one step in which everything happened as it was simulated."""
    from penstock.profile.trace.trace import Trace

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
            waits = tuple(Wait(peer, now, start) for peer in before if schedule.placement[peer] != rank)
            sends = tuple(Sent(peer, end, end, sizes[min(stage, peer), max(stage, peer)]) for peer in after)
            actions.append(Done(action, start, end, waits=waits, sends=sends))
            now = end
        parts.append(Part(rank, 0.0, simulation.makespan, tuple(actions)))
    saved = {stage: int(size) for stage, size in enumerate(costs.of_stages("activation", schedule.num_stages))}
    return Trace(
        schedule,
        edges,
        tracks=tuple(Track(rank, 0, rank, "simulated") for rank in range(schedule.num_ranks)),
        steps=with_memory([Step(0, "step", tuple(parts))], saved),
        saved=saved,
    )
