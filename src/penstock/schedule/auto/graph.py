"""An order as a graph of single pieces of work, with the time before and after each, kept up to date by small moves.

Work is numbered ``class * m + micro-batch`` with F, backward (I or B) and W of each stage as classes. It waits for
its inputs and for the work before it on its rank; the longest ways from the beginning and to the end say at once
what a move does to the makespan, about.
"""

from __future__ import annotations

from collections import deque

from penstock.schedule.auto.problem import SLACK, Problem, Words

__all__ = ["Graph", "Pieces"]


class Pieces:
    """What all orders of a problem have in common. Lists by piece of work."""

    def __init__(self, problem: Problem) -> None:
        count, m = problem.num_stages, problem.m
        self.problem = problem
        self.nothing = 3 * count * m  # stands before the first and after the last work of a rank
        kinds = (*range(2 * count), *range(3 * count, 4 * count))
        self.rank = [problem.placement[kind % count] for kind in kinds for _ in range(m)]
        self.duration = [*(problem.durations[kind] for kind in kinds for _ in range(m)), 0.0]
        self.takes = [problem.takes[kind] for kind in kinds for _ in range(m)]
        sources: list[list[tuple[int, float]]] = [[] for _ in range(self.nothing)]
        targets: list[list[tuple[int, float]]] = [[] for _ in range(self.nothing)]
        for src, dst, time in problem.arcs:
            for one, other in ((src, dst), (count + dst, count + src)):
                for k in range(m):
                    sources[other * m + k].append((one * m + k, time))
                    targets[one * m + k].append((other * m + k, time))
        self.sources = [tuple(each) for each in sources]
        self.targets = [tuple(each) for each in targets]


class Graph:
    """A complete order, W included, that fits and has no deadlock."""

    def __init__(self, pieces: Pieces, words: Words) -> None:
        self.problem = problem = pieces.problem
        self.stages, self.m = problem.num_stages, problem.m
        self.room = [cap * (1 + SLACK) for cap in problem.cap]
        self.nothing, self.rank = pieces.nothing, pieces.rank
        self.sources, self.targets = pieces.sources, pieces.targets
        self.duration, self.takes = list(pieces.duration), list(pieces.takes)
        self.fused = [False] * self.nothing
        self.orders = self._numbered(words)
        self.place = [0] * self.nothing
        self.held = [0.0] * (self.nothing + 1)
        self.before, self.after = [self.nothing] * self.nothing, [self.nothing] * self.nothing
        for order in self.orders:
            self._link(order, 0, len(order) - 1)
        self.sequence = self._sorted()
        self.at = [0] * self.nothing
        for i, work in enumerate(self.sequence):
            self.at[work] = i
        self.end, self.tail = [0.0] * (self.nothing + 1), [0.0] * (self.nothing + 1)
        self._first, self._last = 0, len(self.sequence) - 1
        self.update()

    @property
    def words(self) -> Words:
        count, m = self.stages, self.m
        return [
            [c + count * (c >= 2 * count or self.fused[work]) for work in order for c in (work // m,)]
            for order in self.orders
        ]

    def _numbered(self, words: Words) -> list[list[int]]:
        count, m = self.stages, self.m
        done = [0] * (2 * count)
        deferred: list[deque[int]] = [deque() for _ in range(count)]
        orders = []
        for word in words:
            order = []
            for letter in word:
                kind, stage = divmod(letter, count)
                if kind == 3:
                    order.append((2 * count + stage) * m + deferred[stage].popleft())
                    continue
                line = letter - count if kind == 2 else letter
                k = done[line]
                done[line] = k + 1
                work = line * m + k
                order.append(work)
                if kind == 1:
                    deferred[stage].append(k)
                elif kind == 2:
                    self.fused[work] = True
                    self.duration[work] = self.problem.durations[letter]
                    self.takes[work] = self.problem.takes[letter]
            orders.append(order)
        return orders

    def _link(self, order: list[int], low: int, high: int) -> None:
        """Neighbours, places and memory of a part of an order."""
        before = order[low - 1] if low else self.nothing
        held = self.held[before]
        for i in range(low, high + 1):
            work = order[i]
            self.place[work] = i
            self.before[work] = before
            if before != self.nothing:
                self.after[before] = work
            held += self.takes[work]
            self.held[work] = held
            before = work
        after = order[high + 1] if high + 1 < len(order) else self.nothing
        self.after[before] = after
        if after != self.nothing:
            self.before[after] = before

    def _sorted(self) -> list[int]:
        """All work, each after what it waits for."""
        missing = [len(each) for each in self.sources]
        done: list[int] = []
        ready = list(range(len(self.orders)))
        position = [0] * len(self.orders)
        while ready:
            rank = ready.pop()
            order = self.orders[rank]
            while position[rank] < len(order) and not missing[order[position[rank]]]:
                work = order[position[rank]]
                position[rank] += 1
                done.append(work)
                for other, _ in self.targets[work]:
                    missing[other] -= 1
                    if self.rank[other] != rank:
                        ready.append(self.rank[other])
        return done

    def update(self) -> None:
        """The times before and after, once moves are done."""
        before, after, duration, sources, targets = self.before, self.after, self.duration, self.sources, self.targets
        end, tail, sequence = self.end, self.tail, self.sequence
        for work in sequence[self._first :]:
            start = end[before[work]]
            for other, time in sources[work]:
                if end[other] + time > start:
                    start = end[other] + time
            end[work] = start + duration[work]
        for work in reversed(sequence[: self._last + 1]):
            rest = tail[after[work]]
            for other, time in targets[work]:
                if tail[other] + time > rest:
                    rest = tail[other] + time
            tail[work] = rest + duration[work]
        self.makespan = max(end[order[-1]] for order in self.orders)
        self._first, self._last = len(sequence), -1

    def moved(self, rank: int, origin: int, to: int) -> list[int] | None:
        """The part of a rank's order between two places, after the work at one has gone to the other.

        None where that breaks the cap, or turns round what has its order: the same work on two micro-batches, work of
        a stage on one, and work that waits for the other.
        """
        order, takes, m, count = self.orders[rank], self.takes, self.m, self.stages
        work = order[origin]
        kind, k = divmod(work, m)
        low, high = (to, origin) if to < origin else (origin, to)
        part = order[low : high + 1]
        part.remove(work)
        for other in part:
            if other // m == kind:
                return None
            if other % m == k and ((other // m - kind) % count == 0 or self._linked(work, other)):
                return None
        part.insert(to - low, work)
        held, room = self.held[order[low - 1]] if low else 0.0, self.room[rank]
        for other in part:
            held += takes[other]
            if held > room and takes[other] > 0:
                return None
        return part

    def _linked(self, work: int, other: int) -> bool:
        return any(near == other for near, _ in (*self.sources[work], *self.targets[work]))

    def estimate(self, rank: int, low: int, part: list[int]) -> float:
        """About how long the longest way through a new part of an order is, with the rest as it is."""
        end, tail, duration = self.end, self.tail, self.duration
        order = self.orders[rank]
        now = end[order[low - 1]] if low else 0.0
        ends = []
        for work in part:
            for other, time in self.sources[work]:
                if end[other] + time > now:
                    now = end[other] + time
            now += duration[work]
            ends.append(now)
        high = low + len(part)
        rest = tail[order[high]] if high < len(order) else 0.0
        longest = 0.0
        for i in range(len(part) - 1, -1, -1):
            work = part[i]
            for other, time in self.targets[work]:
                if tail[other] + time > rest:
                    rest = tail[other] + time
            if ends[i] + rest > longest:
                longest = ends[i] + rest
            rest += duration[work]
        return longest

    def move(self, rank: int, origin: int, to: int, part: list[int]) -> bool:
        """Do it, unless work would have to wait for itself."""
        order = self.orders[rank]
        low, high = min(origin, to), max(origin, to)
        first, last = self.at[order[low]], self.at[order[high]]
        window = self.sequence[first : last + 1]
        work = order[origin]
        others = set(part)
        others.discard(work)
        linked = {work}
        # What waits for the work (or what it waits for) goes along with it, past those that it is moved past.
        if to > origin:
            near, links = self.sources, self.before
            scan = window[1:]
        else:
            near, links = self.targets, self.after
            scan = window[-2::-1]
        for other in scan:
            if other in others:
                if any(source in linked for source, _ in near[other]):
                    return False
            elif links[other] in linked or any(source in linked for source, _ in near[other]):
                linked.add(other)
        stay = [other for other in window if other not in linked]
        along = [other for other in window if other in linked]
        window = stay + along if to > origin else along + stay
        self.sequence[first : last + 1] = window
        for i, other in enumerate(window, first):
            self.at[other] = i
        order[low : high + 1] = part
        self._link(order, low, high)
        self._first, self._last = min(self._first, first), max(self._last, last)
        return True

    def fuse(self, backward: int) -> int:
        """Make an I and its W a B, and say where the W was."""
        rank, weight = self.rank[backward], backward + self.stages * self.m
        order, place, at = self.orders[rank], self.place[weight], self.at[weight]
        del order[place], self.sequence[at]
        self._change(backward, 2, at)
        return place

    def split(self, backward: int, place: int | None = None) -> None:
        """Make a B an I and a W: at this place of the order, or right after the I."""
        rank, weight = self.rank[backward], backward + self.stages * self.m
        order = self.orders[rank]
        if place is None:
            place = self.place[backward] + 1
        at = self.at[order[place - 1]] + 1
        order.insert(place, weight)
        self.sequence.insert(at, weight)
        self._change(backward, 1, at)

    def _change(self, backward: int, kind: int, last: int) -> None:
        """A backward is now of this kind, I or B, and its W in the order and the sequence, there, or not."""
        letter = backward // self.m + (kind - 1) * self.stages
        self.fused[backward] = kind == 2
        self.duration[backward] = self.problem.durations[letter]
        self.takes[backward] = self.problem.takes[letter]
        order, first = self.orders[self.rank[backward]], self.at[backward]
        self._link(order, self.place[backward], len(order) - 1)
        for i in range(first, len(self.sequence)):
            self.at[self.sequence[i]] = i
        self._first, self._last = min(self._first, first), max(self._last, min(last, len(self.sequence) - 1))
