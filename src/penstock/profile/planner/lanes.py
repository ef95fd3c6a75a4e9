"""What pairs of runs take on a rank, as tables: for each number of layers, and each place where a run begins."""

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


@dataclass(frozen=True)
class Lane:
    """Seconds and bytes of runs, ``[layers - 1, begin]``: infinite where there are none, or where none fit."""

    work: Tensor
    bytes: tuple[Tensor, ...] = ()  # again, stays, kept and came: see Segments.run

    @classmethod
    def of(cls, segments: Segments, ranks: Ranks, high: float, layers: tuple[int, int]) -> Lane:
        """Of the runs between two layers that some rank can have in time."""
        first, last = layers
        done, most = segments.done, high * max(ranks.speed)
        m, longest, j = last - first, 1, first
        for i in range(first, last):
            j = max(j, i + 1)
            while j < last and done[j + 1] - done[i] < most:
                j += 1
            longest = max(longest, j - i)
        sums = torch.tensor(done[first : last + 1], dtype=torch.float64)
        work = torch.full((longest, m), inf, dtype=torch.float64)
        for size in range(1, longest + 1):
            work[size - 1, : m - size + 1] = sums[size:] - sums[: m - size + 1]
        if ranks.recompute is False and min(ranks.memory) == inf:
            return cls(work)
        tables = [[[inf] * m for _ in range(longest)] for _ in range(4)]
        flight, limit, longest = min(ranks.in_flight), max(ranks.memory), 1
        for i in range(m):
            for size in range(1, min(len(work), m - i) + 1):
                numbers = segments.run(first + i, first + i + size)
                _, stays, kept, came = numbers
                if stays + flight * (kept if ranks.recompute is False else came) > limit:
                    break
                longest = max(longest, size)
                for table, number in zip(tables, numbers, strict=True):
                    table[size - 1][i] = number
        return cls(work[:longest], tuple(torch.tensor(table[:longest], dtype=torch.float64) for table in tables))

    def back(self) -> Lane:
        """The same runs, with places that count from the last layer back."""
        m = self.work.shape[1]

        def turned(table: Tensor) -> Tensor:
            found = torch.full_like(table, inf)
            for size in range(1, len(table) + 1):
                found[size - 1, : m - size + 1] = table[size - 1, : m - size + 1].flip(0)
            return found

        return Lane(turned(self.work), tuple(map(turned, self.bytes)))


class _Table:
    """A rank's runs in a lane, recomputed or not: seconds, bytes, and bytes that are there for one at a time."""

    def __init__(self, work: Tensor, size: Tensor | None, once: Tensor | None) -> None:
        self.work, self.size, self.once = work, size, once
        self.low, self.high = work.amin(1).tolist(), work.amax(1).tolist()
        self.small = [0.0] * len(work) if size is None else size.amin(1).tolist()

    @classmethod
    def of(cls, lane: Lane, again: bool, flight: float, bound: bool) -> _Table:
        if not lane.bytes:
            return cls(lane.work, None, None)
        more, stays, kept, came = lane.bytes
        work = lane.work + more if again else lane.work
        if not bound:
            return cls(work, None, None)
        if not again:
            return cls(work, stays + flight * kept, None)
        return cls(work, stays + flight * came, torch.where(kept < inf, kept - came, inf))

    def at(self, begins: slice) -> _Table:
        size = None if self.size is None else self.size[:, begins]
        return _Table(self.work[:, begins], size, None if self.once is None else self.once[:, begins])


Besides = tuple[float, float, float]
"""Of the runs that a rank has besides: seconds, bytes, and bytes of one micro-batch at once."""

Step = tuple[int, int, int, Tensor]
"""How many layers the first run has, how many the second one or more, the first of the places where it may begin, and
a mask of ``[more layers, places of the first run, all places of the second]``."""


class Kind:
    """Ranks that are alike: of the same speed, memory, micro-batches in flight, and with the same runs besides."""

    def __init__(self, segments: Segments, ranks: Ranks, rank: int, other: Runs, lanes: tuple[Lane, Lane]) -> None:
        self.speed, self.limit, flight = ranks.speed[rank], ranks.memory[rank], ranks.in_flight[rank]
        bound = self.limit < inf
        self.choices = (ranks.recompute,) if ranks.recompute is not None else (False, True) if bound else (False,)
        self.lanes = [[_Table.of(lane, again, flight, bound) for again in self.choices] for lane in lanes]
        runs = [(segments.work(*run), *segments.run(*run)) for run in other]
        self.besides = _besides(runs, self.choices, flight)
        self.price = len(self.besides) * len(self.choices) ** 2 * (2 if bound else 1)  # of a place in a mask
        plain = [tables[0].work for tables in self.lanes]
        self.cap = self._cap(plain) if bound else inf

    def _cap(self, plain: list[Tensor]) -> float:
        """More work than the memory lets such a rank have."""
        found = -inf
        for one, two in product(*self.lanes):
            sizes, order = _bytes(two).flatten().sort()
            most = plain[1].flatten()[order].cummax(0).values
            room = max(self.limit - size for _, size, _ in self.besides) - _bytes(one).flatten()
            at = torch.searchsorted(sizes, room, right=True) - 1
            both = torch.where(at >= 0, plain[0].flatten() + most[at.clamp(min=0)], -inf)
            found = max(found, both.max().item())
        return found

    def most(self, below: float) -> float:
        """The work that such a rank can do in time, of its two runs."""
        return min(self.cap, below * self.speed - min(work for work, _, _ in self.besides))

    def steps(self, below: float, least: float, x: slice, y: slice) -> Iterator[Step]:
        """All steps from these places that take less than the time, and fit; of ``least`` work at least."""
        ones, twos = ([table.at(where) for table in lane] for lane, where in zip(self.lanes, (x, y), strict=True))
        time = below * self.speed
        lows = [min(lows) for lows in zip(*(two.low for two in twos), strict=True)]
        highs = [max(highs) for highs in zip(*(two.high for two in twos), strict=True)]
        besides = min(work for work, _, _ in self.besides)
        some = torch.stack([one.work for one in ones]).amin(0) + (min(lows) + besides) < time
        firsts, lasts = some.int().argmax(1).tolist(), some.flip(1).int().argmax(1).tolist()
        for a, possible in enumerate(some.any(1).tolist()):
            low, high = min(one.low[a] for one in ones) + besides, max(one.high[a] for one in ones)
            sizes = [b for b, more in enumerate(lows) if low + more < time and high + highs[b] >= least]
            if possible and sizes:
                rows, bs = slice(firsts[a], some.shape[1] - lasts[a]), slice(sizes[0], sizes[-1] + 1)
                ways = [way for way in product(ones, twos, self.besides) if self._may(*way, time, a, bs)]
                if ways:
                    yield a + 1, sizes[0] + 1, rows.start, self._fine(ways, time, a, rows, bs)

    def _may(self, one: _Table, two: _Table, besides: Besides, time: float, a: int, bs: slice) -> bool:
        work, size, _ = besides
        in_time = one.low[a] + min(two.low[bs]) < time - work
        return in_time and one.small[a] + min(two.small[bs]) <= self.limit - size

    def _fine(self, ways: list[tuple[_Table, _Table, Besides]], time: float, a: int, rows: slice, bs: slice) -> Tensor:
        """Where one of the ways is in time, and fits."""
        some: Tensor | None = None
        for one, two, (work, size, at_once) in ways:
            fine = one.work[a, rows, None] + two.work[bs, None, :] < time - work
            if one.size is not None and two.size is not None:
                held = one.size[a, rows, None] + two.size[bs, None, :]
                if one.once is not None and two.once is not None:
                    held += torch.maximum(one.once[a, rows, None], two.once[bs, None, :]).clamp_(min=at_once)
                elif one.once is not None:
                    held += one.once[a, rows, None].clamp(min=at_once)
                elif two.once is not None:
                    held += two.once[bs, None, :].clamp(min=at_once)
                else:
                    held += at_once
                fine &= held <= self.limit - size
            some = fine if some is None else some.logical_or_(fine)
        assert some is not None
        return some


def _bytes(table: _Table) -> Tensor:
    """At least: of two runs that are recomputed, one is there at once, and so half of both."""
    assert table.size is not None
    return table.size if table.once is None else table.size + table.once / 2


def _besides(
    runs: list[tuple[float, float, float, float, float]], choices: Sequence[bool], flight: float
) -> list[Besides]:
    """All ways to have these runs, but for those that are worse than another."""
    ways = [(0.0, 0.0, 0.0)]
    for work, more, stays, kept, came in runs:
        ways = [
            (seconds + work + more, size + stays + flight * came, max(most, kept - came))
            if again
            else (seconds + work, size + stays + flight * kept, most)
            for seconds, size, most in ways
            for again in choices
        ]
    best: list[Besides] = []
    for way in sorted(set(ways)):
        if not any(kept[1] <= way[1] and kept[2] <= way[2] for kept in best):
            best.append(way)
    return best
