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
from itertools import accumulate
from math import inf

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
_LONG, _FEW, _MANY = 250, 16, 3 * _BITS  # of a long line of layers few beginnings are looked at together


@dataclass(frozen=True)
class _Reached:
    """The states before a rank: words of bits for each ``x`` and ``y`` from the first ones on."""

    words: Tensor  # [words, x, y]
    x: int
    y: int


class _TooMuchError(Exception):
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
        self.kept = self.effort // 2  # for other questions
        try:
            found = self._asked(below)
        except _TooMuchError:
            return None
        if found is None:
            self.bound = max(self.bound, below)
        return found

    # ── through the ranks ────────────────────────────────────────────────────────────────────────────────────────

    def _asked(self, below: float) -> Cuts | None:
        caps = [kind.most(below * _LESS) for kind in self.kinds]
        after = [0.0, *accumulate(reversed(caps))][::-1]
        if min(caps) <= 0 or after[0] * _ROUNDING < self.total:
            return None
        for start in self._starts(below):
            found = self._through(start, below, caps, after)
            if found is not None:
                return found
        return None

    def _through(self, start: _Reached, below: float, caps: list[float], after: list[float]) -> Cuts | None:
        slack = max(0.0, after[0] * _ROUNDING - self.total)
        is_open = self.transfer < below
        now: _Reached | None = start
        passed = []
        for rank in range(self.p):
            if now is None:
                return None
            passed.append(now)
            now = self._step(rank, now, below * _LESS, caps[rank] - slack, is_open, after[rank + 1])
        at = None if now is None else self._met(now)
        return None if at is None else self._traced(passed, *at)

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
        some = found.any(0)
        rows, columns = (some.any(way).nonzero().flatten().tolist() for way in (1, 0))
        if not rows:
            return None
        part = found[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        return _Reached(part, x0 + 1 + rows[0], y0 + 1 + columns[0])

    def _spend(self, effort: int) -> None:
        self.effort -= effort
        if self.effort < self.kept:
            raise _TooMuchError

    # ── the cuts ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _traced(self, passed: list[_Reached], word: int, bit: int, x: int, y: int) -> Cuts:
        """The steps that lead to an end, each with the least time that its rank can have there."""
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
    def _starts(self, below: float) -> Iterator[_Reached]: ...

    @abstractmethod
    def _ends(self, rank: int) -> tuple[int, int]:
        """The furthest that the runs of a rank can end."""

    @abstractmethod
    def _keep(self, rank: int, where: tuple[int, int, int, int], done: float, is_open: Tensor) -> Tensor:
        """The bits that may stay behind a rank: as much is done as must be, and layers are left for the others."""

    @abstractmethod
    def _met(self, end: _Reached) -> tuple[int, int, int, int] | None:
        """An end at which all layers are done: its word, bit, ``x`` and ``y``."""

    @abstractmethod
    def _runs(self, begin: tuple[int, int], end: tuple[int, int]) -> Runs: ...

    @abstractmethod
    def _cuts(self, chain: list[tuple[int, int]]) -> Cuts: ...


class ThereAndBack(Pairs):
    """A V: the last rank has all that is left, cut in two."""

    backwards = True

    def _starts(self, below: float) -> Iterator[_Reached]:
        yield _Reached(torch.ones(1, 1, 1, dtype=torch.int64), 0, 0)

    def _ends(self, rank: int) -> tuple[int, int]:
        most = self.m - 2 * (self.p - rank - 1) - (rank + 1)
        return most, most

    def _keep(self, rank: int, where: tuple[int, int, int, int], done: float, is_open: Tensor) -> Tensor:
        top, bottom, left, right = where
        x, y = torch.arange(top, bottom)[:, None], torch.arange(left, right)[None, :]
        if rank == self.p - 1:
            return (x + y == self.m).long()
        work = self.done[top:bottom, None] + (self.total - self.done.flip(0)[None, left:right])
        some = (x + y <= self.m - 2 * (self.p - rank - 1)) & (work >= done)
        return (some & is_open[top:bottom, None] & is_open.flip(0)[None, left:right]).long()

    def _met(self, end: _Reached) -> tuple[int, int, int, int] | None:
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

    def _starts(self, below: float) -> Iterator[_Reached]:
        """As many beginnings as there are bits in a word: first those that are most likely."""
        left = self.seen[1] if below <= self.seen[0] < inf else self._likely()
        left = [s for s in left if self.p == 1 or self.transfer[s] < below]
        count = _FEW if self.m > _LONG else _MANY
        while left:
            begins, left = sorted(left[:count]), left[count:]
            self.begins, self.left = torch.tensor(begins), (below, left)
            words = range(0, len(begins), _BITS)
            self.up_to = torch.tensor(  # the bits of so many of them
                [[(1 << max(0, min(_BITS, k - first))) - 1 for k in range(len(begins) + 1)] for first in words]
            )
            start = torch.zeros(len(words), 1, begins[-1] - begins[0] + 1, dtype=torch.int64)
            start[:, 0, self.begins - begins[0]] = self.up_to.diff()
            yield _Reached(start, 0, begins[0])

    def _likely(self) -> list[int]:
        """All beginnings, from the middle on."""
        done = self.done.tolist()
        return sorted(range(self.p, self.m - self.p + 1), key=lambda s: abs(done[s] - self.total / 2))

    def _ends(self, rank: int) -> tuple[int, int]:
        return self.m - 2 * self.p + rank + 1, self.m - (self.p - rank - 1)

    def _keep(self, rank: int, where: tuple[int, int, int, int], done: float, is_open: Tensor) -> Tensor:
        top, bottom, left, right = where
        work = self.done[top:bottom, None] + self.done[None, left:right] - done
        keep = self.up_to[:, torch.searchsorted(self.done[self.begins], work, right=True)]
        before = torch.searchsorted(self.begins, torch.arange(top, bottom) + self.p - rank - 1)
        keep &= ~self.up_to[:, before, None]
        if self.p > 1:
            keep *= is_open[top:bottom, None] & (is_open[None, left:right] | (torch.arange(left, right) == self.m))
        return keep

    def _met(self, end: _Reached) -> tuple[int, int, int, int] | None:
        if end.y + end.words.shape[2] - 1 != self.m:
            return None
        column, rows = end.words[:, :, -1].tolist(), range(end.words.shape[1])
        places = [(*divmod(k, _BITS), s) for k, s in enumerate(self.begins.tolist())]
        ends = [(word, bit, s) for word, bit, s in places if s - end.x in rows and column[word][s - end.x] >> bit & 1]
        if not ends:
            return None
        below, left = self.left
        self.seen = below, [s for _, _, s in ends] + left
        return *ends[len(ends) // 2], self.m

    def _runs(self, begin: tuple[int, int], end: tuple[int, int]) -> Runs:
        return tuple((self.first + a, self.first + b) for a, b in zip(begin, end, strict=True))

    def _cuts(self, chain: list[tuple[int, int]]) -> Cuts:
        return tuple(self.first + step[lane] for lane in (0, 1) for step in chain[1:])
