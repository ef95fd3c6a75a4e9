"""Two runs of layers on every rank: whether all can keep below a time, and with which cuts.

Going through the ranks, a *front* is how far the two runs have got. Of two fronts the one that is ahead in both runs
serves as well: what is left to it is a part of what is left to the other. And a front that leaves more than the ranks
after it can do in time is of no use. That is so while stages may be empty; where none may, it can happen that a front
gets too far for the heavy layers of those after it. So three questions are asked, in this order:

    with empty stages, and only the furthest fronts      no: there are no cuts (this is nearly always the answer)
    without empty ones, and only the furthest fronts     yes: these are the cuts (nearly always, too)
    without empty ones, and all fronts                   the answer

Where stages are recomputed, a front that is ahead may have more to keep: a no is sure only if as much comes to a stage
wherever it begins.
Where the second round of a loop begins is tried everywhere, so that a no takes long. There is a limit on how
much is looked at; an answer that would need more is a no that is not sure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from penstock.profile.planner.segments import Segments
from penstock.profile.planner.times import Cuts, Ranks, Runs, fits, price

__all__ = ["Question", "there_and_back", "twice_round"]

_ROUNDING = 1 + 1e-9


class Question:
    """Whether every rank can keep below a time.

    ``other`` are runs that ranks have besides; ``layers`` are those that are to be cut. ``effort`` says how much may be
    looked at, in less than a microsecond each, and then how much is left of that.
    """

    def __init__(
        self,
        segments: Segments,
        ranks: Ranks,
        below: float,
        layers: tuple[int, int],
        other: Sequence[Runs],
        effort: int,
    ) -> None:
        self.segments, self.ranks, self.below, self.layers, self.other = segments, ranks, below, layers, other
        self.effort, self.unsure = effort, False  # if a no may be wrong
        self.free = ranks.recompute is False and min(ranks.memory) == inf
        self.price = 1 if self.free else price(ranks, 2 + len(other[0]))
        self.open = [seconds < below for seconds in segments.transfer]  # whether what crosses a cut is there in time
        self.open[0] = self.open[-1] = True
        self.most = [  # the work that a rank can do in time, of these layers
            below * speed - sum(segments.work(i, j) for i, j in runs)
            for speed, runs in zip(ranks.speed, other, strict=True)
        ]
        after = [0.0, *accumulate(max(0.0, most) for most in reversed(self.most))]
        self.left = [seconds * _ROUNDING for seconds in after[-2::-1]]  # what the ranks after one can do

    def spend(self, effort: int) -> None:
        self.effort -= effort
        if self.effort < 0:
            raise _TooMuchError


class _TooMuchError(Exception):
    """There are more fronts than may be looked at."""


@dataclass(frozen=True)
class _Front:
    """``x`` goes up from the first layer; ``y`` down from the last one, or up from where the second round begins."""

    x: int
    y: int
    before: _Front | None = None


def there_and_back(question: Question) -> Cuts | None:
    """A V: the last rank has all that is left, cut in two."""
    question.unsure = question.ranks.recompute is not False and not question.segments.even
    return _asked(question, lambda least, every: _vee(_Step(question, -1, least, every)))


def twice_round(question: Question) -> Cuts | None:
    """A loop: the second round may begin anywhere, most likely in the middle."""
    question.unsure = question.ranks.recompute is not False and not question.segments.even
    segments, p, (first, last) = question.segments, len(question.ranks), question.layers
    middle = (segments.done[first] + segments.done[last]) / 2
    for second in sorted(range(first + p, last - p + 1), key=lambda at: abs(segments.done[at] - middle)):
        if question.open[second] or p == 1:

            def ask(least: int, every: bool, second: int = second) -> Cuts | None:
                return _loop(_Step(question, 1, least, every), second)

            found = _asked(question, ask)
            if found is not None or question.effort < 0:
                return found
    return None


def _asked(question: Question, ask: Callable[[int, bool], Cuts | None]) -> Cuts | None:
    try:
        return None if ask(0, False) is None else ask(1, False) or ask(1, True)
    except _TooMuchError:
        question.unsure = True
        return None


class _Step:
    """The next rank's two runs: of ``least`` layers at least; all ways to have them, or the furthest."""

    def __init__(self, question: Question, way: int, least: int, every: bool) -> None:
        self.question, self.way, self.least, self.every = question, way, least, every

    def go(
        self, rank: int, fronts: list[_Front], room: Callable[[int, int], bool], rest: Callable[[int, int], float]
    ) -> list[_Front]:
        """``room(x, y)``: whether enough layers are left for the ranks after this one; ``rest(x, y)`` is their work."""
        left = self.question.left[rank]
        found: dict[tuple[int, int], _Front] = {}
        for front in fronts:
            self.question.spend(3)
            for x, y in self._from(rank, front, room):
                if (x, y) not in found and rest(x, y) <= left:
                    found[x, y] = _Front(x, y, front)
        if self.every:
            return list(found.values())
        kept: list[_Front] = []
        for front in sorted(found.values(), key=lambda front: (-front.x, -self.way * front.y)):
            if not kept or self.way * front.y > self.way * kept[-1].y:
                kept.append(front)
        return kept

    def _from(self, rank: int, front: _Front, room: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
        question, way, every = self.question, self.way, self.every
        done, is_open, (first, last) = question.segments.done, question.open, question.layers
        begin, other = front.x, front.y
        near, far = other + way * self.least, first if way < 0 else last
        most = question.most[rank] + done[begin]
        for x in range(begin + self.least, last + 1):
            budget = most - done[x]
            if not budget > 0:
                return
            question.spend(2)
            if way < 0:
                far = max(far, bisect_right(done, done[other] - budget))
            else:
                far = min(far, bisect_left(done, done[other] + budget) - 1)
            while way * (far - near) >= 0 and not self._fits(rank, front, x, far):
                far -= way  # the longer the first run, the shorter the second
            if way * (far - near) < 0:
                return
            if x == begin or is_open[x]:
                for y in range(far, near - way, -way):
                    question.spend(1)
                    if room(x, y) and (y == other or is_open[y]):
                        yield x, y
                        if not every:
                            break

    def _fits(self, rank: int, front: _Front, x: int, y: int) -> bool:
        question = self.question
        question.spend(question.price)
        if question.free:
            done = question.segments.done
            return done[x] - done[front.x] + abs(done[y] - done[front.y]) < question.most[rank]
        second = (y, front.y) if self.way < 0 else (front.y, y)
        runs = (*question.other[rank], (front.x, x), second)
        return fits(question.segments, question.ranks, rank, question.below, runs)


def _vee(step: _Step) -> Cuts | None:
    question, p = step.question, len(step.question.ranks)
    done = question.segments.done
    fronts = [_Front(*question.layers)]
    for rank in range(p - 1):
        left = 2 * (p - rank - 1) * step.least

        def room(x: int, y: int, left: int = left) -> bool:
            return y - x >= left

        fronts = step.go(rank, fronts, room, lambda x, y: done[y] - done[x])
    for front in fronts:
        for middle in range(front.x + step.least, front.y - step.least + 1):
            question.spend(question.price)
            runs = (*question.other[p - 1], (front.x, middle), (middle, front.y))
            if fits(question.segments, question.ranks, p - 1, question.below, runs):
                chain = _chain(front)
                firsts, seconds = [one.x for one in chain[1:]], [one.y for one in reversed(chain)]
                return (*firsts, middle, *seconds)
            if question.free:  # where it is cut makes no difference then
                break
    return None


def _loop(step: _Step, second: int) -> Cuts | None:
    done, p, (first, last) = step.question.segments.done, len(step.question.ranks), step.question.layers
    fronts = [_Front(first, second)]
    for rank in range(p):
        left = (p - rank - 1) * step.least

        def room(x: int, y: int, left: int = left) -> bool:
            return x <= second - left and y <= last - left

        fronts = step.go(rank, fronts, room, lambda x, y: done[second] - done[x] + done[last] - done[y])
    for front in fronts:
        if (front.x, front.y) == (second, last):
            chain = _chain(front)[1:]
            return (*(one.x for one in chain), *(one.y for one in chain))
    return None


def _chain(front: _Front | None) -> list[_Front]:
    chain = []
    while front is not None:
        chain.append(front)
        front = front.before
    return chain[::-1]
