"""List scheduling: the ranks work event by event, and a policy says what each takes up next.

A policy gives every forward and input gradient a wish: the time at which its micro-batch would pass there if all
micro-batches travelled alike, one period apart. A rank does what has the earliest wish of what is ready. Weight
gradients have no wish: they fill waits, and are done when their memory is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush

from penstock.schedule.auto.problem import SLACK, Problem, Words, connect

__all__ = ["Policy", "list_schedule"]


@dataclass
class Policy:
    """How ranks choose. Times are in the problem's unit."""

    wishes: list[float]
    """By class, F and I of each stage: when micro-batch 0 passes."""
    period: float
    """The time between two micro-batches."""
    group: int = 1
    """So many micro-batches pass a stage one after the other before the rank turns to another stage."""
    step: float = 0.0
    """The time between two micro-batches of a group."""
    overrun: float = 0.0
    """A W may delay what arrives meanwhile by this fraction of itself."""
    look: float = 0.0
    """Work waits for what has an earlier wish if that arrives within this fraction of the work."""
    pace: float = 0.0
    """The least time between two micro-batches, or groups of them, that enter the pipeline, for each of them."""
    quota: tuple[float, ...] | None = None
    """By rank: what it may keep when it takes up a forward while others of that stage are in flight."""
    relieve: bool = True
    """Whether a W goes first where a forward with an earlier wish lacks memory."""
    fused: bool = False
    """Whether a backward is B where that takes less time than I and W."""


def list_schedule(problem: Problem, policy: Policy, limit: float = math.inf) -> tuple[float, Words]:
    """The makespan and the words; infinity where the policy runs into a deadlock or beyond ``limit``."""
    count, m, ranks = problem.num_stages, problem.m, problem.num_ranks
    durations, takes = problem.durations, problem.takes
    never = math.inf
    wishes, period, group, step = policy.wishes, policy.period, policy.group, policy.step
    overrun, look, relieve = policy.overrun, policy.look, policy.relieve
    round_ = group * period
    round_pace = group * policy.pace
    wires: list[list[float]] = [[] for _ in range(2 * len(problem.arcs))]
    incoming, outgoing = connect(problem, wires)
    entries = [k // group * round_pace for k in range(m)]
    for s in range(count):
        if policy.pace and not incoming[s]:
            incoming[s].append(entries)
    room = [cap * (1 + SLACK) for cap in problem.cap]
    quota = [cap * (1 + SLACK) for cap in policy.quota] if policy.quota else room
    reserve = [0.0] * count  # room for the later stages of the rank: without it, no micro-batch might ever end
    for stages in problem.local:
        later = 0.0
        for s in reversed(stages):
            reserve[s] = later
            later += problem.activation[s]
    backs = [2 * count + s if policy.fused and problem.fuses[s] else count + s for s in range(count)]
    forwards, inputs, weights = [0] * count, [0] * count, [0] * count
    split = [back < 2 * count for back in backs]
    kept = [0.0] * ranks
    words: Words = [[] for _ in range(ranks)]
    wake = [0.0] * ranks  # when the rank looks again; below 0 while only news can wake it
    free = [0.0] * ranks
    events = [(0.0, rank) for rank in range(ranks)]
    local = problem.local
    end = 0.0
    while events:
        now, rank = heappop(events)
        if wake[rank] != now:
            continue
        best, best_wish, soon, urgent, urgent_at = -1, never, never, never, never
        blocked, oldest, weight = never, never, -1
        holds, space = kept[rank], room[rank]
        for s in local[rank]:
            k = forwards[s]
            if k < m:
                at = 0.0
                for arrivals in incoming[s]:
                    if k >= len(arrivals):
                        at = never
                        break
                    if arrivals[k] > at:
                        at = arrivals[k]
                if at <= now:
                    size = takes[s]
                    more = holds + size
                    if more + reserve[s] <= space and (more <= quota[rank] or k == inputs[s]):
                        wish = wishes[s] + k // group * round_ + k % group * step
                        if wish < best_wish:
                            best, best_wish = s, wish
                    else:
                        wish = wishes[s] + k // group * round_ + k % group * step
                        if wish < blocked:
                            blocked = wish
                elif at < never:
                    if at < soon:
                        soon = at
                    wish = wishes[s] + k // group * round_ + k % group * step
                    if wish < urgent:
                        urgent, urgent_at = wish, at
            k = inputs[s]
            if k < forwards[s]:
                at = 0.0
                for arrivals in incoming[count + s]:
                    if k >= len(arrivals):
                        at = never
                        break
                    if arrivals[k] > at:
                        at = arrivals[k]
                if at <= now:
                    wish = wishes[count + s] + k // group * round_ + k % group * step
                    if wish < best_wish:
                        best, best_wish = backs[s], wish
                elif at < never:
                    if at < soon:
                        soon = at
                    wish = wishes[count + s] + k // group * round_ + k % group * step
                    if wish < urgent:
                        urgent, urgent_at = wish, at
                if split[s] and weights[s] < k and weights[s] < oldest:
                    oldest, weight = weights[s], 3 * count + s
            elif split[s] and weights[s] < k and weights[s] < oldest:
                oldest, weight = weights[s], 3 * count + s
        letter = best
        if best >= 0:
            if urgent < best_wish and look and urgent_at < now + look * durations[best]:
                letter = -1
                if weight >= 0 and now + durations[weight] <= urgent_at + overrun * durations[weight]:
                    letter = weight
                else:
                    soon = urgent_at
            elif blocked < best_wish and relieve and weight >= 0:
                letter = weight
        elif weight >= 0 and (blocked < never or now + durations[weight] <= soon + overrun * durations[weight]):
            letter = weight
        if letter < 0:
            free[rank] = now
            if soon < never:
                wake[rank] = soon
                heappush(events, (soon, rank))
            else:
                wake[rank] = -1.0
            continue
        words[rank].append(letter)
        over = now + durations[letter]
        kept[rank] += takes[letter]
        if letter < 3 * count:
            if letter < count:
                forwards[letter] += 1
                line = letter
            else:
                line = letter if letter < 2 * count else letter - count
                inputs[line - count] += 1
                if letter >= 2 * count:
                    weights[line - count] += 1
            for arrivals, time, other in outgoing[line]:
                at = over + time
                arrivals.append(at)
                if other != rank:
                    idle = wake[other]
                    if idle < 0.0 or at < idle:
                        if idle >= 0.0 and free[other] < 0:
                            continue
                        if at < free[other]:
                            at = free[other]
                        wake[other] = at
                        heappush(events, (at, other))
        else:
            weights[letter - 3 * count] += 1
        if over > end:
            end = over
            if end > limit:
                return never, words
        wake[rank], free[rank] = over, -1.0
        heappush(events, (over, rank))
    complete = all(k == m for k in forwards) and all(k == m for k in inputs) and all(k == m for k in weights)
    return (end if complete else never), words
