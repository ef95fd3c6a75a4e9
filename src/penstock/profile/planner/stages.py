"""From layers to stages: what a schedule's work costs where a model is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import add

from penstock.profile.planner.segments import Segments
from penstock.profile.planner.times import Cuts, Ranks
from penstock.schedule.costs import Costs
from penstock.schedule.flow import Edge

__all__ = ["edges_between", "stage_costs", "static_bytes"]


def stage_costs(segments: Segments, ranks: Ranks, placement: Sequence[int], cuts: Cuts) -> Costs:
    """Seconds and bytes of each stage, on the rank that it is placed on.

    The host's time for messages is part of the actions around them.
    """
    link, beside = segments.costs.link, segments.costs.overhead
    runs = list(pairwise((0, *cuts)))

    def of(what: str, extra: float) -> tuple[float, ...]:
        return tuple(
            (segments.total(what, i, j) + extra) / ranks.speed[rank]
            for rank, (i, j) in zip(placement, runs, strict=True)
        )

    edges = edges_between(segments, cuts)
    messages = [  # of one micro-batch there, and as much back
        sum(link.host_seconds(size) for edge, size in edges.items() if stage in edge and _crosses(edge, placement))
        for stage in range(len(runs))
    ]
    activation = [segments.activation(i, j) for i, j in runs]
    inputs = [min(segments.inputs(i, j), kept) for (i, j), kept in zip(runs, activation, strict=True)]
    return Costs(
        f=tuple(map(add, of("forward", beside.forward), messages)),
        i=tuple(map(add, of("input_gradient", beside.input_gradient), messages)),
        w=of("weight_gradient", beside.weight_gradient),
        b=tuple(map(add, of("full_backward", beside.backward), messages)),
        r=of("recompute", beside.recompute),
        latency=link.latency,
        bandwidth=link.bandwidth,
        bytes=edges,
        activation=tuple(activation),
        keep=tuple(
            segments.deferred(i, j) / kept if kept else 1.0 for (i, j), kept in zip(runs, activation, strict=True)
        ),
        checkpoint=tuple(came / kept if kept else 0.0 for came, kept in zip(inputs, activation, strict=True)),
    )


def _crosses(edge: Edge, placement: Sequence[int]) -> bool:
    """Whether an edge goes from one rank to another."""
    return placement[edge[0]] != placement[edge[1]]


def edges_between(segments: Segments, cuts: Cuts) -> dict[Edge, float]:
    """What goes from one stage to another: bytes. Every stage has an edge to the next, if only with nothing in it."""
    stages = [range(i, j) for i, j in pairwise((0, *cuts))]
    stage_of = [stage for stage, layers in enumerate(stages) for _ in layers]
    pairs = {(stage_of[crossing.src], stage_of[crossing.dst]) for crossing in segments.costs.crossings}
    wanted = sorted({pair for pair in pairs if pair[0] != pair[1]} | set(pairwise(range(len(cuts)))))
    return {(src, dst): segments.costs.between(stages[src], stages[dst]) for src, dst in wanted}


def static_bytes(segments: Segments, placement: Sequence[int], cuts: Cuts, p: int) -> tuple[float, ...]:
    """For each rank, what it holds all the time: parameters, gradients, states of the optimizer, buffers."""
    held = [0.0] * p
    for rank, (i, j) in zip(placement, pairwise((0, *cuts)), strict=True):
        held[rank] += segments.static(i, j)
    return tuple(held)
