"""Cuts and order together: uneven cuts pay only if the order knows them, and an order is only as good as its cuts.

The search starts from the cuts with the least busy ranks, and moves cuts, one or a few neighbours by a layer, as long
as the order that is made for them becomes shorter. Most moves cost nothing: their lower bound is no better than what
there is already.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import ScheduleError
from penstock.profile.planner.cuts import cut, evened, placement_of
from penstock.profile.planner.segments import Segments
from penstock.profile.planner.stages import stage_costs, static_bytes
from penstock.profile.planner.times import Cuts, Ranks
from penstock.schedule.auto import Found, auto
from penstock.schedule.costs import Costs

__all__ = ["Joint", "joint"]

QUICK = 0.05  # seconds for the order of cuts that are only tried; then four times as long


@dataclass(frozen=True)
class Joint:
    """Cuts, and the order for them."""

    cuts: Cuts
    placement: tuple[int, ...]
    costs: Costs
    found: Found
    static: tuple[float, ...]

    @property
    def memory(self) -> tuple[float, ...]:
        """For each rank, the bytes at its peak."""
        return tuple(map(sum, zip(self.static, self.found.peak, strict=True)))


def joint(
    segments: Segments,
    ranks: Ranks,
    m: int,
    *,
    shape: str,
    v: int,
    seconds: float = 3.0,
    moves: bool = True,
    seed: int = 0,
) -> Joint | None:
    """The best that is found in about ``seconds`` of a core; None if nothing keeps the ranks' memory.

    Without a limit on memory, a rank may keep what the fullest rank of 1F1B would.
    """
    begin = time.thread_time()

    def left() -> float:
        return seconds - (time.thread_time() - begin)

    search = _Search(segments, ranks, m, placement_of(shape, len(ranks), v), seed)
    for cuts in _beginnings(segments, ranks, m, shape, v, exact=moves):
        search.try_(cuts, min(QUICK, seconds / 40))
    if search.best is None:
        return None
    for quick in (min(QUICK, seconds / 40), min(4 * QUICK, seconds / 20)) if moves else ():
        moved = True
        while moved and search.best.found.gap > 0:
            before = search.best
            for cuts in _neighbours(before.cuts):
                if left() <= seconds / 2:
                    break
                search.try_(cuts, quick)
            moved = search.best is not before
        search.forget()
    search.try_(search.best.cuts, max(QUICK, left()))
    return search.best


class _Search:
    """The best so far."""

    def __init__(self, segments: Segments, ranks: Ranks, m: int, placement: tuple[int, ...], seed: int) -> None:
        self.segments, self.ranks, self.m, self.placement, self.seed = segments, ranks, m, placement, seed
        self.best: Joint | None = None
        self._seen: set[Cuts] = set()

    def forget(self) -> None:
        """Let cuts be tried again, that were: for longer."""
        self._seen.clear()

    def try_(self, cuts: Cuts, seconds: float) -> None:
        if cuts in self._seen:
            return
        self._seen.add(cuts)
        costs = stage_costs(self.segments, self.ranks, self.placement, cuts)
        if self.best is not None and self._floor(costs) >= self.best.found.makespan:
            return
        static = static_bytes(self.segments, self.placement, cuts, len(self.ranks))
        caps = [limit - held for limit, held in zip(self.ranks.memory, static, strict=True)]
        if min(caps) < 0:
            return
        cap = None if max(caps) == float("inf") else caps
        edges = tuple(costs.bytes) if isinstance(costs.bytes, dict) else None
        try:
            found = auto(costs, self.placement, self.m, cap=cap, edges=edges, seconds=seconds, seed=self.seed)
        except ScheduleError:  # no order keeps such a cap
            return
        if self.best is None or found.makespan < self.best.found.makespan * (1 - 1e-12):
            self.best = Joint(cuts, self.placement, costs, found, static)

    def _floor(self, costs: Costs) -> float:
        """No order takes less: a rank has its work to do, once the first micro-batch has come to it."""
        stages = len(self.placement)
        times = costs.durations(stages)
        latency = costs.latency if isinstance(costs.latency, float) else 0.0
        work = [0.0] * len(self.ranks)
        comes = [float("inf")] * len(self.ranks)
        passed = 0.0
        for stage, rank in enumerate(self.placement):
            if stage and self.placement[stage - 1] != rank:
                passed += latency
            comes[rank] = min(comes[rank], passed)
            passed += times["F"][stage]
            work[rank] += sum(times[kind][stage] for kind in "FIW")
        return max(head + self.m * each for head, each in zip(comes, work, strict=True))


def _beginnings(segments: Segments, ranks: Ranks, m: int, shape: str, v: int, *, exact: bool) -> Iterator[Cuts]:
    """Cuts to start from: for many micro-batches in flight, and for few. ``exact`` ones take longer to find."""
    p = len(ranks)
    for in_flight in sorted({min(m, p), min(m, max(1, p // 2)), 1}):
        such = Ranks(ranks.speed, ranks.memory, tuple(float(in_flight) for _ in range(p)))
        even = evened(segments, such, shape, v)
        if even is not None:
            yield even
        if exact or even is None:
            found = cut(segments, such, shape, v)
            if found is not None:
                yield found


def _neighbours(cuts: Cuts) -> Iterator[Cuts]:
    """A few neighbouring cuts, moved by a layer."""
    inner: Sequence[int] = cuts[:-1]
    for width in (1, 2, 4, 8):
        if width > max(1, len(inner)):
            break
        for k in range(len(inner) - width + 1):
            for step in (-1, 1):
                moved = (*inner[:k], *(at + step for at in inner[k : k + width]), *inner[k + width :], cuts[-1])
                if all(a < b for a, b in pairwise((0, *moved))):
                    yield moved
