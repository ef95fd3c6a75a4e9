"""How long a word per rank takes, with weight gradients that stand in it, or that find their own place.

A skeleton is an order of F and backwards, and its gaps are filled with W:

    skeleton   F  F  .  .  I  .  F  I  I        a W goes where the rank would wait anyway, if it fits there,
    filled     F  F  .  .  I  W  F  I  I  W  W  before a forward that lacks memory, and to the end

A W in a skeleton is a deadline: it is done there unless it has been done before. Recomputes stay where they stand; they
wait for nothing, so a rank does them while it would wait for what comes after them.
"""

from __future__ import annotations

import math

from penstock.schedule.search.problem import TOLERANCE, Orders, Problem, connect_arcs

__all__ = ["evaluate", "place_weight_grads"]


def evaluate(problem: Problem, words: Orders) -> float:
    """When the last rank is done if every W is where it stands; infinity where memory or a deadlock stops it."""
    return place_weight_grads(problem, words, None)


def place_weight_grads(
    problem: Problem, skeleton: Orders, overrun: float | None, limit: float = math.inf, filled: Orders | None = None
) -> float:
    """When the last rank is done; infinity where memory or a deadlock stops it, or beyond ``limit``.

    ``overrun`` is the fraction of a W that may stand out of the gap it goes into; None leaves every W where it stands.
    ``filled``, a list for each rank, takes the letters as they are done.
    """
    count = problem.num_stages
    weights, replays, drops = 3 * count, 4 * count, 5 * count
    durations, takes, needs = problem.durations, problem.takes, problem.needs
    ranks = len(skeleton)
    wires: list[list[float]] = [[] for _ in range(2 * len(problem.arcs))]
    incoming, outgoing = connect_arcs(problem, wires)
    done = [0] * (2 * count)
    position, clock, kept = [0] * ranks, [0.0] * ranks, [0.0] * ranks
    pending: Orders = [[] for _ in skeleton]
    early = [0] * count
    lost: Orders = [[] for _ in range(count)]  # by stage, the micro-batches that were dropped and are not there again
    room = [cap * (1 + TOLERANCE) for cap in problem.cap]
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
        at, now, holds, space, spare = position[rank], clock[rank], kept[rank], room[rank], patience[rank]
        end = len(word)
        while at < end:
            letter = word[at]
            if weights <= letter < replays:
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
            if replays <= letter < drops:
                while queue and overrun is not None and holds + needs[letter] > space:
                    weight = queue.pop(0)
                    early[weight - weights] += 1
                    now += durations[weight]
                    holds += takes[weight]
                    if output is not None:
                        output.append(weight)
                if not lost[letter - replays] or holds + needs[letter] > space:
                    return math.inf
                del lost[letter - replays][0]
                now += durations[letter]
                holds += takes[letter]
                if output is not None:
                    output.append(letter)
                at += 1
                continue
            line = letter if letter < 2 * count else letter - count if letter < weights else letter - drops
            k = done[line]
            if line >= count and (k >= done[line - count] or (lost[line - count] and lost[line - count][0] <= k)):
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
                    more = needs[letter]
                    while queue and (now + durations[queue[0]] * part <= start or (more and holds + more > space)):
                        weight = queue.pop(0)
                        early[weight - weights] += 1
                        now += durations[weight]
                        holds += takes[weight]
                        if output is not None:
                            output.append(weight)
                if start > now:
                    spare -= start - now
                    if spare < 0.0:
                        return math.inf
                    now = start
                if line < count:
                    if holds + needs[letter] > space:
                        return math.inf
                    if letter >= drops:
                        lost[line].append(k)
                elif letter < 2 * count:
                    queue.append(letter + 2 * count)
                now += durations[letter]
                holds += takes[letter]
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
        position[rank], clock[rank], kept[rank], patience[rank] = at, now, holds, spare
        if now > limit:
            return math.inf
    return max(clock) if left == 0 else math.inf
