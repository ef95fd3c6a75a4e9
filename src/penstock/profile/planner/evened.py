"""Cuts that are good enough to start from, at once: even stages, moved as long as a move helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from operator import add

from penstock.profile.planner.segments import Segments
from penstock.profile.planner.times import Cuts, Ranks, held, time_of

__all__ = ["evened"]

Value = tuple[float, float, float]
"""How much memory ranks lack, the time of the busiest rank or channel, and how uneven these are."""


def evened(segments: Segments, ranks: Ranks, placement: Sequence[int]) -> Cuts | None:
    """Even stages, moved until no move of up to three neighbouring cuts by a layer lets the busiest rank have less."""
    n, stages = segments.n, len(placement)
    if stages > n:
        return None
    shares = [ranks.speed]
    if min(ranks.memory) < inf and max(ranks.memory) > 0:
        shares += [share for share in [_shares(segments, ranks)] if any(share)]  # none where layers take no time
    starts = {_even(segments, ranks, placement, share, avoid) for share in shares for avoid in (True, False)}
    states = [_moved(_State(segments, ranks, placement, list(cuts))) for cuts in starts]
    best = min(states, key=lambda state: (state.value, state.cuts))
    return None if best.value[0] else tuple(best.cuts)


def _moved(state: _State) -> _State:
    moving = True
    while moving:
        moving = False
        for k, width, step in _moves(len(state.cuts) - 1):
            moving |= state.move(k, min(k + width, len(state.cuts) - 1), step)
    return state


def _shares(segments: Segments, ranks: Ranks) -> tuple[float, ...]:
    """How much of the work ranks can do in the same time, with the memory that they have, if all layers were alike."""
    whole = 0, segments.n
    work, again = segments.work(*whole), segments.again(*whole)
    stays, kept = segments.static(*whole), segments.activation(*whole)
    parts = (1.0,) if ranks.recompute else (0.0,) if ranks.recompute is False else tuple(k / 8 for k in range(9))

    def share(rank: int, time: float) -> float:
        """Of all work; the best of some parts that are recomputed."""
        seconds, limit, flight = time * ranks.speed[rank], ranks.memory[rank], ranks.in_flight[rank]
        sizes = [(part, stays + flight * (1 - part) * kept) for part in parts]
        return max(min(seconds / (work + part * again or 1.0), limit / (size or 1.0)) for part, size in sizes)

    low, high = 0.0, 2 * (work + again) / min(ranks.speed)
    for _ in range(30):  # the time in which they do all of it; in the longest one, if their memory is too small
        middle = (low + high) / 2
        enough = sum(share(rank, middle) for rank in range(len(ranks))) >= 1
        low, high = (low, middle) if enough else (middle, high)
    return tuple(share(rank, high) for rank in range(len(ranks)))


def _even(segments: Segments, ranks: Ranks, placement: Sequence[int], share: Sequence[float], avoid: bool) -> Cuts:
    """Stages of as much work as their ranks' shares; cuts that take longer than a rank are avoided, or not.

    Of all cuts they are those with the least distance, squared, from where the work of the stages before would end.
    """
    n, stages = segments.n, len(placement)
    extra, done = n - stages, segments.done
    speeds = [share[rank] for rank in placement]
    time = done[-1] / sum(speeds)
    slow = done[-1] ** 2 * stages  # worse than any distance
    reached, ends = [[0.0] * (extra + 1)], time * speeds[0]
    for s in range(1, stages):
        far = [(done[s + o] - ends) ** 2 for o in range(extra + 1)]
        if avoid and placement[s - 1] != placement[s]:
            far = [one + slow * (segments.transfer[s + o] > time * stages / len(ranks)) for o, one in enumerate(far)]
        reached.append(list(accumulate(map(add, reached[-1], far), min)))
        ends += time * speeds[s]
    cuts, o = [n], extra
    for s in range(stages - 1, 0, -1):
        o = reached[s].index(reached[s][o])
        cuts.append(s + o)
    return tuple(reversed(cuts))


def _moves(inner: int) -> Iterator[tuple[int, int, int]]:
    for k in range(inner):
        for width in (1, 2, 3):
            for step in (-1, 1):
                yield k, width, step


class _State:
    """Cuts, and what each rank takes with them."""

    def __init__(self, segments: Segments, ranks: Ranks, placement: Sequence[int], cuts: list[int]) -> None:
        self.segments, self.ranks, self.placement, self.cuts = segments, ranks, placement, cuts
        self.own = [[s for s, home in enumerate(placement) if home == rank] for rank in range(len(ranks))]
        self.between = [s for s in range(1, len(cuts)) if placement[s - 1] != placement[s]]
        self.lacking = [0.0] * len(ranks)
        self.times = [self._time(rank) for rank in range(len(ranks))]
        self.value = self._value()

    def move(self, first: int, last: int, step: int) -> bool:
        """Move the cuts from the first up to the last by a layer, if that is better."""
        cuts = self.cuts
        begin = cuts[first - 1] if first else 0
        if cuts[first] + step <= begin or cuts[last - 1] + step >= cuts[last]:
            return False
        touched = set(self.placement[first : last + 1])
        before, times, lacking = self.value, self.times[:], self.lacking[:]
        self._shift(first, last, step)
        for rank in touched:
            self.times[rank] = self._time(rank)
        self.value = self._value()
        if self.value < before:
            return True
        self._shift(first, last, -step)
        self.value, self.times, self.lacking = before, times, lacking
        return False

    def _shift(self, first: int, last: int, step: int) -> None:
        for at in range(first, last):
            self.cuts[at] += step

    def _time(self, rank: int) -> float:
        runs = [(self.cuts[s - 1] if s else 0, self.cuts[s]) for s in self.own[rank]]
        time, ranks = time_of(self.segments, self.ranks, rank, runs), self.ranks
        self.lacking[rank] = 0.0
        if time == inf:
            choices = (False, True) if ranks.recompute is None else (ranks.recompute,)
            every = range(len(runs))
            size = min(held(self.segments, runs, every if again else (), ranks.in_flight[rank]) for again in choices)
            self.lacking[rank] = max(1e-9, size / (ranks.memory[rank] or 1.0) - 1)
        return time

    def _value(self) -> Value:
        """Of two equal bottlenecks the one with fewer such ranks is less."""
        transfer = self.segments.transfer
        lacking = sum(self.lacking)
        fine = [time for time in self.times if time < inf] + [transfer[self.cuts[s - 1]] for s in self.between]
        top = max(fine, default=0.0)
        return lacking, top, sum((time / top) ** 8 for time in fine) if top else 0.0
