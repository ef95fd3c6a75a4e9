"""A time that no order can beat: what a rank must wait, work and leave to others, and what its memory allows."""

from __future__ import annotations

import math

from penstock.schedule.search.problem import TOLERANCE, Problem

__all__ = ["by_recompute_benefit", "lower_bound", "memory_bound_period", "memory_time"]


def lower_bound(problem: Problem) -> float:
    """The largest of four bounds, for each rank where it applies.

    - one micro-batch goes through all stages and back;
    - a rank waits for its first input, then does all its work, recomputes too where they are sure to be done;
    - a rank waits for its first input, does all but the W that others' waits can hide, and the rest of the
      pipeline goes on from its last gradient to the end;
    - a rank waits for its first input, and then takes up micro-batches as fast as its memory allows.
    """
    count, m, times = problem.num_stages, problem.m, problem.durations
    forward, backward, fused, weights = (times[kind * count : (kind + 1) * count] for kind in range(4))
    replay = _recompute_times(problem)
    rest = [min(b, i + w) for b, i, w in zip(fused, backward, weights, strict=True)]
    leaves = [min(b, i) for b, i in zip(fused, backward, strict=True)]  # a gradient, this long after its start
    away = _round_trips(problem)
    head = [0.0] * count  # until the stage's first input
    tail = [0.0] * count  # from the moment the gradient leaves to the end of all work of that micro-batch elsewhere
    for src, dst, time in sorted(problem.arcs, key=lambda arc: arc[1]):
        head[dst] = max(head[dst], head[src] + forward[src] + time)
        tail[dst] = max(tail[dst], time + max(rest[src], leaves[src] + tail[src]))
    found = max(head[s] + forward[s] + away[s] + max(rest[s], leaves[s] + tail[s]) for s in range(count))
    for stages, work, pace in zip(problem.local, problem.work, memory_bound_period(problem), strict=True):
        begin = min(head[s] for s in stages)
        moving = sum(forward[s] + replay[s] + leaves[s] for s in stages)
        end = min(max(rest[s] - leaves[s], tail[s]) for s in stages)
        found = max(found, begin + m * work, begin + m * moving + end, begin + m * pace)
    return found


def memory_bound_period(problem: Problem) -> list[float]:
    """By rank, the least time between two micro-batches that its memory allows, in the long run (Little's law).

    Each stays at a stage at least as long as it takes to go from there to the end and back. Where it may be recomputed
    or not, what is kept is weighed against the work that it takes to keep less.
    """
    pairs, paces = memory_time(problem), []
    for rank, stages in enumerate(problem.local):
        room = _usable_cap(problem, rank)
        if not room:
            paces.append(0.0)
        elif problem.loose:
            paces.append(_period_with_recompute(problem, rank, room))
        else:
            paces.append(sum(pairs[s][problem.again[s]] for s in stages) / room)
    return paces


def memory_time(problem: Problem) -> list[tuple[float, float]]:
    """By stage, what it keeps of a micro-batch times how long it keeps it, at least; and the same if it recomputes."""
    count, times = problem.num_stages, problem.durations
    found = []
    for s, away in enumerate(_round_trips(problem)):
        size, before, after, part = problem.activation[s], problem.before[s], problem.keep[s], problem.checkpoint[s]
        replay, fused, split = times[4 * count + s], times[2 * count + s], times[count + s]
        whole = before * times[s] + min(before * fused, before * split + after * times[3 * count + s])
        kept = whole + before * away
        dropped = whole + before * replay + part * max(0.0, away - replay)
        found.append((size * kept, size * min(kept, dropped)))
    return found


def by_recompute_benefit(problem: Problem, rank: int) -> list[int]:
    """The stages of a rank, those first whose recompute saves the most memory for its time."""
    pairs, count = memory_time(problem), problem.num_stages

    def worth(stage: int) -> float:
        saved, replay = pairs[stage][0] - pairs[stage][1], problem.durations[4 * count + stage]
        return saved / replay if replay else math.inf

    return sorted(problem.local[rank], key=worth, reverse=True)


def _period_with_recompute(problem: Problem, rank: int, room: float) -> float:
    """The pace of a rank that recomputes as much of each stage as is best for it."""
    pairs, count = memory_time(problem), problem.num_stages
    kept, work = sum(pairs[s][0] for s in problem.local[rank]), problem.work[rank]
    for s in by_recompute_benefit(problem, rank):
        saved, replay = pairs[s][0] - pairs[s][1], problem.durations[4 * count + s]
        lack = kept - room * work
        if lack <= saved + room * replay:
            return kept / room if lack <= 0 else work + replay * lack / (saved + room * replay)
        kept, work = kept - saved, work + replay
    return kept / room


def _round_trips(problem: Problem) -> list[float]:
    """By stage, the time from the end of its F to the start of its backward, at least."""
    count, times = problem.num_stages, problem.durations
    away = _recompute_times(problem)
    for src, dst, time in sorted(problem.arcs, key=lambda arc: -arc[0]):
        leaves = min(times[count + dst], times[2 * count + dst])
        away[src] = max(away[src], time + times[dst] + away[dst] + leaves + time)
    return away


def _recompute_times(problem: Problem) -> list[float]:
    """By stage, the time of a recompute that is sure to be done."""
    count, times = problem.num_stages, problem.durations
    return [times[4 * count + s] if problem.again[s] and not problem.loose else 0.0 for s in range(count)]


def _usable_cap(problem: Problem, rank: int) -> float:
    """The most of its cap that a rank can fill: where its stages keep the same, a multiple of that."""
    cap = problem.cap[rank] * (1 + TOLERANCE)
    stages = problem.local[rank]
    sizes = {problem.activation[s] for s in stages} - {0.0}
    alike = all(problem.before[s] == problem.keep[s] == 1 and not problem.again[s] for s in stages)
    if len(sizes) == 1 and alike:
        (size,) = sizes
        return min(cap, math.floor(cap / size) * size)
    return cap
