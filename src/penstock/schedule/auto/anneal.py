"""Improve a skeleton by small changes where they count: at the blocks of its critical path.

A block is a run of consecutive work of one rank on the path that decides the makespan. To shorten the path, work of
a block must leave it at one of its ends; whatever else is tried keeps the search from getting stuck.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from penstock.schedule.auto.fill import Checkpoint, Record, fill
from penstock.schedule.auto.problem import SLACK, Problem, Words
from penstock.schedule.auto.words import critical

__all__ = ["Plan", "anneal"]

_WARMTH = 0.2
"""The temperature at the beginning, as a fraction of what an action takes."""

_STALE = 4
"""After so many changes that gain nothing, the path is looked at again; until then it is about right."""

_CHECKPOINTS = 12
"""A change is tried from the last of so many points, in the order of things, that it leaves alone."""

_SINGLE = 0.6
"""How often a change is one of one rank; else it is two at once, which may be good only together."""

_NEAR = (0, 0, 0, 1, 2, 3)
"""How far beyond the end of its block work is moved."""


@dataclass
class Plan:
    """A skeleton, by rank how far a W may stand out of a gap, and the makespan that comes of them."""

    makespan: float
    skeleton: Words
    overrun: list[float]


def anneal(
    problem: Problem, plan: Plan, steps: int, random: Random, goal: float, expired: Callable[[], bool]
) -> Plan:
    """The best plan found in so many steps; sooner where the goal is reached or time is up."""
    now = Plan(plan.makespan, list(plan.skeleton), list(plan.overrun))
    best = plan
    stale = _STALE
    warmth = _WARMTH * sum(problem.durations) / len(problem.durations)
    for step in range(steps):
        if best.makespan <= goal or (step % 16 == 0 and expired()):
            break
        if stale >= _STALE:
            path, blocks, checkpoints = _path(problem, now)
            stale = 0
        old: dict[int, tuple[list[int], float]] = {}
        for _ in range(1 if random.random() < _SINGLE else 2):
            rank, word, overrun = _change(problem, now, path, blocks, random)
            if (word, overrun) != (now.skeleton[rank], now.overrun[rank]):
                old.setdefault(rank, (now.skeleton[rank], now.overrun[rank]))
                now.skeleton[rank], now.overrun[rank] = word, overrun
        if not old:
            continue
        same = {
            rank: _common(word, now.skeleton[rank]) if overrun == now.overrun[rank] else 0
            for rank, (word, overrun) in old.items()
        }
        checks = (point for point in reversed(checkpoints) if all(point.position[r] <= at for r, at in same.items()))
        begin = next(checks, None)
        if begin is not None:  # what the ranks waited for may not be next any more
            begin = begin._replace(waiting=[*begin.waiting, *(rank for rank in old if rank not in begin.waiting)])
        temperature = warmth * (1 - step / steps)
        limit = now.makespan - temperature * math.log(1.0 - random.random()) + SLACK
        makespan = fill(problem, now.skeleton, now.overrun, limit, resume=begin)
        if makespan > limit:
            for rank, (word, overrun) in old.items():
                now.skeleton[rank], now.overrun[rank] = word, overrun
            continue
        checkpoints = [point for point in checkpoints if all(point.position[r] <= at for r, at in same.items())]
        stale += 1 if makespan >= now.makespan else _STALE
        now.makespan = makespan
        if makespan < best.makespan * (1 - SLACK):
            best = Plan(makespan, list(now.skeleton), list(now.overrun))
    return best


def _common(word: list[int], other: list[int]) -> int:
    """How many letters two words begin with alike."""
    for at, (letter, same) in enumerate(zip(word, other, strict=False)):
        if letter != same:
            return at
    return min(len(word), len(other))


def _path(
    problem: Problem, plan: Plan
) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]], list[Checkpoint]]:
    """The critical path: (rank, position in the skeleton; -1 for a W in a gap). Its blocks: (rank, first, last)."""
    record = Record(problem.num_ranks, 1 + sum(map(len, plan.skeleton)) // _CHECKPOINTS)
    fill(problem, plan.skeleton, plan.overrun, record=record)
    path = [(rank, record.places[rank][at]) for rank, at in critical(problem, record.words)]
    blocks: list[tuple[int, int, int]] = []
    before = -1
    for rank, at in path:
        if at >= 0:
            if rank == before and blocks and blocks[-1][0] == rank:
                blocks[-1] = (rank, at, blocks[-1][2])
            else:
                blocks.append((rank, at, at))
        before = rank
    return path, blocks, record.checkpoints


def _change(
    problem: Problem, plan: Plan, path: list[tuple[int, int]], blocks: list[tuple[int, int, int]], random: Random
) -> tuple[int, list[int], float]:
    """A rank with a new word or overrun; the old ones where the dice fall so."""
    dice = random.random()
    if dice < 0.06 or not blocks:
        rank, _ = random.choice(path)
        if dice < 0.03:
            return rank, plan.skeleton[rank], random.choice((0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
        return rank, _deadline(problem, rank, plan.skeleton[rank], random), plan.overrun[rank]
    rank, first, last = random.choice(blocks)
    word = plan.skeleton[rank]
    last = min(last, len(word) - 1)
    at = random.randint(min(first, last), last)
    if dice > 0.8:
        return rank, _swap_all(problem, word, at, random), plan.overrun[rank]
    count, stage = problem.num_stages, word[at] % problem.num_stages
    if count <= word[at] < 3 * count and problem.fuses[stage] and dice < 0.2:
        return rank, [*word[:at], 3 * count + 2 * stage - word[at], *word[at + 1 :]], plan.overrun[rank]
    if dice > 0.66:
        to = at + random.randint(-40, 40)
    elif random.random() < 0.5:
        to = first - random.choice(_NEAR)
    else:
        to = last + random.choice(_NEAR)
    if to == at:
        to = at + random.choice((-1, 1))
    to = max(0, min(len(word) - 1, to))
    moved = word[:at] + word[at + 1 :]
    moved.insert(to, word[at])
    return rank, moved, plan.overrun[rank]


def _deadline(problem: Problem, rank: int, word: list[int], random: Random) -> list[int]:
    """One deadline of a W more, or one less."""
    weights = 3 * problem.num_stages
    at = random.randrange(len(word))
    there = [i for i, letter in enumerate(word) if letter >= weights]
    if there and random.random() < 0.5:
        out = random.choice(there)
        return word[:out] + word[out + 1 :]
    return [*word[:at], weights + random.choice(problem.local[rank]), *word[at:]]


def _swap_all(problem: Problem, word: list[int], at: int, random: Random) -> list[int]:
    """Two neighbours change places, and so does the same pair wherever it stands in a part of the word."""
    to = at + random.choice((-1, 1))
    if not 0 <= to < len(word):
        return word
    pair = [word[min(at, to)], word[max(at, to)]]
    begin = 0 if random.random() < 0.5 else random.randrange(len(word))
    end = len(word) if random.random() < 0.5 else random.randrange(len(word))
    swapped = list(word)
    i = begin
    while i < end - 1:
        if swapped[i : i + 2] == pair:
            swapped[i : i + 2] = pair[1], pair[0]
            i += 1
        i += 1
    return swapped
