"""More micro-batches from few: the middle of a skeleton, where it repeats itself, once more and once more.

    F F F I F I F I F I I I      for 6 micro-batches
    F F F I F I F I F I F I F I I I      for 8: "I F", which holds one F and one I, twice more
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from penstock.schedule.auto.fill import fill
from penstock.schedule.auto.problem import Problem, Words

__all__ = ["few", "repeat"]


def few(problem: Problem) -> int:
    """So many micro-batches that warm-up, drain and some turns of the steady state fit in: no more than 4p.

    What is left out is a multiple of p, for kernels of any length that divides it.
    """
    ranks, m = problem.num_ranks, problem.m
    return m if m < 4 * ranks else 3 * ranks + m % ranks


def repeat(
    problem: Problem, skeleton: Words, overrun: Sequence[float], m: int, expired: Callable[[], bool]
) -> tuple[float, Words] | None:
    """The skeleton, made for ``m`` micro-batches, for all of the problem's, and its makespan.

    Kernels of 1, 2, 4 … p micro-batches are tried, at several places: the one that adds the least time is taken.
    """
    more = problem.m - m
    lengths = [q for q in range(1, problem.num_ranks + 1) if more % q == 0 and problem.num_ranks % q == 0]
    trial = problem.with_m(m + problem.num_ranks)
    tried: list[tuple[float, int, int]] = []
    for length in lengths:
        for begin in sorted({m // 2, m // 3, 2 * m // 5, 3 * m // 5}):
            longer = _stretch(problem, skeleton, begin, length, problem.num_ranks // length)
            if longer is not None:
                tried.append((fill(trial, longer, overrun), length, begin))
        if expired() and tried:
            break
    for time, length, begin in sorted(tried)[:2]:
        if time == math.inf:
            break
        longer = _stretch(problem, skeleton, begin, length, more // length)
        assert longer is not None
        makespan = fill(problem, longer, overrun)
        if makespan < math.inf:
            return makespan, longer
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
