"""What runs of layers take, as tables: for each number of layers, and each place where a run begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

import torch
from torch import Tensor

from penstock.profile.planner.segments import Segments
from penstock.profile.planner.times import Ranks, Runs

__all__ = ["Kind", "Lane"]

Move = tuple[int, int, int, int, Tensor]
"""By how many layers each of two runs goes on, from which place on, and a mask of where it may."""


@dataclass(frozen=True)
class Lane:
    """Seconds and bytes, ``[layers - 1, begin]``; runs that are too long take forever."""

    work: Tensor
    again: Tensor | None
    stays: Tensor | None
    kept: Tensor | None
    came: Tensor | None

    @classmethod
    def of(cls, segments: Segments, ranks: Ranks, high: float, layers: tuple[int, int]) -> Lane:
        """Of runs between these layers that some rank can have in time, and in its memory."""
        first, last = layers
        done, most = segments.done, high * max(ranks.speed)
        m, longest, j = last - first, 1, first
        for i in range(first, last):
            j = max(j, i + 1)
            while j < last and done[j + 1] - done[i] < most:
                j += 1
            longest = max(longest, j - i)
        needed = ranks.recompute is not False or min(ranks.memory) < inf
        blank = torch.full((longest, m), inf, dtype=torch.float64)
        sums = torch.tensor(done[first : last + 1], dtype=torch.float64)
        work = blank.clone()
        for size in range(1, longest + 1):
            work[size - 1, : m - size + 1] = sums[size:] - sums[: m - size + 1]
        if not needed:
            return cls(work, None, None, None, None)
        tables = [[[inf] * m for _ in range(longest)] for _ in range(4)]
        flight, limit = min(ranks.in_flight), max(ranks.memory)
        fit = 1
        for i in range(m):
            for size in range(1, min(longest, m - i) + 1):
                numbers = segments.run(first + i, first + i + size)
                _, stays, kept, came = numbers
                if stays + flight * (kept if ranks.recompute is False else came) > limit:
                    break
                fit = max(fit, size)
                for table, number in zip(tables, numbers, strict=True):
                    table[size - 1][i] = number
        again, stays_, kept_, came_ = (torch.tensor(table[:fit], dtype=torch.float64) for table in tables)
        return cls(work[:fit], again, stays_, kept_, came_)

    @property
    def longest(self) -> int:
        return len(self.work)

    def back(self) -> Lane:
        """The same runs, but the places counted from the last layer on, back."""
        m = self.work.shape[1]

        def turned(table: Tensor | None) -> Tensor | None:
            if table is None:
                return None
            found = torch.full_like(table, inf)
            for size in range(1, len(table) + 1):
                found[size - 1, : m - size + 1] = table[size - 1, : m - size + 1].flip(0)
            return found

        work = turned(self.work)
        assert work is not None
        return Lane(work, turned(self.again), turned(self.stays), turned(self.kept), turned(self.came))


class Kind:
    """Ranks that are alike: of the same speed, memory, micro-batches in flight, and with the same runs besides."""

    def __init__(self, segments: Segments, ranks: Ranks, rank: int, other: Runs, one: Lane, two: Lane) -> None:
        self.speed, self.limit, flight = ranks.speed[rank], ranks.memory[rank], ranks.in_flight[rank]
        self.times = 0
        self.bound = self.limit < inf
        choices = (ranks.recompute,) if ranks.recompute is not None else (False, True) if self.bound else (False,)
        self.tables = [[_table(lane, again, flight, self.bound) for again in choices] for lane in (one, two)]
        runs = [(segments.work(*run), *segments.run(*run)) for run in other]
        self.besides = _besides(runs, choices, flight)
        self.low = [[min(t[0][size].min().item() for t in tables) for size in range(lane.longest)] for tables, lane in zip(self.tables, (one, two), strict=True)]
        self.high = [[max(t[0][size][t[0][size] < inf].max().item() if (t[0][size]<inf).any() else -inf for t in tables) for size in range(lane.longest)] for tables, lane in zip(self.tables, (one, two), strict=True)]
        self.cached: tuple[float, list[Move]] | None = None

    def most(self, below: float) -> float:
        """The work that such a rank can do in time, of its two runs."""
        return below * self.speed - min(work for work, _, _ in self.besides)

    def moves(self, below: float, least: float, where: tuple[int, int, int, int]) -> Iterator[Move]:
        if self.cached is None or self.cached[0] != below:
            self.cached = below, list(self._moves(below, least))
        yield from self.cached[1]

    def _moves(self, below: float, least: float) -> Iterator[Move]:
        """All steps of such a rank that take less than the time, and fit."""
        most = self.most(below)
        one, two = self.tables
        low, high = self.low, self.high
        m = one[0][0].shape[1]
        for a in range(len(low[0])):
            for b in range(len(low[1])):
                if not low[0][a] + low[1][b] < most or high[0][a] + high[1][b] < least:
                    continue
                some: Tensor | None = None
                for (t1, s1, k1), (t2, s2, k2) in product(one, two):
                    for work, size, at_once in self.besides:
                        fine = (t1[a][:, None] + t2[b][None, :]) < below * self.speed - work
                        if s1 is not None and s2 is not None and k1 is not None and k2 is not None:
                            extra = torch.maximum(k1[a][:, None], k2[b][None, :]).clamp(min=at_once)
                            fine &= (s1[a][:, None] + s2[b][None, :]) + extra <= self.limit - size
                        some = fine if some is None else some | fine
                assert some is not None
                if some.any():
                    yield a + 1, b + 1, 0, 0, some.long().neg_()


def _table(lane: Lane, again: bool, flight: float, bound: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Seconds, bytes of all micro-batches, and bytes that are there for one of them at a time."""
    work = lane.work if not again or lane.again is None else lane.work + lane.again
    if not bound or lane.stays is None or lane.kept is None or lane.came is None:
        return work, None, None
    if not again:
        return work, lane.stays + flight * lane.kept, torch.zeros_like(lane.work)
    return work, lane.stays + flight * lane.came, (lane.kept - lane.came).nan_to_num(0.0)


def _besides(runs: list[tuple[float, float, float, float, float]], choices: Sequence[bool], flight: float) -> list[tuple[float, float, float]]:
    """Ways to have the runs besides: seconds, bytes, and bytes of one micro-batch at a time; none worse than another."""
    ways = [(0.0, 0.0, 0.0)]
    for work, more, stays, kept, came in runs:
        ways = [
            (seconds + work + again * more, size + stays + flight * (came if again else kept), max(most, again * (kept - came)))
            for seconds, size, most in ways
            for again in choices
        ]
    best: list[tuple[float, float, float]] = []
    for way in sorted(set(ways)):
        if not any(kept[1] <= way[1] and kept[2] <= way[2] for kept in best):
            best.append(way)
    return best
