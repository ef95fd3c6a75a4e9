"""Orders in which all micro-batches travel alike, one period apart.

They come from a policy, whose wishes are taken at their word; and wishes come from packing the work on one micro-batch
into a period of each rank (modulo scheduling): two pieces of work of a rank must not meet, whatever the micro-batches.
"""

from __future__ import annotations

from random import Random

from penstock.schedule.search.list_scheduler import Policy
from penstock.schedule.search.lower_bound import memory_bound_period
from penstock.schedule.search.problem import TOLERANCE, Orders, Problem
from penstock.schedule.search.recompute_choice import with_recomputes

__all__ = ["in_turn", "pack"]

_PERIODS = (1.0, 1.03, 1.06, 1.1, 1.15, 1.2, 1.3)
"""Relative to the least that work and memory allow."""


def in_turn(problem: Problem, policy: Policy) -> Orders:
    """A skeleton: every rank does its work in the order of the wishes, whatever it waits for."""
    count, group = problem.num_stages, policy.group
    turn = group * policy.period or 1.0
    words: Orders = []
    for stages in problem.local:
        passes: list[tuple[float, int]] = []
        behind: dict[int, int] = {}  # by letter, of how many micro-batches the first turn is too early
        for line in (*stages, *(count + s for s in stages)):
            letter = line + count if policy.fused and line >= count and problem.fuses[line - count] else line
            behind[letter] = 0
            for k in range(group):
                turns, at = divmod(policy.wishes[line] + k * policy.step, turn)
                behind[letter] += int(turns)
                passes.append((at, letter))
        words.append(_unroll([letter for _, letter in sorted(passes)], behind, group, problem.m))
    return with_recomputes(problem, words)


def _unroll(kernel: list[int], behind: dict[int, int], group: int, m: int) -> list[int]:
    """A kernel, which holds ``group`` of each letter, repeated for ``m`` micro-batches: each letter m times."""
    least, most = min(behind.values()), max(behind.values())
    number = {letter: least - late for letter, late in behind.items()}
    word: list[int] = []
    full = max(0, m // group - -(-(most - least) // group))  # turns in which every letter stands
    while min(number.values()) < m:
        if full and min(number.values()) >= 0:
            word += kernel * full
            number = {letter: k + full * group for letter, k in number.items()}
            full = 0
            continue
        for letter in kernel:
            if 0 <= number[letter] < m:
                word.append(letter)
            number[letter] += 1
    return word


def pack(problem: Problem, random: Random) -> Policy | None:
    """Work on one micro-batch, each piece as soon as there is room for it in its rank's period; None where some has
    none. Parts of the way wait a little before each piece, as drawn.
    """
    count = problem.num_stages
    times = problem.durations
    period = max(*problem.work, *memory_bound_period(problem)) * random.choice(_PERIODS)
    piece = sum(times[: 4 * count]) / (4 * count)
    waits = [0.0] * (2 * count)
    for _ in range(random.randrange(4)):
        begin, wait = random.randrange(2 * count), random.choice((0.5, 1.0, random.random())) * piece
        for line in range(begin, min(2 * count, begin + random.randrange(1, count + 1))):
            waits[line] = wait
    fused = any(problem.fuses) and random.random() < 0.5
    weights = random.random() < 0.5  # have their place in the period, too; else they go where they can
    taken: list[list[tuple[float, float]]] = [[] for _ in problem.cap]
    wishes = [0.0] * (2 * count)
    sources: list[list[tuple[int, float]]] = [[] for _ in range(2 * count)]
    for src, dst, time in problem.arcs:
        sources[dst].append((src, time))
        sources[count + src].append((count + dst, time))
    for line in (*range(count), *range(2 * count - 1, count - 1, -1)):
        stage = line % count
        letter = line + count if fused and line >= count and problem.fuses[stage] else line
        ready = max((wishes[other] + times[other] + time for other, time in sources[line]), default=0.0)
        if line >= count:
            ready = max(ready, wishes[stage] + times[stage] + (times[4 * count + stage] if problem.again[stage] else 0))
        before = times[4 * count + stage] if line >= count and problem.again[stage] else 0.0  # is done while it waits
        place = _place(taken[problem.placement[stage]], period, ready + waits[line] - before, before + times[letter])
        if place is None:
            return None
        wishes[line] = place + before
        if weights and count <= letter < 2 * count:
            done = place + before + times[letter]
            if _place(taken[problem.placement[stage]], period, done, times[letter + 2 * count]) is None:
                return None
    return Policy(wishes, period, overrun=random.choice((0.0, 0.5)), fused=fused)


def _place(taken: list[tuple[float, float]], period: float, ready: float, duration: float) -> float | None:
    """The first time from ``ready`` on at which so much of the period is free; then it is taken."""
    slack = TOLERANCE * period
    at, again = ready, duration > 0
    while again:
        again = False
        for begin, length in taken:
            since = (at - begin) % period
            if since > period - slack:
                since = 0.0
            if since < length - slack:
                at += length - since
            elif period - since < duration - slack:
                at += period - since + length
            else:
                continue
            again = True
            if at > ready + period + slack:
                return None
    if duration > 0:
        taken.append((at % period, duration))
    return at
