"""Where to cut, so that the busiest rank has as little to do for a micro-batch as it can.

    straight   rank 0 │ rank 1 │ rank 2                 one run of layers each
    v          rank 0 │ rank 1 │ rank 2 │ 2 │ 1 │ 0      there and back
    loop       rank 0 │ rank 1 │ rank 2 │ 0 │ 1 │ 2      round and round

A rank's time is that of its stages together, over its speed; a channel's is that of what crosses its cut. All ranks
keep within their memory: what stays, and the activations of as many micro-batches as are in flight. Straight cuts are
exact: no others have a busiest rank with less to do. So are those of a V, up to ``ALL_FRONTS`` layers, and of a loop
with two stages a rank, up to ``LOOP_LAYERS``. Beyond, the cuts of a V are the best unless a stage would have to be
empty for them; those of a loop are moved one by one until no move helps.

How it is exact: whether all can keep below some time is decided by going through the ranks and remembering the furthest
that each beginning lets them get; the least such time is approached by halving, and then from below, until no cuts do
better than those that were found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from penstock.errors import PlanError
from penstock.profile.planner.pairs import there_and_back, twice_round
from penstock.profile.planner.segments import Segments
from penstock.profile.planner.times import Cuts, Ranks, bottleneck, fits
from penstock.schedule.placement import loop, vee

__all__ = ["LOOP_LAYERS", "cut", "evened", "placement_of"]

LOOP_LAYERS = 48
_CLOSE = 1e-3  # by how much the halving may miss, before the rest is done exactly


def placement_of(shape: str, p: int, v: int) -> tuple[int, ...]:
    """The rank of each stage."""
    return vee(p) if shape == "v" else loop(p, v)


def cut(segments: Segments, ranks: Ranks, shape: str, v: int) -> Cuts | None:
    """The cuts of the least busiest rank; None if no cuts keep the memory."""
    p, n = len(ranks), segments.n
    if p * v > n:
        return None
    if v == 1:
        return _exact(segments, ranks, _straight)
    if shape == "v":
        if v != 2:
            raise PlanError(f"a V has two stages a rank, not {v}")
        return _exact(segments, ranks, there_and_back)
    if v == 2 and n <= LOOP_LAYERS:
        return _exact(segments, ranks, twice_round)
    return evened(segments, ranks, shape, v)


Search = Callable[[Segments, Ranks, float], Cuts | None]
"""Cuts with which every rank and channel takes less than some time, if there are any."""


def _exact(segments: Segments, ranks: Ranks, search: Search) -> Cuts | None:
    placement = _placement(search, len(ranks))
    low = segments.work(0, segments.n) / sum(ranks.speed)
    largest = max(segments.works) / min(ranks.speed)
    best = search(segments, ranks, (low + largest) * (1 + _CLOSE)) or search(segments, ranks, float("inf"))
    if best is None:
        return None
    high = bottleneck(segments, ranks, placement, best)
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        found = search(segments, ranks, middle)
        if found is None:
            low = middle
        else:
            best, high = found, bottleneck(segments, ranks, placement, found)
    while (found := search(segments, ranks, high)) is not None:
        reached = bottleneck(segments, ranks, placement, found)
        if not reached < high:  # by rounding alone
            break
        best, high = found, reached
    return best


def _placement(search: Search, p: int) -> tuple[int, ...]:
    if search is _straight:
        return tuple(range(p))
    return placement_of("v" if search is there_and_back else "loop", p, 2)


# ── one run of layers a rank ─────────────────────────────────────────────────────────────────────────────────────


def _straight(segments: Segments, ranks: Ranks, below: float) -> Cuts | None:
    n, p = segments.n, len(ranks)
    came_from: list[dict[int, int]] = []
    reached = [0]
    for rank in range(p):
        fresh: dict[int, int] = {}
        last = n - (p - rank - 1)
        end = 0
        for begin in reached:  # who begins later gets as far, or further
            end = max(end, begin + 1)
            while end <= last and fits(segments, ranks, rank, below, (begin, end)):
                if segments.transfer[end] < below or end == n:
                    fresh[end] = begin
                end += 1
        came_from.append(fresh)
        reached = sorted(fresh)
    if n not in came_from[-1]:
        return None
    cuts = [n]
    for steps in reversed(came_from[1:]):
        cuts.append(steps[cuts[-1]])
    return tuple(reversed(cuts))


# ── any number of runs ───────────────────────────────────────────────────────────────────────────────────────────


def evened(segments: Segments, ranks: Ranks, shape: str, v: int) -> Cuts | None:
    """Even stages, moved until no move of up to three neighbouring cuts by a layer lets the busiest rank have less."""
    placement = placement_of(shape, len(ranks), v)
    n, stages = segments.n, len(placement)
    if stages > n:
        return None
    share = segments.work(0, n) / stages
    cuts, at = list[int](), 0
    for stage in range(stages - 1):
        at += 1
        while at < n - (stages - stage - 1) and segments.work(0, at) + segments.work(at, at + 1) / 2 < share * (
            stage + 1
        ):
            at += 1
        cuts.append(at)
    cuts.append(n)
    best, value = tuple(cuts), _spread(segments, ranks, placement, tuple(cuts))
    moving = True
    while moving:
        moving = False
        for k in range(stages - 1):
            for width in (1, 2, 3):
                for step in (-1, 1):
                    moved = list(best)
                    for at in range(k, min(k + width, stages - 1)):
                        moved[at] += step
                    if any(b <= a for a, b in pairwise((0, *moved))):
                        continue
                    tried = _spread(segments, ranks, placement, tuple(moved))
                    if tried < value:
                        best, value, moving = tuple(moved), tried, True
    return None if value[0] == float("inf") else best


def _spread(segments: Segments, ranks: Ranks, placement: Sequence[int], cuts: Cuts) -> tuple[float, float]:
    """The bottleneck, and how uneven the ranks are: of two equal bottlenecks the one with fewer such ranks."""
    work = [0.0] * len(ranks)
    for rank, (i, j) in zip(placement, pairwise((0, *cuts)), strict=True):
        work[rank] += segments.work(i, j) / ranks.speed[rank]
    top = max(work)
    uneven = sum((time / top) ** 8 for time in work) if top else 0.0
    return bottleneck(segments, ranks, placement, cuts), uneven
