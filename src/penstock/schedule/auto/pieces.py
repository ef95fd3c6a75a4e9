"""The single pieces of work of a problem, which all its orders have in common.

Work is numbered ``class * m + micro-batch`` with F, backward (I or B), W and R of each stage as classes.
"""

from __future__ import annotations

from collections import deque

from penstock.schedule.auto.problem import Problem, Words

__all__ = ["Pieces"]


class Pieces:
    """Lists by piece of work."""

    def __init__(self, problem: Problem) -> None:
        count, m = problem.num_stages, problem.m
        self.problem = problem
        self.nothing = 4 * count * m  # stands before the first and after the last work of a rank
        kinds = (*range(2 * count), *range(3 * count, 5 * count))
        self.rank = [problem.placement[kind % count] for kind in kinds for _ in range(m)]
        self.line = [line for line in range(4 * count) for _ in range(m)]
        self.microbatch = [*range(m)] * (4 * count)
        self.own = [*range(count * m)] * 4
        """The same number for all work of a stage on a micro-batch."""
        self.letters = [kind for kind in kinds for _ in range(m)]
        self.shortest = [
            min(problem.durations[kind * count + s] for s in stages for kind in range(6)) for stages in problem.local
        ]
        """By rank, the time of its shortest work."""
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
        self.chain = max(map(len, (*sources, *targets)), default=0) <= 1
        """Whether work has at most one source and one target: then these, and the times, are lists of their own."""
        none = (self.nothing, 0.0)
        self.source, self.coming = zip(*((*each, none)[0] for each in self.sources), strict=True)
        self.target, self.going = zip(*((*each, none)[0] for each in self.targets), strict=True)

    def numbered(self, words: Words) -> tuple[list[list[int]], list[int]]:
        """For each rank, the work in its order; and by work, its letter."""
        count, m = self.problem.num_stages, self.problem.m
        letters = list(self.letters)
        done = [0] * (2 * count)
        deferred: list[deque[int]] = [deque() for _ in range(count)]
        dropped: list[deque[int]] = [deque() for _ in range(count)]
        orders = []
        for word in words:
            order = []
            for letter in word:
                kind, stage = divmod(letter, count)
                if kind in (3, 4):
                    waiting = deferred if kind == 3 else dropped
                    order.append(((kind - 1) * count + stage) * m + waiting[stage].popleft())
                    continue
                line = letter - count if kind == 2 else letter % (5 * count)
                k = done[line]
                done[line] = k + 1
                order.append(line * m + k)
                letters[line * m + k] = letter
                if kind == 1:
                    deferred[stage].append(k)
                elif kind == 5:
                    dropped[stage].append(k)
            orders.append(order)
        return orders, letters

    def in_sequence(self, orders: list[list[int]]) -> list[int]:
        """All work of an order, each after what it waits for."""
        missing = [len(each) for each in self.sources]
        done: list[int] = []
        ready = list(range(len(orders)))
        position = [0] * len(orders)
        while ready:
            rank = ready.pop()
            order = orders[rank]
            while position[rank] < len(order) and not missing[order[position[rank]]]:
                work = order[position[rank]]
                position[rank] += 1
                done.append(work)
                for other, _ in self.targets[work]:
                    missing[other] -= 1
                    if self.rank[other] != rank:
                        ready.append(self.rank[other])
        return done
