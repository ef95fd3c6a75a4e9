"""How busy ranks are with given cuts, and whether they have the memory for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from penstock.profile.planner.segments import Segments

__all__ = ["Cuts", "Ranks", "Runs", "bottleneck", "cheapest", "fits", "held"]

Cuts = tuple[int, ...]
"""Where the stages end: the last one at the last layer."""

Runs = Sequence[tuple[int, int]]
"""The layers of a rank's stages: from which, up to which, not included."""


@dataclass(frozen=True)
class Ranks:
    """The devices in their order: how fast each is, its memory, and how many micro-batches it has in flight.

    ``recompute``: all stages, none, or (None) those that need it for the memory.
    """

    speed: tuple[float, ...]
    memory: tuple[float, ...]
    in_flight: tuple[float, ...]
    recompute: bool | None = False

    def __len__(self) -> int:
        return len(self.speed)


def bottleneck(segments: Segments, ranks: Ranks, placement: Sequence[int], cuts: Cuts) -> float:
    """The time of the busiest rank or channel for one micro-batch; infinite where a rank's memory is too small."""
    runs: list[list[tuple[int, int]]] = [[] for _ in range(len(ranks))]
    for rank, run in zip(placement, pairwise((0, *cuts)), strict=True):
        runs[rank].append(run)
    busiest = 0.0
    for rank, own in enumerate(runs):
        again = cheapest(segments, ranks, rank, own)
        if again is None:
            return inf
        busiest = max(busiest, _work(segments, own, again) / ranks.speed[rank])
    here = pairwise(zip(placement, (0, *cuts), strict=False))
    crossing = [segments.transfer[begin] for (a, _), (b, begin) in here if a != b]
    return max([busiest, *crossing])


def fits(segments: Segments, ranks: Ranks, rank: int, below: float, runs: Runs) -> bool:
    """Whether a rank takes less than some time for these runs of layers, and has the memory."""
    most = below * ranks.speed[rank]
    if not _work(segments, runs, ()) < most:
        return False
    if ranks.recompute is False and ranks.memory[rank] == inf:
        return True
    again = cheapest(segments, ranks, rank, runs)
    return again is not None and _work(segments, runs, again) < most


def cheapest(segments: Segments, ranks: Ranks, rank: int, runs: Runs) -> tuple[int, ...] | None:
    """Which of the runs to recompute, so that the rank has the memory, and its work is the least; None if none will."""
    limit, count = ranks.memory[rank], ranks.in_flight[rank]
    if ranks.recompute is not None or limit == inf:
        again = tuple(range(len(runs))) if ranks.recompute else ()
        return again if limit == inf or held(segments, runs, again, count) <= limit else None
    if held(segments, runs, (), count) <= limit:
        return ()
    return _least_again(segments, runs, limit, count)


def held(segments: Segments, runs: Runs, again: Sequence[int], in_flight: float) -> float:
    """A rank's bytes with so many micro-batches in flight; of those that are recomputed, one is there at a time.

    What comes to a stage is taken to be a part of what its backward needs, as it is for linear layers and norms.
    """
    total, most = 0.0, 0.0
    for number, (i, j) in enumerate(runs):
        total += segments.static(i, j)
        kept = segments.activation(i, j)
        if number in again:
            inputs = min(kept, segments.inputs(i, j))
            total += in_flight * inputs
            most = max(most, kept - inputs)
        else:
            total += in_flight * kept
    return total + most


def _work(segments: Segments, runs: Runs, again: Sequence[int]) -> float:
    work = 0.0
    for i, j in runs:
        work += segments.work(i, j)
    for number in again:
        work += segments.again(*runs[number])
    return work


def _least_again(segments: Segments, runs: Runs, limit: float, in_flight: float) -> tuple[int, ...] | None:
    """Of all choices of runs, the one that takes the least work again; of several such, one with few runs."""
    bytes_ = 0.0
    choices: list[tuple[float, float, float, tuple[int, ...]]] = [(0.0, 0.0, 0.0, ())]  # work, bytes less, at once
    for number, (i, j) in enumerate(runs):
        kept = segments.activation(i, j)
        away = kept - min(kept, segments.inputs(i, j))
        bytes_ += segments.static(i, j) + in_flight * kept
        if away > 0:
            work = segments.again(i, j)
            choices += [
                (more + work, less + in_flight * away, max(most, away), (*again, number))
                for more, less, most, again in choices
            ]
    fit = [(work, len(again), again) for work, less, most, again in choices if bytes_ - less + most <= limit]
    return min(fit)[2] if fit else None
