"""The single pieces of work of a problem, which all its orders have in common.

Work is numbered ``class * m + micro-batch`` with F, backward (I or B), W and R of each stage as classes.
"""

from __future__ import annotations

from penstock.schedule.auto.problem import Problem

__all__ = ["Pieces"]


class Pieces:
    """Lists by piece of work."""

    def __init__(self, problem: Problem) -> None:
        count, m = problem.num_stages, problem.m
        self.problem = problem
        self.nothing = 4 * count * m  # stands before the first and after the last work of a rank
        kinds = (*range(2 * count), *range(3 * count, 5 * count))
        self.rank = [problem.placement[kind % count] for kind in kinds for _ in range(m)]
        self.duration = [*(problem.durations[kind] for kind in kinds for _ in range(m)), 0.0]
        self.takes = [problem.takes[kind] for kind in kinds for _ in range(m)]
        self.needs = [problem.needs[kind] for kind in kinds for _ in range(m)]
        sources: list[list[tuple[int, float]]] = [[] for _ in range(self.nothing)]
        targets: list[list[tuple[int, float]]] = [[] for _ in range(self.nothing)]
        for src, dst, time in problem.arcs:
            for one, other in ((src, dst), (count + dst, count + src)):
                for k in range(m):
                    sources[other * m + k].append((one * m + k, time))
                    targets[one * m + k].append((other * m + k, time))
        self.sources = [tuple(each) for each in sources]
        self.targets = [tuple(each) for each in targets]
