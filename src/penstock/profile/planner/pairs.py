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
from itertools import accumulate
from math import inf

import torch
from torch import Tensor

from penstock.profile.planner.bounds import works_of
from penstock.profile.planner.lanes import Kind, Lane
from penstock.profile.planner.segments import Cuts, Ranks, Runs, Segments
from penstock.profile.planner.windows import Place, Reached, Window

__all__ = ["Pairs", "ThereAndBack", "TwiceRound"]

_LESS = 1 - 1e-11  # what is less by rounding alone is not less
_ROUNDING = 1 + 1e-9
_BITS = 63
_LONG, _MANY = 250, 3 * _BITS  # of a long line of layers fewer beginnings are looked at together
_PLACES = 1 << 16  # that are looked at together at the last rank


class _TooMuchError(Exception):
    """There are more states than may be looked at."""


class Pairs(ABC):
    """Two runs a rank, of layers from the first to the last; ``other`` are runs that ranks have besides.

    ``high`` is the longest time that is asked for. ``effort`` says how much may be looked at, in about a microsecond
    each, and then how much is left of that.
    """

    backwards = False

    def __init__(
        self,
        segments: Segments,
        ranks: Ranks,
        high: float,
        effort: int,
        layers: tuple[int, int] | None = None,
        other: Sequence[Runs] | None = None,
    ) -> None:
        self.effort = effort
        self.first, last = layers or (0, segments.n)
        self.m, self.p = last - self.first, len(ranks)
        self.bound = 0.0  # no cuts keep below this: that is sure
        self.done = torch.tensor([0.0, *accumulate(works_of(segments, ranks)[self.first : last])], dtype=torch.float64)
        self.total = float(self.done[-1])
        self.transfer = torch.tensor(segments.transfer[self.first : last + 1], dtype=torch.float64)
        one = Lane.of(segments, ranks, high, (self.first, last))
        self.lanes = one, one.back() if self.backwards else one
        alike: dict[tuple[object, ...], Kind] = {}
        self.kinds = []
        for rank, runs in enumerate(other or [()] * self.p):
            such = ranks.speed[rank], ranks.memory[rank], ranks.in_flight[rank], *runs
            if such not in alike:
                alike[such] = Kind(segments, ranks, rank, runs, self.lanes)
            self.kinds.append(alike[such])
        self.effort -= one.work.numel() * len(one.bytes) // 8 + 300 * len(alike)

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

    def _through(self, start: Reached, below: float, caps: list[float], after: list[float]) -> Cuts | None:
        slack = max(0.0, after[0] * _ROUNDING - self.total)
        is_open = self.transfer < below
        passed = [start]
        for rank in range(self.p - 1):
            reached = self._step(rank, passed[-1], below * _LESS, caps[rank] - slack, is_open, after[rank + 1])
            if reached is None:
                return None
            passed.append(reached)
        end = self._last(passed[-1], below * _LESS)
        return None if end is None else self._traced(passed, *end)

    def _step(
        self, rank: int, now: Reached, below: float, least: float, is_open: Tensor, rest: float
    ) -> Reached | None:
        words, window, kind = now.words, now.window, self.kinds[rank]
        steps = kind.steps(below, least, window)
        self._spend(200)
        if not steps:
            return None
        x_end, both_end = self._ends(rank)
        x = min(x_end, window.x + steps[-1].a)  # the window that they lead to
        both = window.both + min(step.a + step.bs[0] for step in steps)
        last = min(both_end, window.both + window.columns - 1 + max(step.a + step.bs[-1] for step in steps))
        there = Window(x, both, x - (window.x - window.rows + steps[0].a), last - both + 1)
        if there.rows <= 0 or there.columns <= 0:
            return None
        found, none = words.new_zeros((len(words), there.rows, there.columns)), words.new_zeros(())
        for step in steps:
            up = window.x + step.a - x
            i, k = max(step.rows.start, up), step.rows.stop
            if k > i:
                fine = step.fine(slice(i, k), window.columns)
                part = torch.where(fine, words[:, None, i:k], none)
                ways, sizes = len(step.ways), len(step.bs)
                self._spend(20 * (1 + ways) + 8 * sizes + part.numel() // 500 + fine.numel() * ways // 600)
                for number, b in enumerate(step.bs):
                    right = window.both + step.a + b - both
                    columns = min(window.columns, there.columns - right)
                    if columns > 0:
                        into = found[:, i - up : k - up, right : right + columns]
                        into.bitwise_or_(part[:, number, :, :columns])
        found.bitwise_and_(self._keep(rank, there, self.total / _ROUNDING - rest * _ROUNDING, is_open))
        self._spend(100 + found.numel() // 100)
        return Reached(found, x, both).trimmed()

    def _last(self, now: Reached, below: float) -> tuple[int, Place, Place] | None:
        """From which beginning, and between which places, the last rank has the least; it ends where it must."""
        for choices in self._left(now):
            begin, x, y, a, b = self._within(*choices)
            self._spend(50 + len(a) * self.kinds[-1].price // 20)
            seconds = self.kinds[-1].seconds(below, a, x, b, y)
            if (some := seconds < inf).any():
                chosen = self._chosen(begin[some])
                at = torch.where(begin == chosen, seconds, inf).argmin()
                i, j, more, further = (int(number[at]) for number in (x, y, a, b))
                return chosen, (i, j), (i + more, j + further)
        return None

    def _within(self, *numbers: Tensor) -> list[Tensor]:
        """Without runs that are longer than any that there can be."""
        *_, a, b = numbers
        one, two = self.lanes
        some = (a > 0) & (a <= len(one.work)) & (b > 0) & (b <= len(two.work))
        return [number[some] for number in numbers]

    def _spend(self, effort: int) -> None:
        self.effort -= effort
        if self.effort < self.kept:
            raise _TooMuchError

    # ── the cuts ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _traced(self, passed: list[Reached], begin: int, *ends: Place) -> Cuts:
        """The steps that lead to the last rank's, each with the least time that its rank can have there."""
        chain = [*reversed(ends)]
        word, bit = divmod(begin, _BITS)
        for rank in range(self.p - 2, -1, -1):
            (to, there), before = chain[-1], passed[rank]
            x, y = before.having(word, bit)
            x, y, a, b = self._within(x, y, to - x, there - y)
            at = self.kinds[rank].seconds(inf, a, x, b, y).argmin()
            chain.append((int(x[at]), int(y[at])))
        return self._cuts(chain[::-1])

    # ── what a V and a loop have of their own ────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _starts(self, below: float) -> Iterator[Reached]: ...

    @abstractmethod
    def _ends(self, rank: int) -> tuple[int, int]:
        """The furthest that the first run of a rank can end, and both together."""

    @abstractmethod
    def _keep(self, rank: int, there: Window, done: float, is_open: Tensor) -> Tensor:
        """The bits that may stay behind a rank: as much is done as must be, and layers are left for the others."""

    @abstractmethod
    def _left(self, now: Reached) -> Iterator[tuple[Tensor, ...]]:
        """All that the last rank can have: the numbers of beginnings, ``x``, ``y``, and how many layers from there."""

    @abstractmethod
    def _chosen(self, begins: Tensor) -> int:
        """One of the beginnings with which there are cuts."""

    @abstractmethod
    def _cuts(self, chain: list[Place]) -> Cuts: ...


class ThereAndBack(Pairs):
    """A V: the last rank has all that is left, cut in two."""

    backwards = True

    def _starts(self, below: float) -> Iterator[Reached]:
        yield Reached(torch.ones(1, 1, 1, dtype=torch.int64), 0, 0)

    def _ends(self, rank: int) -> tuple[int, int]:
        most = self.m - 2 * (self.p - rank - 1)
        return most - (rank + 1), most

    def _keep(self, rank: int, there: Window, done: float, is_open: Tensor) -> Tensor:
        after = self.total - self.done.flip(0)
        keep = there.down(self.done)[:, None] + there.across(after, 0.0) >= done
        return (keep & there.down(is_open)[:, None] & there.across(is_open.flip(0), False)).long()

    def _left(self, now: Reached) -> Iterator[tuple[Tensor, ...]]:
        most = torch.arange(1, min(len(self.lanes[0].work), self.m - now.both - 1) + 1)
        for part in zip(*(torch.split(numbers, 1 + _PLACES // len(most)) for numbers in now.every(1)), strict=True):
            begin, x, y = (numbers.repeat_interleave(len(most)) for numbers in part)
            a = most.repeat(len(part[0]))
            yield begin, x, y, a, self.m - x - y - a

    def _chosen(self, begins: Tensor) -> int:
        return 0

    def _cuts(self, chain: list[Place]) -> Cuts:
        last = self.first + self.m
        return (*(self.first + x for x, _ in chain[1:]), *(last - y for _, y in reversed(chain[:-1])))


class TwiceRound(Pairs):
    """A loop: the second round may begin anywhere; but where it could not in more time, it cannot in less."""

    seen: tuple[float, list[int]] = inf, []

    def _starts(self, below: float) -> Iterator[Reached]:
        """As many beginnings as there are bits in a word: first those that are most likely."""
        left = self.seen[1] if below <= self.seen[0] < inf else self._likely()
        left = [s for s in left if self.p == 1 or self.transfer[s] < below]
        count = _BITS if self.m > _LONG else _MANY
        while left:
            begins, left = sorted(left[:count]), left[count:]
            self.begins, self.left = torch.tensor(begins), (below, left)
            words = range(0, len(begins), _BITS)
            self.up_to = torch.tensor(  # the bits of so many of them
                [[(1 << max(0, min(_BITS, k - first))) - 1 for k in range(len(begins) + 1)] for first in words]
            )
            start = torch.zeros(len(words), 1, begins[-1] - begins[0] + 1, dtype=torch.int64)
            start[:, 0, self.begins - begins[0]] = self.up_to.diff()
            yield Reached(start, 0, begins[0])

    def _likely(self) -> list[int]:
        """All beginnings, from the middle on."""
        done = self.done.tolist()
        return sorted(range(self.p, self.m - self.p + 1), key=lambda s: abs(done[s] - self.total / 2))

    def _ends(self, rank: int) -> tuple[int, int]:
        most = self.m - 2 * self.p + rank + 1
        return most, most + self.m - (self.p - rank - 1)

    def _keep(self, rank: int, there: Window, done: float, is_open: Tensor) -> Tensor:
        work = there.down(self.done)[:, None] + there.across(self.done, 0.0) - done
        keep = self.up_to[:, torch.searchsorted(self.done[self.begins], work.contiguous(), right=True)]
        x, left = there.x - torch.arange(there.rows), self.p - rank - 1
        keep &= ~self.up_to[:, torch.searchsorted(self.begins, x + left), None]
        can_end = is_open & (torch.arange(self.m + 1) <= self.m - left)
        return keep.mul_(there.down(is_open)[:, None] & there.across(can_end, False))

    def _left(self, now: Reached) -> Iterator[tuple[Tensor, ...]]:
        begin, x, y = now.every(_BITS)
        yield begin, x, y, self.begins[begin] - x, self.m - y

    def _chosen(self, begins: Tensor) -> int:
        """The middle one: the others are looked at first if it is asked for less."""
        every: list[int] = sorted(set(begins.tolist()))
        below, left = self.left
        self.seen = below, self.begins[every].tolist() + left
        return every[len(every) // 2]

    def _cuts(self, chain: list[Place]) -> Cuts:
        return tuple(self.first + step[lane] for lane in (0, 1) for step in chain[1:])
