"""From layers to stages: what a schedule's work costs where a model is cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from penstock.profile.planner.segments import Segments, values_of
from penstock.profile.planner.times import Cuts, Ranks
from penstock.schedule.costs import Costs
from penstock.schedule.flow import Edge

__all__ = ["edges_between", "stage_costs", "static_bytes"]


def stage_costs(segments: Segments, ranks: Ranks, placement: Sequence[int], cuts: Cuts) -> Costs:
    """Seconds and bytes of each stage, on the rank that it is placed on; a recompute is part of the input gradient."""
    layers, link = segments.costs.layers, segments.costs.link
    runs = list(pairwise((0, *cuts)))

    def of(*names: str) -> tuple[float, ...]:
        return tuple(
            sum(getattr(layer, name) for layer in layers[i:j] for name in names) / ranks.speed[rank]
            for rank, (i, j) in zip(placement, runs, strict=True)
        )

    again = ["recompute"] if segments.recomputed else []
    return Costs(
        f=of("forward"),
        i=of("input_gradient", *again),
        w=of("weight_gradient"),
        b=of("full_backward", *again),
        r=of("recompute"),
        latency=link.latency,
        bandwidth=link.bandwidth,
        bytes=edges_between(segments, cuts),
        activation=tuple(segments.activation(i, j) for i, j in runs),
    )


def edges_between(segments: Segments, cuts: Cuts) -> dict[Edge, float]:
    """What goes from one stage to another: bytes. Every stage has an edge to the next, if only with nothing in it."""
    stage_of = [stage for stage, (i, j) in enumerate(pairwise((0, *cuts))) for _ in range(i, j)]
    edges: dict[Edge, float] = defaultdict(float, dict.fromkeys(pairwise(range(len(cuts))), 0.0))
    sent = set()
    for layer, to, key, size in values_of(segments.costs.crossings):
        src, dst = stage_of[layer], stage_of[to]
        if src != dst and (key is None or (layer, key, dst) not in sent):
            sent.add((layer, key, dst))
            edges[src, dst] += size
    return dict(sorted(edges.items()))


def static_bytes(segments: Segments, placement: Sequence[int], cuts: Cuts, p: int) -> tuple[float, ...]:
    """For each rank, what it holds all the time: parameters, gradients, states of the optimizer, buffers."""
    held = [0.0] * p
    for rank, (i, j) in zip(placement, pairwise((0, *cuts)), strict=True):
        held[rank] += segments.static(i, j)
    return tuple(held)
