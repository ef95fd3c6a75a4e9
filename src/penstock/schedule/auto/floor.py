"""A time that no order can beat: what a rank must wait, work and leave to others, and what its memory allows."""

from __future__ import annotations

import math

from penstock.schedule.auto.problem import SLACK, Problem

__all__ = ["lower_bound", "memory_pace"]


def lower_bound(problem: Problem) -> float:
    """The largest of four bounds, for each rank where it applies.

    - one micro-batch goes through all stages and back;
    - a rank waits for its first input, then does all its work;
    - a rank waits for its first input, does all but the W that others' waits can hide, and the rest of the
      pipeline goes on from its last gradient to the end;
    - a rank waits for its first input, and then takes up micro-batches as fast as its memory allows.
    """
    count, m, times = problem.num_stages, problem.m, problem.durations
    forward, backward, fused, weights = (times[kind * count : (kind + 1) * count] for kind in range(4))
    rest = [min(b, i + w) for b, i, w in zip(fused, backward, weights, strict=True)]
    leaves = [min(b, i) for b, i in zip(fused, backward, strict=True)]  # a gradient, this long after its start
    away = _away(problem)
    head = [0.0] * count  # until the stage's first input
    tail = [0.0] * count  # from the moment the gradient leaves to the end of all work of that micro-batch elsewhere
    for src, dst, time in sorted(problem.arcs, key=lambda arc: arc[1]):
        head[dst] = max(head[dst], head[src] + forward[src] + time)
        tail[dst] = max(tail[dst], time + max(rest[src], leaves[src] + tail[src]))
    found = max(head[s] + forward[s] + away[s] + max(rest[s], leaves[s] + tail[s]) for s in range(count))
    for stages, work, pace in zip(problem.local, problem.work, memory_pace(problem), strict=True):
        begin = min(head[s] for s in stages)
        moving = sum(forward[s] + leaves[s] for s in stages)
        end = min(max(rest[s] - leaves[s], tail[s]) for s in stages)
        found = max(found, begin + m * work, begin + m * moving + end, begin + m * pace)
    return found


def memory_pace(problem: Problem) -> list[float]:
    """By rank, the least time between two micro-batches that its memory allows, in the long run (Little's law).

    Each stays at a stage at least as long as it takes to go from there to the end and back.
    """
    count, times = problem.num_stages, problem.durations
    forward, backward, fused, weights = (times[kind * count : (kind + 1) * count] for kind in range(4))
    stays = [
        size * (forward[s] + away + min(fused[s], backward[s] + problem.keep * weights[s]))
        for s, (size, away) in enumerate(zip(problem.activation, _away(problem), strict=True))
    ]
    return [
        sum(stays[s] for s in stages) / room if (room := _usable(problem, rank)) else 0.0
        for rank, stages in enumerate(problem.local)
    ]


def _away(problem: Problem) -> list[float]:
    """By stage, the time from the end of its F to the start of its backward, at least."""
    count, times = problem.num_stages, problem.durations
    away = [0.0] * count
    for src, dst, time in sorted(problem.arcs, key=lambda arc: -arc[0]):
        leaves = min(times[count + dst], times[2 * count + dst])
        away[src] = max(away[src], time + times[dst] + away[dst] + leaves + time)
    return away


def _usable(problem: Problem, rank: int) -> float:
    """The most of its cap that a rank can fill: where its stages keep the same, a multiple of that."""
    cap = problem.cap[rank] * (1 + SLACK)
    sizes = {problem.activation[s] for s in problem.local[rank]} - {0.0}
    if len(sizes) == 1 and problem.keep == 1:
        (size,) = sizes
        return min(cap, math.floor(cap / size) * size)
    return cap
