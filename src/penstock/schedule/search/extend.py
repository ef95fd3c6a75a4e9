"""More micro-batches from few: the middle of an order, where it repeats itself, once more and once more.

F F F I F I F I F I I I      for 6 micro-batches
F F F I F I F I F I F I F I I I      for 8: "I F", which holds one F and one I, twice more
"""

from __future__ import annotations

import math

from penstock.schedule.search.place_weight_grads import place_weight_grads
from penstock.schedule.search.problem import TOLERANCE, Orders, Problem

__all__ = ["extend", "searched_microbatches"]

_SMALL = 1024
"""Stages times micro-batches."""


def searched_microbatches(problem: Problem) -> int:
    """All where they are a small problem; else as many as have room for warm-up, drain and some turns of the steady
    state, less than 4p. What is left out is a multiple of p, for kernels of any length that divides it.
    """
    ranks, m = problem.num_ranks, problem.m
    enough = 3 * ranks + m % ranks
    return m if m <= enough or problem.num_stages * m <= _SMALL else enough


def extend(
    problem: Problem, words: Orders, m: int, overrun: float | None, makespan: float
) -> tuple[float, Orders] | None:
    """Words that take ``makespan`` for ``m`` micro-batches, for all of the problem's, filled, and what they take then;
    None where they nowhere repeat themselves. ``overrun`` says how they are filled; with None, every W is in its place.

    Kernels of 1, 2, 4 … p micro-batches are tried, near several places, with one turn of p more: the one that adds the
    least time is taken, or the first that adds no more than the busiest rank's work.
    """
    ranks = problem.num_ranks
    trial = problem.with_m(m + ranks)
    hoped = (makespan + ranks * max(problem.work)) * (1 + TOLERANCE)
    tried: list[tuple[float, int, list[tuple[int, int]]]] = []
    for length in (q for q in range(1, ranks + 1) if ranks % q == 0):
        kernels = [_kernels(problem, rank, word, length, overrun is None) for rank, word in enumerate(words)]
        if not all(kernels):
            continue
        for middle in (m // 2, m // 3, 3 * m // 5):
            near = [min(found, key=lambda entry: abs(entry[0] - middle))[1] for found in kernels]
            longer = _repeat_kernels(words, near, ranks // length)
            tried.append((place_weight_grads(trial, longer, overrun), length, near))
            if tried[-1][0] <= hoped:
                break
        if tried[-1][0] <= hoped:
            break
    for time, length, near in sorted(tried)[:2]:
        if time < math.inf:
            longer = _repeat_kernels(words, near, (problem.m - m) // length)
            filled: Orders = [[] for _ in words]
            takes = place_weight_grads(problem, longer, overrun, filled=filled)
            if takes < math.inf:
                return takes, filled
    return None


def _kernels(
    problem: Problem, rank: int, word: list[int], length: int, complete: bool
) -> list[tuple[int, tuple[int, int]]]:
    """Parts of a rank's word, from a forward of its first stage on, that hold ``length`` of each F and backward, and
    of each W if they are to be complete. For each, the micro-batch it starts with, and where it begins and ends.
    """
    count, stages = problem.num_stages, problem.local[rank]
    passed = [at for at, letter in enumerate(word) if letter in (stages[0], 5 * count + stages[0])]
    found = []
    for k, (begin, end) in enumerate(zip(passed, passed[length:], strict=False)):
        seen = [0] * (6 * count)
        for letter in word[begin:end]:
            seen[letter] += 1
        if all(
            seen[s] + seen[5 * count + s] == seen[count + s] + seen[2 * count + s] == length
            and seen[4 * count + s] == seen[5 * count + s]
            and (not complete or seen[count + s] == seen[3 * count + s])
            for s in stages
        ):
            found.append((k, (begin, end)))
    return found


def _repeat_kernels(words: Orders, kernels: list[tuple[int, int]], times: int) -> Orders:
    """Each rank's kernel so many times more."""
    return [
        word[:end] + word[begin:end] * times + word[end:] for word, (begin, end) in zip(words, kernels, strict=True)
    ]
