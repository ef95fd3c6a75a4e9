"""Weight gradients find their own place: a skeleton is an order of F, I and B, and its gaps are filled with W.

    skeleton   F  F  .  .  I  .  F  I  I        a W goes where the rank would wait anyway, if it fits there,
    filled     F  F  .  .  I  W  F  I  I  W  W  before a forward that lacks memory, and to the end

A W in a skeleton is a deadline: it is done there unless it has been done before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.schedule.auto.problem import SLACK, Problem, Words

__all__ = ["fill", "filled"]


def fill(
    problem: Problem,
    skeleton: Words,
    overrun: Sequence[float],
    limit: float = math.inf,
    record: tuple[Words, Words] | None = None,
) -> float:
    """When the last rank is done; infinity where memory or a deadlock stops it, or beyond ``limit``.

    By rank, ``overrun`` is the fraction of a W that may stand out of the gap it goes into. ``record`` takes, for
    each rank, the letters done and the positions they have in the skeleton (-1 for a W put into a gap).
    """
    count = problem.num_stages
    weights = 3 * count
    durations, placement, takes = problem.durations, problem.placement, problem.takes
    incoming: list[list[list[float]]] = [[] for _ in range(2 * count)]
    outgoing: list[list[tuple[list[float], float, int]]] = [[] for _ in range(2 * count)]
    for src, dst, time in problem.arcs:
        forth: list[float] = []
        back: list[float] = []
        incoming[dst].append(forth)
        outgoing[src].append((forth, time, placement[dst]))
        incoming[count + src].append(back)
        outgoing[count + dst].append((back, time, placement[src]))
    done = [0] * (2 * count)
    ranks = len(skeleton)
    position = [0] * ranks
    clock = [0.0] * ranks
    kept = [0.0] * ranks
    room = [cap * (1 + SLACK) for cap in problem.cap]
    # A rank that has idled longer than this cannot be done by the limit.
    patience = [limit - problem.m * work for work in problem.work]
    pending: Words = [[] for _ in skeleton]  # W that can be done, oldest first
    early: list[int] = [0] * count  # W done before their deadline
    waiting = list(range(ranks))
    listed = [True] * ranks
    left = ranks
    while waiting:
        rank = waiting.pop()
        listed[rank] = False
        word, queue = skeleton[rank], pending[rank]
        at, now, holds, space = position[rank], clock[rank], kept[rank], room[rank]
        lost, part = patience[rank], 1.0 - overrun[rank]
        end = len(word)
        while at < end:
            letter = word[at]
            if letter >= weights:
                stage = letter - weights
                if early[stage]:
                    early[stage] -= 1
                elif letter in queue:
                    queue.remove(letter)
                    now += durations[letter]
                    holds += takes[letter]
                    if record:
                        record[0][rank].append(letter)
                        record[1][rank].append(at)
                at += 1
                continue
            line = letter if letter < 2 * count else letter - count
            k = done[line]
            if line >= count and k >= done[line - count]:
                return math.inf
            start = now
            for arrivals in incoming[line]:
                if k >= len(arrivals):
                    break
                if arrivals[k] > start:
                    start = arrivals[k]
            else:
                done[line] = k + 1
                if queue:
                    if letter < count:
                        more = takes[letter]
                        while queue and holds + more > space:
                            weight = queue.pop(0)
                            early[weight - weights] += 1
                            now += durations[weight]
                            holds += takes[weight]
                            if record:
                                record[0][rank].append(weight)
                                record[1][rank].append(-1)
                    while queue and now + durations[queue[0]] * part <= start:
                        weight = queue.pop(0)
                        early[weight - weights] += 1
                        now += durations[weight]
                        holds += takes[weight]
                        if record:
                            record[0][rank].append(weight)
                            record[1][rank].append(-1)
                if start > now:
                    lost -= start - now
                    if lost < 0.0:
                        return math.inf
                    now = start
                now += durations[letter]
                holds += takes[letter]
                if letter < count:
                    if holds > space:
                        return math.inf
                elif letter < 2 * count:
                    queue.append(letter + 2 * count)
                for arrivals, time, other in outgoing[line]:
                    arrivals.append(now + time)
                    if not listed[other] and other != rank:
                        listed[other] = True
                        waiting.append(other)
                if record:
                    record[0][rank].append(letter)
                    record[1][rank].append(at)
                at += 1
                continue
            break
        if at == end:
            left -= 1
            for weight in queue:
                now += durations[weight]
            if record:
                record[0][rank].extend(queue)
                record[1][rank].extend([-1] * len(queue))
            queue.clear()
        position[rank], clock[rank], kept[rank], patience[rank] = at, now, holds, lost
        if now > limit:
            return math.inf
    return max(clock) if left == 0 else math.inf


def filled(problem: Problem, skeleton: Words, overrun: Sequence[float]) -> tuple[float, Words, Words]:
    """The makespan, the letters done, and their positions in the skeleton."""
    words: Words = [[] for _ in skeleton]
    places: Words = [[] for _ in skeleton]
    return fill(problem, skeleton, overrun, record=(words, places)), words, places
