"""Squeeze an order: all work as early as it can be done, then all as late as it can be, and so on.

On its way, work goes into gaps. A rank that would wait does what comes later in its order, if that is ready, has room,
and is over in time for the work that it passes, whose latest start is known from the turn before. So no turn makes an
order slower; and most make it faster, since work has left the end that it was squeezed from.

Backwards in time an order is an order, too: there a W takes memory, and an F gives it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

from penstock.schedule.search.op_graph import OpTable
from penstock.schedule.search.problem import TOLERANCE, Orders

__all__ = ["Justification", "justify"]

_LOOKAHEAD = 24
"""So far ahead in its order a rank looks for work."""


def justify(pieces: OpTable, words: Orders, turns: int, expired: Callable[[], bool]) -> tuple[float, Orders]:
    """The order squeezed so often, or until nothing more comes of it, one way and the other, or time is up."""
    order = Justification(pieces, words)
    vain = 0
    for _ in range(turns):
        before = order.makespan
        order.turn()
        vain = vain + 1 if order.makespan > before * (1 - TOLERANCE) else 0
        if vain == 2 or expired():
            break
    words = order.early()
    return order.makespan, words


class Justification:
    """An order being squeezed."""

    def __init__(self, pieces: OpTable, words: Orders) -> None:
        self.pieces = pieces
        problem = pieces.problem
        self.orders, self.letters = pieces.numbered(words)
        self.duration = [problem.durations[letter] for letter in self.letters]
        takes = [problem.takes[letter] for letter in self.letters]
        needs = [problem.needs[letter] for letter in self.letters]
        never = -math.inf
        # What work takes, and what there is at the most while it is done, over what there was before it: both ways.
        self._takes = takes, [-more for more in takes]
        self._peaks = (
            [need or never for need in needs],
            [need - more if need else never for need, more in zip(needs, takes, strict=True)],
        )
        self._near = pieces.targets, pieces.sources
        self._missing = [len(each) for each in pieces.sources], [len(each) for each in pieces.targets]
        self._room = [cap * (1 + TOLERANCE) for cap in problem.cap]
        self._back = False
        self._latest = [never] * pieces.nothing
        self.makespan = 0.0
        self.turn()

    def early(self) -> Orders:
        """The words when all work is early: where it is late, this is one more turn."""
        if not self._back:
            self.turn()
        return [[self.letters[work] for work in reversed(order)] for order in self.orders]

    def turn(self) -> None:
        """Squeeze it the other way: early at first, then late."""
        pieces, duration, latest = self.pieces, self.duration, self._latest
        orders, line, own, rank_of = self.orders, pieces.line, pieces.own, pieces.rank
        takes, peaks, near = self._takes[self._back], self._peaks[self._back], self._near[self._back]
        missing = list(self._missing[self._back])
        arrive = [0.0] * len(missing)
        starts = [0.0] * len(missing)
        ranks = len(orders)
        position, held, free = [0] * ranks, [0.0] * ranks, [0.0] * ranks
        wake = [0.0] * ranks  # when an idle rank looks again; infinity while only news can wake it
        events = [(0.0, rank) for rank in range(ranks)]
        about = TOLERANCE * self.makespan
        never = math.inf
        done = 0.0
        while events:
            now, rank = heappop(events)
            if wake[rank] != now:
                continue
            wake[rank] = -1.0
            order, at, holds, room = orders[rank], position[rank], held[rank], self._room[rank]
            count = len(order)
            looking = True  # all that has arrived by now is known; when the rank runs ahead of others, it is not
            while at < count:
                work = order[at]
                if missing[work] or arrive[work] > now + about:
                    if not looking:
                        wake[rank] = free[rank] = now
                        heappush(events, (now, rank))
                        break
                    limit = latest[work] + about
                    soon = never if missing[work] else arrive[work]
                    found = -1
                    if now + pieces.shortest[rank] <= limit:
                        lines, owns = [line[work]], [own[work]]
                        after, top = holds + takes[work], holds + peaks[work]
                        for i in range(at + 1, min(at + _LOOKAHEAD, count)):
                            other = order[i]
                            if not missing[other] and line[other] not in lines and own[other] not in owns:
                                begin = arrive[other]
                                if begin <= now + about:
                                    if (
                                        now + duration[other] <= limit
                                        and holds + peaks[other] <= room
                                        and (takes[other] <= 0.0 or top + takes[other] <= room)
                                    ):
                                        found = i
                                        break
                                elif begin < soon and begin + duration[other] <= limit:
                                    soon = begin
                            lines.append(line[other])
                            owns.append(own[other])
                            if after + peaks[other] > top:
                                top = after + peaks[other]
                            after += takes[other]
                    if found < 0:
                        free[rank] = now
                        wake[rank] = soon
                        if soon < never:
                            heappush(events, (soon, rank))
                        break
                    work = order.pop(found)
                    order.insert(at, work)
                at += 1
                if arrive[work] > now:
                    now = arrive[work]
                starts[work] = now
                now += duration[work]
                holds += takes[work]
                looking = False
                for other, time in near[work]:
                    missing[other] -= 1
                    if now + time > arrive[other]:
                        arrive[other] = now + time
                    there = rank_of[other]
                    if not missing[other] and there != rank and wake[there] > arrive[other]:
                        at_once = arrive[other] if arrive[other] > free[there] else free[there]
                        if at_once < wake[there]:
                            wake[there] = at_once
                            heappush(events, (at_once, there))
            position[rank], held[rank] = at, holds
            if now > done:
                done = now
        self.makespan = done
        self._latest = [done - start - time for start, time in zip(starts, duration, strict=True)]
        for order in orders:
            order.reverse()
        self._back = not self._back
