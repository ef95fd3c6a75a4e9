"""Extend an order to more micro-batches by repeating a kernel of its steady state.

F F F I F I F I F I I I              for 6 micro-batches
F F F I F I F I F I F I F I I I      for 8: the kernel "I F", with one F and one I, twice more
"""

from __future__ import annotations

import math

from penstock.schedule.search.place_weight_grads import place_weight_grads
from penstock.schedule.search.problem import TOLERANCE, B, C, F, I, Orders, Problem, R, W

_SMALL = 1024
"""Problems with up to this many pairs of stage and micro-batch are searched as they are."""


def searched_microbatches(problem: Problem) -> int:
    """All micro-batches of a small problem; otherwise enough for warm-up, drain and some periods of the steady state,
    fewer than 4p. The difference is a multiple of p, so any kernel whose length divides p can fill it.
    """
    ranks, m = problem.num_ranks, problem.m
    enough = 3 * ranks + m % ranks
    return m if m <= enough or problem.num_stages * m <= _SMALL else enough


def extend(
    problem: Problem, orders: Orders, m: int, overrun: float | None, makespan: float
) -> tuple[float, Orders] | None:
    """Orders for ``m`` micro-batches, extended to those of ``problem`` with W placed, and their makespan; None where
    there is no kernel. ``overrun`` is that of ``place_weight_grads``; ``makespan`` is that of the given orders.

    Kernels of 1, 2, 4 … p micro-batches near several positions are tried for p more micro-batches. The one that adds
    the least time is taken, or the first that adds no more than the work of the busiest rank.
    """
    ranks = problem.num_ranks
    trial = problem.with_m(m + ranks)
    goal = (makespan + ranks * max(problem.work)) * (1 + TOLERANCE)
    tried: list[tuple[float, int, list[tuple[int, int]]]] = []
    for length in (q for q in range(1, ranks + 1) if ranks % q == 0):
        kernels = [_kernels(problem, rank, order, length, overrun is None) for rank, order in enumerate(orders)]
        if not all(kernels):
            continue
        for middle in (m // 2, m // 3, 3 * m // 5):
            nearest = [min(each, key=lambda entry: abs(entry[0] - middle))[1] for each in kernels]
            repeated = _repeat(orders, nearest, ranks // length)
            tried.append((place_weight_grads(trial, repeated, overrun), length, nearest))
            if tried[-1][0] <= goal:
                break
        if tried[-1][0] <= goal:
            break
    for time, length, nearest in sorted(tried)[:2]:
        if time < math.inf:
            repeated = _repeat(orders, nearest, (problem.m - m) // length)
            filled: Orders = [[] for _ in orders]
            extended = place_weight_grads(problem, repeated, overrun, filled=filled)
            if extended < math.inf:
                return extended, filled
    return None


def _kernels(
    problem: Problem, rank: int, order: list[int], length: int, with_w: bool
) -> list[tuple[int, tuple[int, int]]]:
    """Slices of a rank's order from a forward of its first stage on that hold ``length`` of each F and backward, and
    of each W if ``with_w``. For each, the micro-batch it starts with, and its begin and end.
    """
    count, stages = problem.num_stages, problem.stages_of[rank]
    starts = [at for at, op in enumerate(order) if op in (F * count + stages[0], C * count + stages[0])]
    kernels = []
    for k, (begin, end) in enumerate(zip(starts, starts[length:], strict=False)):
        ops = [0] * (6 * count)
        for op in order[begin:end]:
            ops[op] += 1
        num = [ops[kind * count : (kind + 1) * count] for kind in range(6)]
        if all(
            num[F][s] + num[C][s] == num[I][s] + num[B][s] == length
            and num[R][s] == num[C][s]
            and (not with_w or num[I][s] == num[W][s])
            for s in stages
        ):
            kernels.append((k, (begin, end)))
    return kernels


def _repeat(orders: Orders, kernels: list[tuple[int, int]], times: int) -> Orders:
    """The orders with each rank's kernel ``times`` more."""
    return [
        order[:end] + order[begin:end] * times + order[end:]
        for order, (begin, end) in zip(orders, kernels, strict=True)
    ]
