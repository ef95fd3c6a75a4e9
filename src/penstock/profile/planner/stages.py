"""From layers to stages: what a schedule's work costs where a model is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from penstock.profile.planner.segments import Segments
from penstock.profile.planner.times import Cuts, Ranks
from penstock.schedule.costs import Costs
from penstock.schedule.flow import Edge

__all__ = ["edges_between", "stage_costs", "static_bytes"]


def stage_costs(segments: Segments, ranks: Ranks, placement: Sequence[int], cuts: Cuts) -> Costs:
    """Seconds and bytes of each stage, on the rank that it is placed on."""
    link, beside = segments.costs.link, segments.costs.overhead
    runs = list(pairwise((0, *cuts)))

    def of(what: str, extra: float) -> tuple[float, ...]:
        return tuple(
            (segments.total(what, i, j) + extra) / ranks.speed[rank]
            for rank, (i, j) in zip(placement, runs, strict=True)
        )

    activation = [segments.activation(i, j) for i, j in runs]
    inputs = [min(segments.inputs(i, j), kept) for (i, j), kept in zip(runs, activation, strict=True)]
    return Costs(
        f=of("forward", beside.forward),
        i=of("input_gradient", beside.input_gradient),
        w=of("weight_gradient", beside.weight_gradient),
        b=of("full_backward", beside.backward),
        r=of("recompute", beside.recompute),
        latency=link.latency,
        bandwidth=link.bandwidth,
        bytes=edges_between(segments, cuts),
        activation=tuple(activation),
        checkpoint=tuple(came / kept if kept else 0.0 for came, kept in zip(inputs, activation, strict=True)),
    )


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
