"""How busy ranks are with given cuts, and whether they have the memory for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from penstock.profile.planner.segments import Segments

__all__ = ["Cuts", "Ranks", "bottleneck", "fits"]

Cuts = tuple[int, ...]
"""Where the stages end: the last one at the last layer."""


@dataclass(frozen=True)
class Ranks:
    """The devices in their order: how fast each is, its memory, and how many micro-batches it has in flight."""

    speed: tuple[float, ...]
    memory: tuple[float, ...]
    in_flight: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.speed)


def bottleneck(segments: Segments, ranks: Ranks, placement: Sequence[int], cuts: Cuts) -> float:
    """The time of the busiest rank or channel for one micro-batch; infinite where a rank's memory is too small."""
    work, memory = [0.0] * len(ranks), [0.0] * len(ranks)
    for rank, (i, j) in zip(placement, pairwise((0, *cuts)), strict=True):
        work[rank] += segments.work(i, j)
        memory[rank] += segments.static(i, j) + ranks.in_flight[rank] * segments.activation(i, j)
    if any(needs > limit for needs, limit in zip(memory, ranks.memory, strict=True)):
        return inf
    busiest = max(time / speed for time, speed in zip(work, ranks.speed, strict=True))
    here = pairwise(zip(placement, (0, *cuts), strict=False))
    crossing = [segments.transfer[begin] for (a, _), (b, begin) in here if a != b]
    return max([busiest, *crossing])


def fits(segments: Segments, ranks: Ranks, rank: int, below: float, *runs: tuple[int, int]) -> bool:
    """Whether a rank takes less than some time for these runs of layers, and has the memory."""
    work = 0.0
    for i, j in runs:
        work += segments.work(i, j)
    if not work < below * ranks.speed[rank]:
        return False
    if ranks.memory[rank] == inf:
        return True
    needs = sum(segments.static(i, j) + ranks.in_flight[rank] * segments.activation(i, j) for i, j in runs)
    return needs <= ranks.memory[rank]
