"""The single pieces of work of a problem, which all its orders have in common.

Work is numbered ``class * m + micro-batch`` with F, backward (I or B), W and R of each stage as classes.
"""

from __future__ import annotations

from collections import deque

from penstock.schedule.search.problem import TOLERANCE, Orders, Problem

__all__ = ["OpGraph", "OpTable"]


class OpTable:
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

    def numbered(self, words: Orders) -> tuple[list[list[int]], list[int]]:
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


# An order as a graph of single pieces of work, with the time before and after each, kept up to date by small moves.
#
# Work waits for its inputs and for the work before it on its rank; the longest ways from the beginning and to the end
# say at once what a move does to the makespan, about.


class OpGraph:
    """A complete order, W included, that fits and has no deadlock."""

    def __init__(self, pieces: OpTable, words: Orders) -> None:
        self.pieces, self.problem = pieces, pieces.problem
        problem = pieces.problem
        self.stages, self.m = problem.num_stages, problem.m
        self.room = [cap * (1 + TOLERANCE) for cap in problem.cap]
        self.nothing, self.rank, self.needs = pieces.nothing, pieces.rank, pieces.needs
        self.sources, self.targets = pieces.sources, pieces.targets
        self._line, self._microbatch = pieces.line, pieces.microbatch
        self.orders, self.letters = pieces.numbered(words)
        self.duration = [*(problem.durations[letter] for letter in self.letters), 0.0]
        self.takes = [problem.takes[letter] for letter in self.letters]
        self.fused = [letter // self.stages == 2 for letter in self.letters]
        self.dropped = [letter // self.stages == 5 for letter in self.letters[: self.stages * self.m]]
        self.place = [0] * self.nothing
        self.held = [0.0] * (self.nothing + 1)
        self.before, self.after = [self.nothing] * self.nothing, [self.nothing] * self.nothing
        for order in self.orders:
            self._link(order, 0, len(order) - 1)
        self.sequence = pieces.in_sequence(self.orders)
        self.at = [0] * self.nothing
        for i, work in enumerate(self.sequence):
            self.at[work] = i
        self.end, self.tail = [0.0] * (self.nothing + 1), [0.0] * (self.nothing + 1)
        self._first, self._last = 0, len(self.sequence) - 1
        self.update()

    @property
    def words(self) -> Orders:
        return [[self.letters[work] for work in order] for order in self.orders]

    def _set(self, work: int, letter: int) -> None:
        """Work is of this class."""
        self.letters[work] = letter
        self.duration[work], self.takes[work] = self.problem.durations[letter], self.problem.takes[letter]

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

    def update(self) -> None:
        """The times before and after, once moves are done."""
        if self.pieces.chain:
            self._update_chain()
        else:
            self._update_any()
        self.makespan = max(self.end[order[-1]] for order in self.orders)
        self._first, self._last = len(self.sequence), -1

    def _update_chain(self) -> None:
        pieces, before, after, duration = self.pieces, self.before, self.after, self.duration
        source, coming, target, going = pieces.source, pieces.coming, pieces.target, pieces.going
        end, tail = self.end, self.tail
        for work in self.sequence[self._first :]:
            start, arrival = end[before[work]], end[source[work]] + coming[work]
            end[work] = (arrival if arrival > start else start) + duration[work]
        for work in reversed(self.sequence[: self._last + 1]):
            rest, there = tail[after[work]], tail[target[work]] + going[work]
            tail[work] = (there if there > rest else rest) + duration[work]

    def _update_any(self) -> None:
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

    def moved(self, rank: int, origin: int, to: int) -> list[int] | None:
        """The part of a rank's order between two places, after the work at one has gone to the other.

        None where that breaks the cap, or turns round what has its order: the same work on two micro-batches, work of
        a stage on one, and work that waits for the other.
        """
        order, takes, needs, line, batch = self.orders[rank], self.takes, self.needs, self._line, self._microbatch
        work = order[origin]
        kind, k = line[work], batch[work]
        low, high = (to, origin) if to < origin else (origin, to)
        part = order[low : high + 1]
        part.remove(work)
        for other in part:
            if line[other] == kind:
                return None
            if batch[other] == k and ((line[other] - kind) % self.stages == 0 or self._linked(work, other)):
                return None
        part.insert(to - low, work)
        held, room = self.held[order[low - 1]] if low else 0.0, self.room[rank]
        for other in part:
            if needs[other] and held + needs[other] > room:
                return None
            held += takes[other]
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
        self.fused[backward] = kind == 2
        self._set(backward, backward // self.m + (kind - 1) * self.stages)
        self._changed(backward, last)

    def keep(self, forward: int) -> int | None:
        """Do without a recompute, and say where it was; None, and nothing is done, where that breaks the cap."""
        rank, replay = self.rank[forward], forward + 3 * self.stages * self.m
        order, place, at = self.orders[rank], self.place[replay], self.at[replay]
        room, held = self.room[rank] - self.takes[replay], self.held
        before = forward
        for other in order[self.place[forward] + 1 : place]:
            if self.needs[other] and held[before] + self.needs[other] > room:
                return None
            before = other
        del order[place], self.sequence[at]
        self.dropped[forward] = False
        self._set(forward, forward // self.m)
        self._changed(forward, at)
        return place

    def drop(self, forward: int, place: int | None = None) -> None:
        """Recompute a micro-batch: at this place of the order, or right before its backward."""
        rank, replay = self.rank[forward], forward + 3 * self.stages * self.m
        order = self.orders[rank]
        if place is None:
            place = self.place[forward + self.stages * self.m]
        at = self.at[order[place - 1]] + 1
        order.insert(place, replay)
        self.sequence.insert(at, replay)
        self.dropped[forward] = True
        self._set(forward, 5 * self.stages + forward // self.m)
        self._changed(forward, at)

    def _changed(self, work: int, last: int) -> None:
        """The work is another, and something after it on its rank has come or gone: there in the sequence."""
        order, first = self.orders[self.rank[work]], self.at[work]
        self._link(order, self.place[work], len(order) - 1)
        for i in range(first, len(self.sequence)):
            self.at[self.sequence[i]] = i
        self._first, self._last = min(self._first, first), max(self._last, min(last, len(self.sequence) - 1))
