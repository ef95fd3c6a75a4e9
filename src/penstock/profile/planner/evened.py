"""Cuts that are good enough to start from, at once: even stages, moved as long as a move helps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf

from penstock.profile.planner.segments import Segments
from penstock.profile.planner.times import Cuts, Ranks, bottleneck

__all__ = ["evened"]


def evened(segments: Segments, ranks: Ranks, placement: Sequence[int]) -> Cuts | None:
    """Even stages, moved until no move of up to three neighbouring cuts by a layer lets the busiest rank have less."""
    n, stages = segments.n, len(placement)
    if stages > n:
        return None
    share = segments.work(0, n) / stages
    cuts, at = list[int](), 0
    for stage in range(stages - 1):
        at += 1
        while at < n - (stages - stage - 1) and segments.work(0, at) + segments.work(at, at + 1) / 2 < share * (
            stage + 1
        ):
            at += 1
        cuts.append(at)
    cuts.append(n)
    best, value = tuple(cuts), _spread(segments, ranks, placement, tuple(cuts))
    moving = True
    while moving:
        moving = False
        for k in range(stages - 1):
            for width in (1, 2, 3):
                for step in (-1, 1):
                    moved = list(best)
                    for at in range(k, min(k + width, stages - 1)):
                        moved[at] += step
                    if any(b <= a for a, b in pairwise((0, *moved))):
                        continue
                    tried = _spread(segments, ranks, placement, tuple(moved))
                    if tried < value:
                        best, value, moving = tuple(moved), tried, True
    return None if value[0] == inf else best


def _spread(segments: Segments, ranks: Ranks, placement: Sequence[int], cuts: Cuts) -> tuple[float, float]:
    """The bottleneck, and how uneven the ranks are: of two equal bottlenecks the one with fewer such ranks."""
    work = [0.0] * len(ranks)
    for rank, (i, j) in zip(placement, pairwise((0, *cuts)), strict=True):
        work[rank] += segments.work(i, j) / ranks.speed[rank]
    top = max(work)
    uneven = sum((time / top) ** 8 for time in work) if top else 0.0
    return bottleneck(segments, ranks, placement, cuts), uneven
