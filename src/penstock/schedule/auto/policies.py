"""Policies for the list scheduler: drawn at random around the travel of a micro-batch, and varied."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from penstock.schedule.auto.floor import memory_pace
from penstock.schedule.auto.lists import Policy
from penstock.schedule.auto.problem import Problem

__all__ = ["draw", "plain", "vary"]


def plain(problem: Problem) -> Policy:
    """Every micro-batch travels as fast as it can, one bottleneck's work apart."""
    return Policy(_travel(problem, [1.0] * 2 * _depth(problem), 0.0), max(*problem.work, *memory_pace(problem)))


def draw(problem: Problem, random: Random) -> Policy:
    """A micro-batch may linger on its way: on each turn round the ranks, out or back, and where it turns."""
    depth, count, ranks = _depth(problem), problem.num_stages, problem.num_ranks
    linger = [random.choice((1.0, 1.0, 1.0, 1.5, 2.0, 2.0, 3.0, 4.0)) for _ in range(2 * depth)]
    wait = random.choice((0.0, 0.0, 0.0, 1.0, 2.0, 4.0)) * problem.durations[2 * count - 1]
    period = max(*problem.work, *memory_pace(problem))
    slope = random.choice((0.0, 0.0, 0.5, 1.0))
    order = sorted(range(ranks), key=lambda rank: problem.local[rank][0])
    turn = {rank: i for i, rank in enumerate(order)}
    return Policy(
        _travel(problem, linger, wait),
        period * random.choice((1.0, 1.0, 1.1, 1.2)),
        pace=period * random.choice((0.0, 0.0, 0.9, 1.0, 1.05, 1.1)),
        group=ranks if depth > 1 and random.random() < 0.3 else 1,
        step=sum(problem.durations[:count]) / count,
        overrun=random.choice((0.0, 0.0, 0.3, 0.7, 1.0)),
        look=random.choice((0.0, 0.0, 0.3, 0.6, 1.0)),
        quota=tuple(
            max(least, cap - slope * turn[rank] * least)
            for rank, (least, cap) in enumerate(zip(problem.least, problem.cap, strict=True))
        ),
        relieve=random.random() < 0.7,
        fused=any(problem.fuses) and random.random() < 0.5,
    )


def vary(problem: Problem, policy: Policy, random: Random) -> Policy:
    """A policy like this one."""
    count, work = problem.num_stages, max(problem.work)
    wishes = list(policy.wishes)
    varied = replace(policy, wishes=wishes)
    for _ in range(random.choice((1, 1, 2, 3))):
        what = random.randrange(9)
        if what <= 2:
            begin = random.randrange(2 * count)
            end = begin + (random.randrange(1, count + 1) if random.random() < 0.6 else 1)
            shift = random.gauss(0.0, 0.4) * work
            for line in range(begin, min(end, 2 * count if begin >= count else count)):
                wishes[line] += shift
        elif what == 3:
            varied.period = max(0.8 * work, varied.period * (1 + random.gauss(0.0, 0.05)))
        elif what == 8:
            varied.pace = max(0.0, varied.pace + random.gauss(0.0, 0.05) * work)
        elif what == 4:
            varied.overrun = max(0.0, varied.overrun + random.gauss(0.0, 0.3))
        elif what == 5:
            varied.look = max(0.0, varied.look + random.gauss(0.0, 0.3))
        elif what == 6:
            varied.quota = _vary_quota(problem, varied.quota or problem.cap, random)
        else:
            varied.relieve = not varied.relieve
    return varied


def _vary_quota(problem: Problem, quota: tuple[float, ...], random: Random) -> tuple[float, ...]:
    """A micro-batch of a stage more or less, on one rank or on all from it."""
    rank = random.randrange(len(quota))
    last = rank if random.random() < 0.5 else len(quota) - 1
    size = random.choice((-1, 1)) * max(problem.activation)
    return tuple(
        min(problem.cap[r], max(problem.least[r], kept + size)) if rank <= r <= last else kept
        for r, kept in enumerate(quota)
    )


def _depth(problem: Problem) -> int:
    return max(map(len, problem.local))


def _travel(problem: Problem, linger: list[float], wait: float) -> list[float]:
    """By class, when micro-batch 0 passes if its work takes ``linger`` times as long, for each turn out and back."""
    count, times = problem.num_stages, problem.durations
    depth = len(linger) // 2
    turns = [problem.local[rank].index(stage) for stage, rank in enumerate(problem.placement)]
    wishes = [0.0] * (2 * count)
    for src, dst, time in sorted(problem.arcs, key=lambda arc: arc[1]):
        wishes[dst] = max(wishes[dst], wishes[src] + times[src] * linger[turns[src]] + time)
    for stage in range(count):
        wishes[count + stage] = wishes[stage] + times[stage] + wait
    for src, dst, time in sorted(problem.arcs, key=lambda arc: -arc[0]):
        passed = wishes[count + dst] + times[count + dst] * linger[depth + turns[dst]] + time
        wishes[count + src] = max(wishes[count + src], passed)
    return wishes
