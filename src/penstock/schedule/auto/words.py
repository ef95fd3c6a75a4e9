"""How long a word per rank takes, what it keeps, and which of its letters decide."""

from __future__ import annotations

import math

from penstock.schedule.auto.problem import SLACK, Problem, Words, connect

__all__ = ["critical", "evaluate", "fits_all"]


def evaluate(problem: Problem, words: Words, limit: float = math.inf) -> float:
    """When the last rank is done; infinity for a deadlock, and for what takes longer than ``limit``.

    One pass over the letters: each rank goes as far as its inputs are there. The words must pass ``fits_all``.
    """
    count = problem.num_stages
    weights = 3 * count
    durations = problem.durations
    wires: list[list[float]] = [[] for _ in range(2 * len(problem.arcs))]
    incoming, outgoing = connect(problem, wires)
    done = [0] * (2 * count)
    ranks = len(words)
    position = [0] * ranks
    clock = [0.0] * ranks
    waiting = list(range(ranks))
    listed = [True] * ranks
    left = sum(map(len, words))
    while waiting:
        rank = waiting.pop()
        listed[rank] = False
        word = words[rank]
        at, now, end = position[rank], clock[rank], len(word)
        while at < end:
            letter = word[at]
            if letter >= weights:
                now += durations[letter]
                at += 1
                continue
            line = letter if letter < 2 * count else letter - count
            k = done[line]
            start = now
            for arrivals in incoming[line]:
                if k >= len(arrivals):
                    break
                if arrivals[k] > start:
                    start = arrivals[k]
            else:
                done[line] = k + 1
                now = start + durations[letter]
                for arrivals, time, other in outgoing[line]:
                    arrivals.append(now + time)
                    if not listed[other] and other != rank:
                        listed[other] = True
                        waiting.append(other)
                at += 1
                continue
            break
        left -= at - position[rank]
        position[rank], clock[rank] = at, now
        if now > limit:
            return math.inf
    return max(clock) if left == 0 else math.inf


def critical(problem: Problem, words: Words) -> list[tuple[int, int]]:
    """The letters (rank, position) on a longest path, from its end to its beginning. There must be no deadlock."""
    count = problem.num_stages
    weights = 3 * count
    durations = problem.durations
    wires: list[list[tuple[float, int, int]]] = [[] for _ in range(2 * len(problem.arcs))]  # time, rank, position
    incoming, outgoing = connect(problem, wires)
    done = [0] * (2 * count)
    ranks = len(words)
    clock = [0.0] * ranks
    before: list[list[tuple[int, int] | None]] = [[] for _ in words]
    waiting = list(range(ranks))
    listed = [True] * ranks
    while waiting:
        rank = waiting.pop()
        listed[rank] = False
        word, trail, now = words[rank], before[rank], clock[rank]
        at = len(trail)
        while at < len(word):
            letter = word[at]
            origin: tuple[int, int] | None = (rank, at - 1) if at else None
            start = now
            if letter < weights:
                line = letter if letter < 2 * count else letter - count
                k = done[line]
                ready = True
                for arrivals in incoming[line]:
                    if k >= len(arrivals):
                        ready = False
                        break
                    arrival, source, place = arrivals[k]
                    if arrival > start:
                        start, origin = arrival, (source, place)
                if not ready:
                    break
                done[line] = k + 1
                now = start + durations[letter]
                for arrivals, time, other in outgoing[line]:
                    arrivals.append((now + time, rank, at))
                    if not listed[other] and other != rank:
                        listed[other] = True
                        waiting.append(other)
            else:
                now += durations[letter]
            trail.append(origin)
            at += 1
        clock[rank] = now
    last = max(range(ranks), key=clock.__getitem__)
    path: list[tuple[int, int]] = []
    step: tuple[int, int] | None = (last, len(words[last]) - 1)
    while step is not None:
        path.append(step)
        step = before[step[0]][step[1]]
    return path


def _fits(problem: Problem, rank: int, word: list[int]) -> bool:
    """Whether a rank's word keeps its cap, and every stage does F, then I, then W of each micro-batch."""
    count = problem.num_stages
    takes = problem.takes
    room = problem.cap[rank] * (1 + SLACK)
    kept = 0.0
    forwards = [0] * count  # without a backward yet
    inputs = [0] * count  # without a W yet
    for letter in word:
        kept += takes[letter]
        if letter < count:
            if kept > room:
                return False
            forwards[letter] += 1
        elif letter < 2 * count:
            forwards[letter - count] -= 1
            inputs[letter - count] += 1
            if forwards[letter - count] < 0:
                return False
        elif letter < 3 * count:
            forwards[letter - 2 * count] -= 1
            if forwards[letter - 2 * count] < 0:
                return False
        else:
            inputs[letter - 3 * count] -= 1
            if inputs[letter - 3 * count] < 0:
                return False
    return True


def fits_all(problem: Problem, words: Words) -> bool:
    """Whether each rank keeps its cap, and does what belongs together in the right order."""
    return all(_fits(problem, rank, word) for rank, word in enumerate(words))

