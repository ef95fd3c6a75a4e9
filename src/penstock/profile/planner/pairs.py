"""Two runs of layers on every rank: whether all can keep below a time, and with which cuts.

It is gone through the ranks, with all states at once: how far the two runs have got, ``x`` and ``y``. All that can be
reached are kept, none is taken to be better than another, so that the answer is sure: whatever is recomputed, and
wherever it can be cut.

    v          ``x`` goes up from the first layer, ``y`` counts down from the last; they meet at the last rank
    loop       ``x`` goes up from the first layer, ``y`` from where the second round begins; ``x`` must end there

Where the second round of a loop begins is not tried one after the other: at ``x`` and ``y`` there is a word of bits,
one for each such place with which they can be reached. A step of a rank, by ``a`` and ``b`` layers, moves all words at
once to ``x + a`` and ``y + b``, if what the rank has to do is below the time there, and fits its memory.

States that leave more than the ranks after them can do in time are left out, and so are those that leave too few
layers. There is a limit on how much is looked at; an answer that would need more is a no that is not sure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, inf

import torch
from torch import Tensor

from penstock.profile.planner.bounds import works_of
from penstock.profile.planner.lanes import Kind, Lane
from penstock.profile.planner.segments import Segments
from penstock.profile.planner.times import Cuts, Ranks, Runs, time_of

__all__ = ["Pairs", "ThereAndBack", "TwiceRound"]

_LESS = 1 - 1e-11  # what is less by rounding alone is not less
_ROUNDING = 1 + 1e-9
_BITS = 63


@dataclass(frozen=True)
class _Reached:
    """The states before a rank: words of bits for each ``x`` and ``y`` from the first ones on."""

    words: Tensor  # [words, x, y]
    x: int
    y: int


class TooMuchError(Exception):
    """There are more states than may be looked at."""


class Pairs(ABC):
    """Two runs a rank, of layers from the first to the last; ``other`` are runs that ranks have besides.

    ``high`` is the longest time that is asked for. ``effort`` says how much may be looked at, in about a microsecond
    each, and then how much is left of that.
    """

    def __init__(
        self,
        segments: Segments,
        ranks: Ranks,
        high: float,
        effort: int,
        layers: tuple[int, int] | None = None,
        other: Sequence[Runs] | None = None,
    ) -> None:
        self.segments, self.ranks, self.effort = segments, ranks, effort
        self.first, last = layers or (0, segments.n)
        self.m, self.p = last - self.first, len(ranks)
        self.other = other or [()] * self.p
        self.bound = 0.0  # no cuts keep below this: that is sure
        works = works_of(segments, ranks)[self.first : last]
        self.done = torch.tensor([0.0, *accumulate(works)], dtype=torch.float64)
        self.total = float(self.done[-1])
        self.transfer = torch.tensor(segments.transfer[self.first : last + 1], dtype=torch.float64)
        one = Lane.of(segments, ranks, high, (self.first, last))
        self.lanes = one, one.back() if self.backwards else one
        alike: dict[tuple[object, ...], Kind] = {}
        self.kinds = []
        for rank, runs in enumerate(self.other):
            such = ranks.speed[rank], ranks.memory[rank], ranks.in_flight[rank], *runs
            if such not in alike:
                alike[such] = Kind(segments, ranks, rank, runs, self.lanes)
            self.kinds.append(alike[such])

    backwards = False

    def __call__(self, below: float) -> Cuts | None:
        """Cuts with which every rank keeps below a time."""
        try:
            found = self._through(below)
        except TooMuchError:
            return None
        if found is None:
            self.bound = max(self.bound, below)
        return found

    # ── through the ranks ────────────────────────────────────────────────────────────────────────────────────────

    def _through(self, below: float) -> Cuts | None:
        caps = [kind.most(below * _LESS) for kind in self.kinds]
        if min(caps) <= 0:
            return None
        after = [0.0, *accumulate(reversed(caps))][::-1]
        slack = after[0] - self.total
        if slack * _ROUNDING < 0:
            return None
        is_open = self.transfer < below
        now = self._start(below, is_open)
        passed = []
        for rank in range(self.p):
            if now is None:
                return None
            passed.append(now)
            now = self._step(rank, now, below * _LESS, caps[rank] - slack * _ROUNDING, is_open, after[rank + 1])
        if now is None:
            return None
        return self._traced(below, passed, now)

    def _step(
        self, rank: int, now: _Reached, below: float, least: float, is_open: Tensor, rest: float
    ) -> _Reached | None:
        words, x0, y0 = now.words, now.x, now.y
        _, height, width = words.shape
        one, two = self.lanes
        x1, y1 = self._ends(rank)
        x1, y1 = min(x1, x0 + height - 1 + len(one.work)), min(y1, y0 + width - 1 + len(two.work))
        if x1 <= x0 or y1 <= y0:
            return None
        found = words.new_zeros((len(words), x1 - x0, y1 - y0))  # from x0 + 1 and y0 + 1 on
        none = words.new_zeros(())
        kind = self.kinds[rank]
        steps = kind.steps(below, least, slice(x0, x0 + height), slice(y0, y0 + width))
        for a, b, i, fine in steps:
            k = min(i + fine.shape[1], x1 - a + 1 - x0)
            if k > i:
                part = torch.where(fine[:, : k - i], words[:, None, i:k], none)
                self._spend(20 + 8 * len(fine) + part.numel() // 400 + fine.numel() * kind.price // 400)
                for more in range(len(fine)):
                    right = min(width, y1 - b - more + 1 - y0)
                    if right > 0:
                        into = found[:, i + a - 1 : k + a - 1, b + more - 1 : b + more - 1 + right]
                        into.bitwise_or_(part[:, more, :, :right])
        keep = self._keep(rank, (x0 + 1, x1 + 1, y0 + 1, y1 + 1), self.total / _ROUNDING - rest * _ROUNDING, is_open)
        found.bitwise_and_(keep)
        self._spend(100 + found.numel() // 100)
        some = (found != 0).any(0)
        rows, columns = some.any(1).nonzero(), some.any(0).nonzero()
        if not len(rows):
            return None
        top, left = int(rows[0]), int(columns[0])
        return _Reached(
            found[:, top : int(rows[-1]) + 1, left : int(columns[-1]) + 1].contiguous(), x0 + 1 + top, y0 + 1 + left
        )

    def _spend(self, effort: int) -> None:
        self.effort -= effort
        if self.effort < 0:
            raise TooMuchError

    # ── the cuts ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _traced(self, below: float, passed: list[_Reached], end: _Reached) -> Cuts | None:
        """The steps that lead to the end, each with the least time that its rank can have there."""
        at = self._met(below, end)
        if at is None:
            return None
        word, bit, x, y = at
        chain = [(x, y)]
        for rank in range(self.p - 1, -1, -1):
            before = passed[rank]
            x, y = chain[-1]
            i, j = max(before.x, x - len(self.lanes[0].work)), max(before.y, y - len(self.lanes[1].work))
            part = before.words[word, i - before.x : max(0, x - before.x), j - before.y : max(0, y - before.y)]
            ways = [(i + down, j + right) for down, right in (part & (1 << bit)).nonzero().tolist()]
            chain.append(min(ways, key=lambda way: (self._time(rank, way, (x, y)), way)))
        return self._cuts(chain[::-1])

    def _time(self, rank: int, begin: tuple[int, int], end: tuple[int, int]) -> float:
        runs = [*self.other[rank], *self._runs(begin, end)]
        return time_of(self.segments, self.ranks, rank, runs)

    # ── what a V and a loop have of their own ────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _start(self, below: float, is_open: Tensor) -> _Reached | None: ...

    @abstractmethod
    def _ends(self, rank: int) -> tuple[int, int]:
        """The furthest that the runs of a rank can end."""

    @abstractmethod
    def _keep(self, rank: int, where: tuple[int, int, int, int], done: float, is_open: Tensor) -> Tensor:
        """The bits that may stay behind a rank: as much is done as must be, and layers are left for the others."""

    @abstractmethod
    def _met(self, below: float, end: _Reached) -> tuple[int, int, int, int] | None:
        """An end at which all layers are done: its word, bit, ``x`` and ``y``."""

    @abstractmethod
    def _runs(self, begin: tuple[int, int], end: tuple[int, int]) -> Runs: ...

    @abstractmethod
    def _cuts(self, chain: list[tuple[int, int]]) -> Cuts: ...


class ThereAndBack(Pairs):
    """A V: the last rank has all that is left, cut in two."""

    backwards = True

    def _start(self, below: float, is_open: Tensor) -> _Reached | None:
        return _Reached(torch.ones(1, 1, 1, dtype=torch.int64), 0, 0)

    def _ends(self, rank: int) -> tuple[int, int]:
        most = self.m - 2 * (self.p - rank - 1) - (rank + 1)
        return most, most

    def _keep(self, rank: int, where: tuple[int, int, int, int], done: float, is_open: Tensor) -> Tensor:
        i, k, j, l = where
        x, y = torch.arange(i, k)[:, None], torch.arange(j, l)[None, :]
        if rank == self.p - 1:
            return (x + y == self.m).long()
        work = self.done[i:k, None] + (self.total - self.done.flip(0)[None, j:l])
        some = (x + y <= self.m - 2 * (self.p - rank - 1)) & (work >= done)
        return (some & is_open[i:k, None] & is_open.flip(0)[None, j:l]).long()

    def _met(self, below: float, end: _Reached) -> tuple[int, int, int, int] | None:
        x, y = end.words[0].nonzero()[0].tolist()
        return 0, 0, end.x + x, end.y + y

    def _runs(self, begin: tuple[int, int], end: tuple[int, int]) -> Runs:
        last = self.first + self.m
        return (self.first + begin[0], self.first + end[0]), (last - end[1], last - begin[1])

    def _cuts(self, chain: list[tuple[int, int]]) -> Cuts:
        last = self.first + self.m
        return (*(self.first + x for x, _ in chain[1:]), *(last - y for _, y in reversed(chain[:-1])))


class TwiceRound(Pairs):
    """A loop: the second round may begin anywhere; but where it could not in more time, it cannot in less."""

    seen: tuple[float, list[int]] = inf, []

    def _start(self, below: float, is_open: Tensor) -> _Reached | None:
        since, begins = self.seen
        if not below <= since < inf:
            begins = list(range(self.p, self.m - self.p + 1))
        begins = [s for s in begins if self.p == 1 or is_open[s]]
        if not begins:
            return None
        self.begins = torch.tensor(begins)
        full = [(1 << k) - 1 for k in range(_BITS + 1)]
        words = range(ceil(len(begins) / _BITS))
        self.up_to = torch.tensor(  # the bits of so many beginnings
            [[full[max(0, min(_BITS, k - _BITS * word))] for k in range(len(begins) + 1)] for word in words]
        )
        start = torch.zeros(len(words), 1, begins[-1] - begins[0] + 1, dtype=torch.int64)
        start[:, 0, self.begins - begins[0]] = self.up_to.diff()
        return _Reached(start, 0, begins[0])

    def _ends(self, rank: int) -> tuple[int, int]:
        return self.m - 2 * self.p + rank + 1, self.m - (self.p - rank - 1)

    def _keep(self, rank: int, where: tuple[int, int, int, int], done: float, is_open: Tensor) -> Tensor:
        i, k, j, l = where
        work = self.done[i:k, None] + self.done[None, j:l] - done
        keep = self.up_to[:, torch.searchsorted(self.done[self.begins], work, right=True)]
        before = torch.searchsorted(self.begins, torch.arange(i, k) + self.p - rank - 1)
        keep &= ~self.up_to[:, before, None]
        if self.p > 1:
            keep *= is_open[i:k, None] & (is_open[None, j:l] | (torch.arange(j, l) == self.m))
        return keep

    def _met(self, below: float, end: _Reached) -> tuple[int, int, int, int] | None:
        if end.y + end.words.shape[2] - 1 != self.m:
            return None
        column = end.words[:, :, -1].tolist()
        ends = [
            (k // _BITS, k % _BITS, s)
            for k, s in enumerate(self.begins.tolist())
            if 0 <= s - end.x < len(column[0]) and column[k // _BITS][s - end.x] >> k % _BITS & 1
        ]
        if not ends:
            return None
        self.seen = below, [s for _, _, s in ends]
        word, bit, s = ends[len(ends) // 2]
        return word, bit, s, self.m

    def _runs(self, begin: tuple[int, int], end: tuple[int, int]) -> Runs:
        return tuple((self.first + a, self.first + b) for a, b in zip(begin, end, strict=True))

    def _cuts(self, chain: list[tuple[int, int]]) -> Cuts:
        return tuple(self.first + step[lane] for lane in (0, 1) for step in chain[1:])
