"""How long a word per rank takes, with weight gradients that stand in it, or that find their own place.

A skeleton is an order of F and backwards, and its gaps are filled with W:

    skeleton   F  F  .  .  I  .  F  I  I        a W goes where the rank would wait anyway, if it fits there,
    filled     F  F  .  .  I  W  F  I  I  W  W  before a forward that lacks memory, and to the end

A W in a skeleton is a deadline: it is done there unless it has been done before.
"""

from __future__ import annotations

import math

from penstock.schedule.auto.problem import SLACK, Problem, Words, connect

__all__ = ["evaluate", "fill"]


def evaluate(problem: Problem, words: Words) -> float:
    """When the last rank is done if every W is where it stands; infinity where memory or a deadlock stops it."""
    return fill(problem, words, None)


def fill(
    problem: Problem, skeleton: Words, overrun: float | None, limit: float = math.inf, filled: Words | None = None
) -> float:
    """When the last rank is done; infinity where memory or a deadlock stops it, or beyond ``limit``.

    ``overrun`` is the fraction of a W that may stand out of the gap it goes into; None leaves every W where it stands.
    ``filled``, a list for each rank, takes the letters as they are done.
    """
    count = problem.num_stages
    weights = 3 * count
    durations, takes = problem.durations, problem.takes
    ranks = len(skeleton)
    wires: list[list[float]] = [[] for _ in range(2 * len(problem.arcs))]
    incoming, outgoing = connect(problem, wires)
    done = [0] * (2 * count)
    position, clock, kept = [0] * ranks, [0.0] * ranks, [0.0] * ranks
    pending: Words = [[] for _ in skeleton]
    early = [0] * count
    room = [cap * (1 + SLACK) for cap in problem.cap]
    # A rank that has idled longer than this cannot be done by the limit.
    patience = [limit - problem.m * work for work in problem.work]
    part = math.inf if overrun is None else 1.0 - overrun
    waiting = list(range(ranks))
    listed = [True] * ranks
    left = ranks
    while waiting:
        rank = waiting.pop()
        listed[rank] = False
        word, queue, output = skeleton[rank], pending[rank], filled[rank] if filled else None
        at, now, holds, space, lost = position[rank], clock[rank], kept[rank], room[rank], patience[rank]
        end = len(word)
        while at < end:
            letter = word[at]
            if letter >= weights:
                if early[letter - weights]:
                    early[letter - weights] -= 1
                elif letter in queue:
                    queue.remove(letter)
                    now += durations[letter]
                    holds += takes[letter]
                    if output is not None:
                        output.append(letter)
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
                if queue and overrun is not None:
                    more = takes[letter]
                    while queue and (
                        now + durations[queue[0]] * part <= start or (letter < count and holds + more > space)
                    ):
                        weight = queue.pop(0)
                        early[weight - weights] += 1
                        now += durations[weight]
                        holds += takes[weight]
                        if output is not None:
                            output.append(weight)
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
                if output is not None:
                    output.append(letter)
                at += 1
                continue
            break
        if at == end:
            left -= 1
            now += sum(durations[weight] for weight in queue)
            if output is not None:
                output.extend(queue)
            queue.clear()
        position[rank], clock[rank], kept[rank], patience[rank] = at, now, holds, lost
        if now > limit:
            return math.inf
    return max(clock) if left == 0 else math.inf
