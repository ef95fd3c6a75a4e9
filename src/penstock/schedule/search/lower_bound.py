"""A lower bound on the makespan of all orders, and the choice of stages to recompute that is based on it."""

from __future__ import annotations

import math

from penstock.schedule.search.problem import TOLERANCE, B, F, I, Problem, R, W

_RESIDENCE_FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Assumed ratios of the residence time of a micro-batch on a stage to its minimum."""


def lower_bound(problem: Problem) -> float:
    """The largest of four bounds, over all ranks:

    - the forward and backward of one micro-batch through all stages;
    - on a rank, the arrival of its first input and all its actions, with the recomputes that are not optional;
    - on a rank, the arrival of its first input and all its actions except the W that can run while others finish; then
      the path from its last gradient to the end;
    - on a rank, the arrival of its first input and m periods, where its memory limits the period.
    """
    count, m, times = problem.num_stages, problem.m, problem.durations
    forward, input_grad, fused, weight_grad = (times[kind * count : (kind + 1) * count] for kind in (F, I, B, W))
    rest = [min(b, i + w) for b, i, w in zip(fused, input_grad, weight_grad, strict=True)]
    sends = [min(b, i) for b, i in zip(fused, input_grad, strict=True)]  # from a backward's start to its gradient
    round_trips = _round_trips(problem)
    head = [0.0] * count  # arrival of the stage's first input
    tail = [0.0] * count  # from sending the gradient to the end of that micro-batch's actions on earlier stages
    for src, dst, time in sorted(problem.arcs, key=lambda arc: arc[1]):
        head[dst] = max(head[dst], head[src] + forward[src] + time)
        tail[dst] = max(tail[dst], time + max(rest[src], sends[src] + tail[src]))
    bound = max(head[s] + forward[s] + round_trips[s] + max(rest[s], sends[s] + tail[s]) for s in range(count))
    for stages, work, period in zip(problem.stages_of, problem.work, memory_bound_period(problem), strict=True):
        begin = min(head[s] for s in stages)
        without_w = sum(forward[s] + problem.recompute_times[s] + sends[s] for s in stages)
        end = min(max(rest[s] - sends[s], tail[s]) for s in stages)
        bound = max(bound, begin + m * work, begin + m * without_w + end, begin + m * period)
    return bound


def memory_bound_period(problem: Problem) -> list[float]:
    """By rank: the least average time between two micro-batches that its memory allows (Little's law).

    A micro-batch is on a stage at least for the round trip from there to the last stage. If recomputes are optional,
    the bound has the best trade-off between memory and recompute time.
    """
    kept, periods = memory_time(problem), []
    for rank, stages in enumerate(problem.stages_of):
        memory = problem.cap[rank] * (1 + TOLERANCE)
        sizes = {problem.activation[s] for s in stages} - {0.0}
        uniform = all(problem.before_i[s] == problem.keep[s] == 1 and not problem.recomputed[s] for s in stages)
        if len(sizes) == 1 and uniform:  # only a multiple of the activation size can be used
            (size,) = sizes
            memory = min(memory, math.floor(memory / size) * size)
        if not memory:
            periods.append(0.0)
        elif problem.recompute_optional:
            periods.append(_period_with_recompute(problem, rank, memory))
        else:
            periods.append(sum(kept[s][problem.recomputed[s]] for s in stages) / memory)
    return periods


def memory_time(problem: Problem) -> list[tuple[float, float]]:
    """By stage: the least product of memory and time of a micro-batch, without and with recompute."""
    products = []
    for s, round_trip in enumerate(_round_trips(problem)):
        size, before, after, part = problem.activation[s], problem.before_i[s], problem.keep[s], problem.checkpoint[s]
        recompute = problem.duration(R, s)
        split = before * problem.duration(I, s) + after * problem.duration(W, s)
        work = before * problem.duration(F, s) + min(before * problem.duration(B, s), split)
        kept = work + before * round_trip
        recomputed = work + before * recompute + part * max(0.0, round_trip - recompute)
        products.append((size * kept, size * min(kept, recomputed)))
    return products


def recompute_choices(problem: Problem) -> list[Problem]:
    """The problem with fixed recomputed stages: all, none, and about as few as the memory of each rank requires."""
    if not problem.recompute_optional:
        return [problem]
    products, sets = memory_time(problem), [frozenset(range(problem.num_stages)), frozenset[int]()]
    for factor in _RESIDENCE_FACTORS:
        chosen = set[int]()
        for rank, stages in enumerate(problem.stages_of):
            kept, work = factor * sum(products[s][0] for s in stages), problem.work[rank]
            for s in _by_recompute_benefit(problem, rank):
                if kept <= problem.cap[rank] * work * (1 + TOLERANCE):
                    break
                kept -= factor * (products[s][0] - products[s][1])
                work += problem.duration(R, s)
                chosen.add(s)
        sets.append(frozenset(chosen))
    choices = [problem.with_recomputed(stages) for stages in dict.fromkeys(sets)]
    return [choice for choice in choices if choice.feasible]


def _by_recompute_benefit(problem: Problem, rank: int) -> list[int]:
    """The stages of a rank, sorted by the memory that their recompute saves per time, largest first."""
    products = memory_time(problem)

    def benefit(stage: int) -> float:
        saved, time = products[stage][0] - products[stage][1], problem.duration(R, stage)
        return saved / time if time else math.inf

    return sorted(problem.stages_of[rank], key=benefit, reverse=True)


def _period_with_recompute(problem: Problem, rank: int, memory: float) -> float:
    """The period of a rank if the best fraction of each stage's micro-batches is recomputed."""
    products = memory_time(problem)
    kept, work = sum(products[s][0] for s in problem.stages_of[rank]), problem.work[rank]
    for s in _by_recompute_benefit(problem, rank):
        saved, time = products[s][0] - products[s][1], problem.duration(R, s)
        lack = kept - memory * work
        if lack <= saved + memory * time:
            return kept / memory if lack <= 0 else work + time * lack / (saved + memory * time)
        kept, work = kept - saved, work + time
    return kept / memory


def _round_trips(problem: Problem) -> list[float]:
    """By stage: the least time from the end of its F to the start of its backward."""
    round_trips = list(problem.recompute_times)
    for src, dst, time in sorted(problem.arcs, key=lambda arc: -arc[0]):
        backward = min(problem.duration(I, dst), problem.duration(B, dst))
        round_trip = time + problem.duration(F, dst) + round_trips[dst] + backward + time
        round_trips[src] = max(round_trips[src], round_trip)
    return round_trips
