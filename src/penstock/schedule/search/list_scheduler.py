"""List scheduling: the ranks work event by event, and a policy says what each takes up next.

A policy gives every forward and input gradient a wish: the time at which its micro-batch would pass there if all
micro-batches travelled alike, one period apart. A rank does what has the earliest wish of what is ready. Weight
gradients have no wish: they fill waits, and are done when their memory is needed. A recompute fills a wait before its
gradient comes, if there is room for it, or else is done when the gradient is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from random import Random

from penstock.schedule.search.lower_bound import memory_bound_period
from penstock.schedule.search.problem import TOLERANCE, Orders, Problem, connect_arcs

__all__ = ["Policy", "default_policy", "list_schedule", "perturbed_policy", "random_policy"]


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


def list_schedule(problem: Problem, policy: Policy) -> tuple[float, Orders]:
    """The makespan and the words; infinity where the policy runs into a deadlock."""
    count, m, ranks = problem.num_stages, problem.m, problem.num_ranks
    durations, takes, needs, again = problem.durations, problem.takes, problem.needs, problem.again
    never = math.inf
    wishes, period, group, step = policy.wishes, policy.period, policy.group, policy.step
    overrun, look, relieve = policy.overrun, policy.look, policy.relieve
    round_ = group * period
    round_pace = group * policy.pace
    wires: list[list[float]] = [[] for _ in range(2 * len(problem.arcs))]
    incoming, outgoing = connect_arcs(problem, wires)
    entries = [k // group * round_pace for k in range(m)]
    for s in range(count):
        if policy.pace and not incoming[s]:
            incoming[s].append(entries)
    room = [cap * (1 + TOLERANCE) for cap in problem.cap]
    quota = [cap * (1 + TOLERANCE) for cap in policy.quota] if policy.quota else room
    reserve = [0.0] * count  # room for the later stages of the rank: without it, no micro-batch might ever end
    for stages in problem.local:
        for i, s in enumerate(stages):
            reserve[s] = problem.memory_from(stages[i + 1 :])
    backs = [2 * count + s if policy.fused and problem.fuses[s] else count + s for s in range(count)]
    forwards, inputs, weights, replays = [0] * count, [0] * count, [0] * count, [0] * count
    split = [back < 2 * count for back in backs]
    kept = [0.0] * ranks
    words: Orders = [[] for _ in range(ranks)]
    wake = [0.0] * ranks  # when the rank looks again; below 0 while only news can wake it
    free = [0.0] * ranks  # since when the rank is idle; below 0 while it works
    events = [(0.0, rank) for rank in range(ranks)]
    local = problem.local
    end = 0.0
    while events:
        now, rank = heappop(events)
        if wake[rank] != now:
            continue
        best, best_wish = -1, never  # the letter that is ready and has the earliest wish
        soon = never  # when the next input arrives
        urgent, urgent_at = never, never  # the earliest wish of what is on its way, and when that arrives
        blocked = never  # the earliest wish of a forward that lacks memory
        oldest, weight = never, -1  # the W that waits for longest
        replay, replay_at = -1, never  # the R that could be done ahead, and when its gradient arrives
        holds, space = kept[rank], room[rank]
        for s in local[rank]:
            done = inputs[s]
            for line, k, most in ((s, forwards[s], m), (count + s, done, forwards[s])):
                if k >= most:
                    continue
                at = 0.0
                for arrivals in incoming[line]:
                    if k >= len(arrivals):
                        at = never
                        break
                    if arrivals[k] > at:
                        at = arrivals[k]
                lacks = line >= count and again[s] and replays[s] == k
                if lacks and now < at <= replay_at and holds + needs[4 * count + s] + reserve[s] <= space:
                    replay, replay_at = 4 * count + s, at
                if at == never:
                    continue
                wish = wishes[line] + k // group * round_ + k % group * step
                if at > now:
                    if at < soon:
                        soon = at
                    if wish < urgent:
                        urgent, urgent_at = wish, at
                elif line >= count:
                    if not lacks:
                        if wish < best_wish:
                            best, best_wish = backs[s], wish
                    elif holds + needs[4 * count + s] <= space:
                        if wish < best_wish:
                            best, best_wish = 4 * count + s, wish
                    elif wish < blocked:
                        blocked = wish
                elif holds + needs[s] + reserve[s] <= space and (holds + needs[s] <= quota[rank] or k == done):
                    if wish < best_wish:
                        best, best_wish = 5 * count + s if again[s] else s, wish
                elif wish < blocked:
                    blocked = wish
            if split[s] and weights[s] < done and weights[s] < oldest:
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
        else:
            relieves = weight >= 0 and blocked < never
            filler = weight if relieves or (weight >= 0 and replay_at == never) else replay
            if filler >= 0 and (relieves or now + durations[filler] <= soon + overrun * durations[filler]):
                letter = filler
        if letter < 0:
            free[rank] = now
            if soon < never:
                wake[rank] = soon
                heappush(events, (soon, rank))
            else:
                wake[rank] = -1.0
            continue
        words[rank].append(letter)
        free[rank] = -1.0
        over = now + durations[letter]
        kept[rank] += takes[letter]
        if letter < 3 * count or letter >= 5 * count:
            if letter < count or letter >= 5 * count:
                line = letter % count
                forwards[line] += 1
            else:
                line = letter if letter < 2 * count else letter - count
                inputs[line - count] += 1
                if letter >= 2 * count:
                    weights[line - count] += 1
            for arrivals, time, other in outgoing[line]:
                at = over + time
                arrivals.append(at)
                if free[other] >= 0.0 and not 0.0 <= wake[other] <= at:
                    wake[other] = max(at, free[other])
                    heappush(events, (wake[other], other))
        elif letter < 4 * count:
            weights[letter - 3 * count] += 1
        else:
            replays[letter - 4 * count] += 1
        end = max(end, over)
        wake[rank] = over
        heappush(events, (over, rank))
    complete = all(k == m for k in forwards) and all(k == m for k in inputs) and all(k == m for k in weights)
    return (end if complete else never), words


# Policies for the list scheduler: drawn at random around the travel of a micro-batch, and varied.

_PACES = (0.9, 1.0, 1.05, 1.1)
"""Where micro-batches enter at a pace, it is about the one that work and memory allow."""
_PACED, _SELDOM = 0.7, 0.25
"""How often they do so where memory is short, and where it is not: then they enter as soon as they can."""


def default_policy(problem: Problem) -> Policy:
    """Every micro-batch travels as fast as it can, one bottleneck's work apart."""
    return Policy(
        _travel_times(problem, [1.0] * 2 * _depth(problem), 0.0), max(*problem.work, *memory_bound_period(problem))
    )


def random_policy(problem: Problem, random: Random) -> Policy:
    """A micro-batch may linger on its way: on each turn round the ranks, out or back, and where it turns."""
    depth, count, ranks = _depth(problem), problem.num_stages, problem.num_ranks
    linger = [random.choice((1.0, 1.0, 1.0, 1.5, 2.0, 2.0, 3.0, 4.0)) for _ in range(2 * depth)]
    wait = random.choice((0.0, 0.0, 0.0, 1.0, 2.0, 4.0)) * problem.durations[2 * count - 1]
    period = max(*problem.work, *memory_bound_period(problem))
    paced = _PACED if period > max(problem.work) else _SELDOM
    slope = random.choice((0.0, 0.0, 0.5, 1.0))
    order = sorted(range(ranks), key=lambda rank: problem.local[rank][0])
    turn = {rank: i for i, rank in enumerate(order)}
    return Policy(
        _travel_times(problem, linger, wait),
        period * random.choice((1.0, 1.0, 1.1, 1.2)),
        pace=period * random.choice(_PACES) if random.random() < paced else 0.0,
        group=ranks if depth > 1 and random.random() < 0.3 else 1,
        step=sum(problem.durations[:count]) / count,
        overrun=random.choice((0.0, 0.0, 0.3, 0.7, 1.0)),
        look=random.choice((0.0, 0.0, 0.3, 0.6, 1.0)),
        quota=tuple(
            max(least, cap - slope * turn[rank] * least)
            for rank, (least, cap) in enumerate(zip(problem.least, problem.cap, strict=True))
        ),
        relieve=random.random() < 0.7,
        fused=any(problem.fuses) and random.random() < 0.5,
    )


def perturbed_policy(problem: Problem, policy: Policy, random: Random) -> Policy:
    """A policy like this one."""
    count, work = problem.num_stages, max(problem.work)
    wishes = list(policy.wishes)
    varied = replace(policy, wishes=wishes)
    for _ in range(random.choice((1, 1, 2, 3))):
        what = random.randrange(9)
        if what <= 2:
            begin = random.randrange(2 * count)
            end = begin + (random.randrange(1, count + 1) if random.random() < 0.6 else 1)
            shift = random.gauss(0.0, 0.4) * work
            for line in range(begin, min(end, 2 * count if begin >= count else count)):
                wishes[line] += shift
        elif what == 3:
            varied.period = max(0.8 * work, varied.period * (1 + random.gauss(0.0, 0.05)))
        elif what == 8:
            varied.pace = max(0.0, varied.pace + random.gauss(0.0, 0.05) * work)
        elif what == 4:
            varied.overrun = max(0.0, varied.overrun + random.gauss(0.0, 0.3))
        elif what == 5:
            varied.look = max(0.0, varied.look + random.gauss(0.0, 0.3))
        elif what == 6:
            varied.quota = _perturbed_quota(problem, varied.quota or problem.cap, random)
        else:
            varied.relieve = not varied.relieve
    return varied


def _perturbed_quota(problem: Problem, quota: tuple[float, ...], random: Random) -> tuple[float, ...]:
    """A micro-batch of a stage more or less, on one rank or on all from it."""
    rank = random.randrange(len(quota))
    last = rank if random.random() < 0.5 else len(quota) - 1
    size = random.choice((-1, 1)) * max(problem.activation)
    return tuple(
        min(problem.cap[r], max(problem.least[r], kept + size)) if rank <= r <= last else kept
        for r, kept in enumerate(quota)
    )


def _depth(problem: Problem) -> int:
    return max(map(len, problem.local))


def _travel_times(problem: Problem, linger: list[float], wait: float) -> list[float]:
    """By class, when micro-batch 0 passes if its work takes ``linger`` times as long, for each turn out and back."""
    count, times = problem.num_stages, problem.durations
    depth = len(linger) // 2
    turns = [problem.local[rank].index(stage) for stage, rank in enumerate(problem.placement)]
    wishes = [0.0] * (2 * count)
    for src, dst, time in sorted(problem.arcs, key=lambda arc: arc[1]):
        wishes[dst] = max(wishes[dst], wishes[src] + times[src] * linger[turns[src]] + time)
    for stage in range(count):
        wishes[count + stage] = wishes[stage] + times[stage] + wait
    for src, dst, time in sorted(problem.arcs, key=lambda arc: -arc[0]):
        passed = wishes[count + dst] + times[count + dst] * linger[depth + turns[dst]] + time
        wishes[count + src] = max(wishes[count + src], passed)
    return wishes
