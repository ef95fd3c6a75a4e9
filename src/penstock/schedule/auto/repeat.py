"""More micro-batches from few: the middle of a skeleton, where it repeats itself, once more and once more.

    F F F I F I F I F I I I      for 6 micro-batches
    F F F I F I F I F I F I F I I I      for 8: "I F", which holds one F and one I, twice more
"""

from __future__ import annotations

import math

from penstock.schedule.auto.anneal import Plan
from penstock.schedule.auto.fill import fill
from penstock.schedule.auto.problem import SLACK, Problem, Words

__all__ = ["few", "repeat"]

_SMALL = 1024
"""Stages times micro-batches."""


def few(problem: Problem) -> int:
    """All where they are a small problem; else as many as have room for warm-up, drain and some turns of the steady
    state, less than 4p. What is left out is a multiple of p, for kernels of any length that divides it.
    """
    ranks, m = problem.num_ranks, problem.m
    return m if m < 4 * ranks or problem.num_stages * m <= _SMALL else 3 * ranks + m % ranks


def repeat(problem: Problem, plan: Plan, m: int) -> Plan | None:
    """The plan, made for ``m`` micro-batches, for all of the problem's.

    Kernels of 1, 2, 4 … p micro-batches are tried, at several places, with one turn of p more: the one that adds the
    least time is taken, or the first that adds no more than the busiest rank's work.
    """
    ranks = problem.num_ranks
    more = problem.m - m
    trial = problem.with_m(m + ranks)
    hoped = (plan.makespan + ranks * max(problem.work)) * (1 + SLACK)
    tried: list[tuple[float, int, int]] = []
    for length in (q for q in range(1, ranks + 1) if ranks % q == 0):
        for begin in (m // 2, 2 * m // 5, m // 3, 3 * m // 5):
            longer = _stretch(problem, plan.skeleton, begin, length, ranks // length)
            if longer is not None:
                tried.append((fill(trial, longer, plan.overrun), length, begin))
                if tried[-1][0] <= hoped:
                    break
        if tried and min(tried)[0] <= hoped:
            break
    for time, length, begin in sorted(tried)[:2]:
        longer = _stretch(problem, plan.skeleton, begin, length, more // length)
        if time < math.inf and longer is not None:
            makespan = fill(problem, longer, plan.overrun)
            if makespan < math.inf:
                return Plan(makespan, longer, plan.overrun)
    return None


def _stretch(problem: Problem, skeleton: Words, begin: int, length: int, times: int) -> Words | None:
    """The kernel that starts with the forward of micro-batch ``begin`` on each rank, so many times more.

    None where a rank's word does not hold ``length`` of each of its F and backwards there.
    """
    count = problem.num_stages
    stretched: Words = []
    for rank, word in enumerate(skeleton):
        first = problem.local[rank][0]
        passed = [at for at, letter in enumerate(word) if letter == first]
        if begin + length >= len(passed):
            return None
        start, end = passed[begin], passed[begin + length]
        kernel = word[start:end]
        seen = [0] * (2 * count)
        for letter in kernel:
            if letter < 3 * count:
                seen[letter if letter < 2 * count else letter - count] += 1
        if any(seen[s] != length or seen[count + s] != length for s in problem.local[rank]):
            return None
        stretched.append(word[:end] + kernel * times + word[end:])
    return stretched
