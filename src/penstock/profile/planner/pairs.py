"""Two runs of layers on every rank: whether all can keep below a time, and with which cuts.

Going through the ranks, a *front* is how far the two runs have got. Of two fronts the one that is ahead in both runs
serves as well: what is left to it is a part of what is left to the other. That is so while stages may be empty; where
none may, it can happen that a front gets too far for the heavy layers of those after it. So three questions are asked,
in this order:

    with empty stages, and only the furthest fronts      no: there are no cuts (this is nearly always the answer)
    without empty ones, and only the furthest fronts     yes: these are the cuts (nearly always, too)
    without empty ones, and all fronts                   the answer, where there are few enough of them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.profile.planner.segments import Segments
from penstock.profile.planner.times import Cuts, Ranks, fits

__all__ = ["ALL_FRONTS", "there_and_back", "twice_round"]

ALL_FRONTS = 96
"""Up to so many layers all fronts are looked at."""


Room = Callable[[int, int], bool]


@dataclass(frozen=True)
class _Front:
    """``x`` goes up from the first layer; ``y`` down from the last one, or up from where the second round begins."""

    x: int
    y: int
    before: _Front | None = None


def there_and_back(segments: Segments, ranks: Ranks, below: float) -> Cuts | None:
    """A V: the last rank has all that is left, cut in two."""
    return _asked(segments, lambda least, every: _vee(_Step(segments, ranks, below, -1, least, every)))


def twice_round(segments: Segments, ranks: Ranks, below: float) -> Cuts | None:
    """A loop: where the second round begins is tried everywhere."""
    p, n = len(ranks), segments.n
    for second in range(p, n - p + 1):
        if segments.transfer[second] < below or p == 1:


            def ask(least: int, every: bool, second: int = second) -> Cuts | None:
                return _loop(_Step(segments, ranks, below, 1, least, every), second)

            found = _asked(segments, ask)
            if found is not None:
                return found
    return None


def _asked(segments: Segments, ask: Callable[[int, bool], Cuts | None]) -> Cuts | None:
    if ask(0, False) is None:
        return None
    found = ask(1, False)
    if found is None and segments.n <= ALL_FRONTS:
        found = ask(1, True)
    return found


class _Step:
    """The next rank's two runs: of ``least`` layers at least; all ways to have them, or the furthest."""

    def __init__(self, segments: Segments, ranks: Ranks, below: float, way: int, least: int, every: bool) -> None:
        self.segments, self.ranks, self.below = segments, ranks, below
        self.way, self.least, self.every = way, least, every

    def go(self, rank: int, fronts: list[_Front], room: Room) -> list[_Front]:
        """``room(x, y)``: whether enough layers are left for the ranks after this one."""
        found = [one for front in fronts for one in self._from(rank, front, room)]
        if self.every:
            return list({(front.x, front.y): front for front in found}.values())
        kept: list[_Front] = []
        for front in sorted(found, key=lambda front: (-front.x, -self.way * front.y)):
            if not kept or self.way * front.y > self.way * kept[-1].y:
                kept.append(front)
        return kept

    def _from(self, rank: int, front: _Front, room: Room) -> Iterator[_Front]:
        x, near = front.x + self.least, front.y + self.way * self.least
        far = near
        while self._fits(rank, front, x, far + self.way):
            far += self.way
        while x <= self.segments.n and self._fits(rank, front, x, near):
            while not self._fits(rank, front, x, far):  # the longer the first run, the shorter the second
                far -= self.way
            if x == front.x or self._open(x):
                for y in range(far, near - self.way, -self.way):
                    if room(x, y) and (y == front.y or self._open(y)):
                        yield _Front(x, y, front)
                        if not self.every:
                            break
            x += 1

    def _fits(self, rank: int, front: _Front, x: int, y: int) -> bool:
        if not 0 <= y <= self.segments.n:
            return False
        second = (y, front.y) if self.way < 0 else (front.y, y)
        return fits(self.segments, self.ranks, rank, self.below, (front.x, x), second)

    def _open(self, cut: int) -> bool:
        """Whether what crosses a cut gets through in time."""
        return cut in (0, self.segments.n) or self.segments.transfer[cut] < self.below


def _vee(step: _Step) -> Cuts | None:
    segments, ranks, p = step.segments, step.ranks, len(step.ranks)
    fronts = [_Front(0, segments.n)]
    for rank in range(p - 1):
        left = 2 * (p - rank - 1) * step.least

        def room(x: int, y: int, left: int = left) -> bool:
            return y - x >= left

        fronts = step.go(rank, fronts, room)
    for front in fronts:
        for middle in range(front.x + step.least, front.y - step.least + 1):
            if fits(segments, ranks, p - 1, step.below, (front.x, middle), (middle, front.y)):
                chain = _chain(front)
                firsts, seconds = [one.x for one in chain[1:]], [one.y for one in reversed(chain)]
                return (*firsts, middle, *seconds)
    return None


def _loop(step: _Step, second: int) -> Cuts | None:
    p, n = len(step.ranks), step.segments.n
    fronts = [_Front(0, second)]
    for rank in range(p):
        left = (p - rank - 1) * step.least

        def room(x: int, y: int, left: int = left) -> bool:
            return x <= second - left and y <= n - left

        fronts = step.go(rank, fronts, room)
    for front in fronts:
        if (front.x, front.y) == (second, n):
            chain = _chain(front)[1:]
            return (*(one.x for one in chain), *(one.y for one in chain))
    return None


def _chain(front: _Front | None) -> list[_Front]:
    chain = []
    while front is not None:
        chain.append(front)
        front = front.before
    return chain[::-1]
