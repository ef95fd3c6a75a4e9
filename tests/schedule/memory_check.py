"""An independent check of encoded orders: the memory cap, and the order of the ops of each stage and micro-batch."""

from __future__ import annotations

from penstock.schedule.search.problem import TOLERANCE, B, C, F, I, Orders, Problem, R


def _fits(problem: Problem, rank: int, order: list[int]) -> bool:
    """Whether a rank keeps its cap, and each stage runs F, I and W of a micro-batch in order, and R between C and I."""
    count = problem.num_stages
    limit = problem.cap[rank] * (1 + TOLERANCE)
    held = 0.0
    in_flight: list[list[bool]] = [[] for _ in range(count)]  # before the backward: whether activations are there
    deferred = [0] * count  # I without W
    for op in order:
        kind, s = divmod(op, count)
        size, checkpoint = problem.activation[s], problem.checkpoint[s]
        if kind in (F, C):
            if held + size > limit:
                return False
            held += size if kind == F else size * checkpoint
            in_flight[s].append(kind == F)
        elif kind == R:
            held += size * (1 - checkpoint)
            if held > limit or False not in in_flight[s]:
                return False
            in_flight[s][in_flight[s].index(False)] = True
        elif kind in (I, B):
            if not in_flight[s] or not in_flight[s].pop(0):
                return False
            held -= size if kind == B else size * (1 - problem.keep[s])
            deferred[s] += kind == I
        else:
            held -= size * problem.keep[s]
            deferred[s] -= 1
            if deferred[s] < 0:
                return False
    return True


def fits_all(problem: Problem, orders: Orders) -> bool:
    return all(_fits(problem, rank, order) for rank, order in enumerate(orders))
