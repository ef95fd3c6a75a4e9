"""How busy ranks are with given cuts, and whether they have the memory for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from penstock.profile.planner.segments import Segments

__all__ = ["Cuts", "Ranks", "Runs", "bottleneck", "cheapest", "fits", "held", "price", "time_of"]

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
    busiest = max(time_of(segments, ranks, rank, own) for rank, own in enumerate(runs))
    here = pairwise(zip(placement, (0, *cuts), strict=False))
    crossing = [segments.transfer[begin] for (a, _), (b, begin) in here if a != b]
    return max([busiest, *crossing])


def time_of(segments: Segments, ranks: Ranks, rank: int, runs: Runs) -> float:
    """A rank's time for one micro-batch; infinite where its memory is too small."""
    again = cheapest(segments, ranks, rank, runs)
    return inf if again is None else _work(segments, runs, again) / ranks.speed[rank]


def fits(segments: Segments, ranks: Ranks, rank: int, below: float, runs: Runs) -> bool:
    """Whether a rank takes less than some time for these runs of layers, and has the memory."""
    most = below * ranks.speed[rank]
    if not _work(segments, runs, ()) < most:
        return False
    if ranks.recompute is False and ranks.memory[rank] == inf:
        return True
    again = cheapest(segments, ranks, rank, runs)
    return again is not None and _work(segments, runs, again) < most


def price(ranks: Ranks, runs: int) -> int:
    """How much effort it is to see whether so many runs fit, in less than a microsecond each."""
    if ranks.recompute is None and min(ranks.memory) < inf:
        return 5 + 2 * runs + (1 << runs)
    return 3 + (4 if ranks.recompute else 2) * runs


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
    """A rank's bytes with so many micro-batches in flight; of those that are recomputed, one is there at a time."""
    total, most = 0.0, 0.0
    for number, run in enumerate(runs):
        _, stays, kept, came = segments.run(*run)
        if number in again:
            total += stays + in_flight * came
            most = max(most, kept - came)
        else:
            total += stays + in_flight * kept
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
    sizes = [segments.run(*run) for run in runs]
    excess = sum(stays + in_flight * kept for _, stays, kept, _ in sizes) - limit
    if excess > in_flight * sum(kept - came for _, _, kept, came in sizes):
        return None
    choices: list[tuple[float, float, float, tuple[int, ...]]] = [(0.0, 0.0, 0.0, ())]  # work, bytes less, at once
    for number, (work, _, kept, came) in enumerate(sizes):
        away = kept - came
        if away > 0:
            choices += [
                (more + work, less + in_flight * away, max(most, away), (*again, number))
                for more, less, most, again in choices
            ]
    fit = [(work, len(again), again) for work, less, most, again in choices if less - most >= excess]
    return min(fit)[2] if fit else None
