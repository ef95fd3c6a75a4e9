"""Evaluate orders, with weight gradients at their positions or placed into gaps.

A skeleton is an order of F and backwards; its gaps are filled with W:

    skeleton   F  F  .  .  I  .  F  I  I        a W runs where the rank would wait anyway, if it fits there,
    filled     F  F  .  .  I  W  F  I  I  W  W  before a forward that lacks memory, and at the end

A W in a skeleton is a deadline: it runs there unless it has run before. Recomputes stay at their positions. They have
no inputs from other ranks, so a rank runs them while it would wait for the next op.
"""

from __future__ import annotations

import math

from penstock.schedule.search.problem import TOLERANCE, C, Orders, Problem, R, W, connect_arcs


def evaluate(problem: Problem, orders: Orders) -> float:
    """The makespan with every W at its position; infinite if memory or a deadlock prevents the orders."""
    return place_weight_grads(problem, orders, None)


def place_weight_grads(
    problem: Problem, skeleton: Orders, overrun: float | None, limit: float = math.inf, filled: Orders | None = None
) -> float:
    """The makespan; infinite if memory or a deadlock prevents the orders, or if it exceeds ``limit``.

    ``overrun`` is the fraction of a W that may exceed the gap it is placed into; None leaves every W at its position.
    ``filled``, an empty list for each rank, receives the ops in the order in which they run.
    """
    count = problem.num_stages
    weight_grads, recomputes, checkpoints = W * count, R * count, C * count
    durations, change, needs = problem.durations, problem.memory_change, problem.memory_need
    ranks = len(skeleton)
    incoming, outgoing = connect_arcs(problem)
    done = [0] * (2 * count)  # by F and I of each stage
    position, clock, held = [0] * ranks, [0.0] * ranks, [0.0] * ranks
    pending: Orders = [[] for _ in skeleton]  # by rank, W whose I is done
    early = [0] * count  # W that ran before their position
    to_recompute: Orders = [[] for _ in range(count)]  # by stage, micro-batches between C and R
    memory_limit = [cap * (1 + TOLERANCE) for cap in problem.cap]
    idle_budget = [limit - problem.m * work for work in problem.work]  # a rank that idles longer exceeds the limit
    gap_fraction = math.inf if overrun is None else 1.0 - overrun
    ready = list(range(ranks))
    listed = [True] * ranks
    left = ranks
    while ready:
        rank = ready.pop()
        listed[rank] = False
        order, queue, output = skeleton[rank], pending[rank], filled[rank] if filled else None
        at, now, memory, space, idle = position[rank], clock[rank], held[rank], memory_limit[rank], idle_budget[rank]
        end = len(order)
        while at < end:
            op = order[at]
            start, need, line = now, needs[op], -1
            if weight_grads <= op < recomputes:
                if early[op - weight_grads] or op not in queue:
                    early[op - weight_grads] -= early[op - weight_grads] > 0
                    at += 1
                    continue
                queue.remove(op)
            elif recomputes <= op < checkpoints:
                if not to_recompute[op - recomputes]:
                    return math.inf
                del to_recompute[op - recomputes][0]
            else:
                line = op if op < 2 * count else op - count if op < weight_grads else op - checkpoints
                k = done[line]
                if line >= count:
                    missing = to_recompute[line - count]
                    if k >= done[line - count] or (missing and missing[0] <= k):
                        return math.inf
                blocked = False
                for arrivals in incoming[line]:
                    if k >= len(arrivals):
                        blocked = True
                        break
                    if arrivals[k] > start:
                        start = arrivals[k]
                if blocked:
                    break
                done[line] = k + 1
            while queue and overrun is not None and not weight_grads <= op < recomputes:
                if now + durations[queue[0]] * gap_fraction > start and not (need and memory + need > space):
                    break
                weight_grad = queue.pop(0)
                early[weight_grad - weight_grads] += 1
                now += durations[weight_grad]
                memory += change[weight_grad]
                if output is not None:
                    output.append(weight_grad)
            if start > now:
                idle -= start - now
                if idle < 0.0:
                    return math.inf
                now = start
            if need and memory + need > space:
                return math.inf
            now += durations[op]
            memory += change[op]
            if output is not None:
                output.append(op)
            at += 1
            if line >= 0:
                if op >= checkpoints:
                    to_recompute[line].append(k)
                elif count <= op < 2 * count:
                    queue.append(op + 2 * count)
                for arrivals, time, other in outgoing[line]:
                    arrivals.append(now + time)
                    if not listed[other] and other != rank:
                        listed[other] = True
                        ready.append(other)
        if at == end:
            left -= 1
            now += sum(durations[op] for op in queue)
            if output is not None:
                output.extend(queue)
            queue.clear()
        position[rank], clock[rank], held[rank], idle_budget[rank] = at, now, memory, idle
        if now > limit:
            return math.inf
    return max(clock) if left == 0 else math.inf
