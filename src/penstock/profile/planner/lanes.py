"""What pairs of runs take on a rank, as tables: for each number of layers, and each place where a run begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import torch
from torch import Tensor

from penstock.profile.planner.segments import Ranks, Runs, Segments
from penstock.profile.planner.windows import Window

__all__ = ["Kind", "Lane", "Step"]


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

    def part(self, of: Callable[[Tensor], Tensor]) -> _Table:
        """The same part of all numbers."""
        size, once = (None if table is None else of(table) for table in (self.size, self.once))
        return _Table(of(self.work), size, once)

    @cached_property
    def low(self) -> list[float]:
        """The least seconds of so many layers."""
        return _numbers(self.work.amin(1))

    @cached_property
    def high(self) -> list[float]:
        """The most seconds of so many layers, of all runs that there are."""
        return _numbers(_there(self.work).amax(1))

    @cached_property
    def small(self) -> list[float]:
        """The least bytes of so many layers."""
        return [0.0] * len(self.work) if self.size is None else _numbers(self.size.amin(1))

    @cached_property
    def big(self) -> list[float]:
        """The most bytes of so many layers, of all runs that there are."""
        return [0.0] * len(self.work) if self.size is None else _numbers(_there(self.size).amax(1))


Besides = tuple[float, float, float]
"""Of the runs that a rank has besides: seconds, bytes, and bytes of one micro-batch at once."""

Room = tuple[Tensor, Tensor, bool]
"""What the second run uses of time or memory, what the first one leaves of it, and whether it must be less."""


class _Way:
    """One run, the other one, and those besides: each recomputed or not."""

    def __init__(self, kind: Kind, below: float, one: _Table, two: _Table, besides: Besides) -> None:
        self.one, self.two, (self.work, size, self.at_once) = one, two, besides
        self.time, self.limit = below * kind.speed - self.work, kind.limit - size

    @cached_property
    def rooms(self) -> list[Room]:
        one, two = self.one, self.two
        rooms = [(two.work, self.time - one.work, True)]
        if one.size is not None and two.size is not None:
            room = self.limit - one.size
            if two.once is not None:
                rooms.append((two.size + two.once.clamp(min=self.at_once), room, False))
            if one.once is not None:
                rooms.append((two.size, room - one.once.clamp(min=self.at_once), False))
            elif two.once is None:
                rooms.append((two.size, room - self.at_once, False))
        return rooms

    def may(self, a: int, bs: slice) -> bool:
        """Whether it can be in time, and fit, for so many layers."""
        one, two = self.one, self.two
        return one.low[a] + min(two.low[bs]) < self.time and one.small[a] + min(two.small[bs]) <= self.limit

    def must(self, a: int, bs: slice) -> bool:
        """Whether it fits in any case."""
        one, two = self.one, self.two
        return one.once is two.once is None and one.big[a] + max(two.big[bs]) + self.at_once <= self.limit


@dataclass(frozen=True)
class Step:
    """How many layers the first run may have, and how many the second one then; and where the first one begins."""

    a: int
    bs: range
    rows: slice
    ways: list[_Way]

    def fine(self, rows: slice, columns: int) -> Tensor:
        """Where one of the ways is in time, and fits: of ``[layers of the second run, rows, columns]``."""
        found: Tensor | None = None
        sizes = slice(self.bs.start - 1, self.bs.stop - 1)
        for way in self.ways:
            fine: Tensor | None = None
            for used, room, less in way.rooms:
                across = used[sizes].unfold(1, columns, 1)[:, rows]
                some = torch.empty(across.shape, dtype=torch.bool)  # in this order in memory, as words are
                (torch.lt if less else torch.le)(across, room[self.a - 1, rows, None], out=some)
                fine = some if fine is None else fine.logical_and_(some)
            assert fine is not None
            found = fine if found is None else found.logical_or_(fine)
        assert found is not None
        return found


class Kind:
    """Ranks that are alike: of the same speed, memory, micro-batches in flight, and with the same runs besides."""

    def __init__(self, segments: Segments, ranks: Ranks, rank: int, other: Runs, lanes: tuple[Lane, Lane]) -> None:
        self.speed, self.limit, flight = ranks.speed[rank], ranks.memory[rank], ranks.in_flight[rank]
        bound = self.limit < inf
        self.choices = (ranks.recompute,) if ranks.recompute is not None else (False, True) if bound else (False,)
        one = [_Table.of(lanes[0], again, flight, bound) for again in self.choices]
        same = lanes[0] is lanes[1]
        self.lanes = one, one if same else [_Table.of(lanes[1], again, flight, bound) for again in self.choices]
        runs = [(segments.work(*run), *segments.run(*run)) for run in other]
        self.besides = _besides(runs, self.choices, flight)
        self.price = len(self.besides) * len(self.choices) ** 2 * (2 if bound else 1)  # of a place in a mask
        plain = [tables[0].work for tables in self.lanes]
        self.cap = self._cap(plain) if bound else inf

    def _cap(self, plain: list[Tensor]) -> float:
        """More work than the memory lets such a rank have."""
        found = -inf
        room = max(self.limit - size for _, size, _ in self.besides)
        for two in self.lanes[1]:
            sizes, order = _bytes(two).flatten().sort()
            most = plain[1].flatten()[order].cummax(0).values
            for one in self.lanes[0]:
                at = torch.searchsorted(sizes, room - _bytes(one).flatten(), right=True) - 1
                both = torch.where(at >= 0, plain[0].flatten() + most[at.clamp(min=0)], -inf)
                found = max(found, both.max().item())
        return found

    def most(self, below: float) -> float:
        """The work that such a rank can do in time, of its two runs."""
        return min(self.cap, below * self.speed - min(work for work, _, _ in self.besides))

    def steps(self, below: float, least: float, window: Window) -> list[Step]:
        """All steps from these places that may take less than the time, and fit; of ``least`` work at least."""
        ones = [table.part(window.down) for table in self.lanes[0]]
        twos = [table.part(lambda values: window.along(values, inf)) for table in self.lanes[1]]
        time = below * self.speed
        lows = [min(lows) for lows in zip(*(two.low for two in twos), strict=True)]
        highs = [max(highs) for highs in zip(*(two.high for two in twos), strict=True)]
        besides = min(work for work, _, _ in self.besides)
        some = torch.stack([one.work for one in ones]).amin(0) + (min(lows) + besides) < time
        firsts, lasts = some.int().argmax(1).tolist(), some.flip(1).int().argmax(1).tolist()
        every = [_Way(self, below, *way) for way in self._ways(ones, twos)]
        found = []
        for a in some.any(1).nonzero().flatten().tolist():
            low, high = min(one.low[a] for one in ones) + besides, max(one.high[a] for one in ones)
            sizes = [b for b, more in enumerate(lows) if low + more < time and high + highs[b] >= least]
            if sizes:
                bs = slice(sizes[0], sizes[-1] + 1)
                ways = every[:1] if every[0].must(a, bs) else [way for way in every if way.may(a, bs)]
                if ways:
                    rows = slice(firsts[a], window.rows - lasts[a])
                    found.append(Step(a + 1, range(bs.start + 1, bs.stop + 1), rows, ways))
        return found

    def _ways(self, ones: list[_Table], twos: list[_Table]) -> list[tuple[_Table, _Table, Besides]]:
        """All ways to recompute runs or not: the first takes the least time."""
        return [(one, two, besides) for one in ones for two in twos for besides in self.besides]

    def seconds(self, below: float, a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> Tensor:
        """What runs of so many layers from these places take together: infinite where it is too long, or none fit."""
        found = torch.full(a.shape, inf, dtype=torch.float64)
        ones = [table.part(lambda values: values[a - 1, x]) for table in self.lanes[0]]
        twos = [table.part(lambda values: values[b - 1, y]) for table in self.lanes[1]]
        for one, two, besides in self._ways(ones, twos):
            work = one.work + two.work + besides[0]
            for used, room, less in _Way(self, below, one, two, besides).rooms:
                work = torch.where(used < room if less else used <= room, work, inf)
            found = torch.minimum(found, work)
        return found


def _there(table: Tensor) -> Tensor:
    """Without the runs that there are not."""
    return torch.where(table < inf, table, -inf)


def _numbers(values: Tensor) -> list[float]:
    found: list[float] = values.tolist()
    return found


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
