"""Weight gradients find their own place: a skeleton is an order of F, I and B, and its gaps are filled with W.

    skeleton   F  F  .  .  I  .  F  I  I        a W goes where the rank would wait anyway, if it fits there,
    filled     F  F  .  .  I  W  F  I  I  W  W  before a forward that lacks memory, and to the end

A W in a skeleton is a deadline: it is done there unless it has been done before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from penstock.schedule.auto.problem import SLACK, Problem, Words, connect

__all__ = ["Checkpoint", "Record", "fill"]


class Checkpoint(NamedTuple):
    """How far all ranks are at some point of a ``fill``; lists by rank, but for the first two and ``early``."""

    arrivals: list[list[float]]
    done: list[int]
    position: list[int]
    clock: list[float]
    kept: list[float]
    idle: list[float]
    pending: Words
    early: list[int]
    waiting: list[int]
    left: int


class Record:
    """What a ``fill`` did: by rank the letters, their positions in the skeleton (-1 for a W put into a gap), and
    checkpoints from which a ``fill`` of a skeleton that only differs beyond them can go on.
    """

    def __init__(self, ranks: int, every: int) -> None:
        self.words: Words = [[] for _ in range(ranks)]
        self.places: Words = [[] for _ in range(ranks)]
        self.checkpoints: list[Checkpoint] = []
        self.every = every


def fill(
    problem: Problem,
    skeleton: Words,
    overrun: Sequence[float],
    limit: float = math.inf,
    record: Record | None = None,
    resume: Checkpoint | None = None,
) -> float:
    """When the last rank is done; infinity where memory or a deadlock stops it, or beyond ``limit``.

    By rank, ``overrun`` is the fraction of a W that may stand out of the gap it goes into.
    """
    count = problem.num_stages
    weights = 3 * count
    durations, takes = problem.durations, problem.takes
    ranks = len(skeleton)
    if resume is None:
        resume = Checkpoint(
            [[] for _ in range(2 * len(problem.arcs))],
            [0] * (2 * count),
            [0] * ranks,
            [0.0] * ranks,
            [0.0] * ranks,
            [0.0] * ranks,
            [[] for _ in skeleton],
            [0] * count,
            list(range(ranks)),
            ranks,
        )
    else:
        resume = _copy(resume)
    wires, done, position, clock, kept, idle, pending, early, waiting, left = resume
    incoming, outgoing = connect(problem, wires)
    room = [cap * (1 + SLACK) for cap in problem.cap]
    # A rank that has idled longer than this cannot be done by the limit.
    patience = [limit - problem.m * work for work in problem.work]
    listed = [False] * ranks
    for rank in waiting:
        listed[rank] = True
    due = record.every if record else 0
    while waiting:
        if record and sum(position) >= due:
            record.checkpoints.append(_copy(Checkpoint(*resume[:-1], left)))
            due += record.every
        rank = waiting.pop()
        listed[rank] = False
        word, queue = skeleton[rank], pending[rank]
        at, now, holds, space = position[rank], clock[rank], kept[rank], room[rank]
        lost, part = patience[rank] - idle[rank], 1.0 - overrun[rank]
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
                        record.words[rank].append(letter)
                        record.places[rank].append(at)
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
                                record.words[rank].append(weight)
                                record.places[rank].append(-1)
                    while queue and now + durations[queue[0]] * part <= start:
                        weight = queue.pop(0)
                        early[weight - weights] += 1
                        now += durations[weight]
                        holds += takes[weight]
                        if record:
                            record.words[rank].append(weight)
                            record.places[rank].append(-1)
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
                    record.words[rank].append(letter)
                    record.places[rank].append(at)
                at += 1
                continue
            break
        if at == end:
            left -= 1
            for weight in queue:
                now += durations[weight]
            if record:
                record.words[rank].extend(queue)
                record.places[rank].extend([-1] * len(queue))
            queue.clear()
        position[rank], clock[rank], kept[rank], idle[rank] = at, now, holds, patience[rank] - lost
        if now > limit:
            return math.inf
    return max(clock) if left == 0 else math.inf


def _copy(point: Checkpoint) -> Checkpoint:
    wires, done, position, clock, kept, idle, pending, early, waiting, left = point
    return Checkpoint(
        [list(wire) for wire in wires],
        list(done),
        list(position),
        list(clock),
        list(kept),
        list(idle),
        [list(queue) for queue in pending],
        list(early),
        list(waiting),
        left,
    )
