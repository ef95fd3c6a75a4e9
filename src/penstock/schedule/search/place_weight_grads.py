"""List scheduling, and the evaluation of orders with weight gradients at their positions or in gaps.

A skeleton is an order of F and backwards; its gaps are filled with W:

    skeleton   F  F  .  .  I  .  F  I  I        a W runs in an idle gap that is long enough,
    filled     F  F  .  .  I  W  F  I  I  W  W  before a forward that lacks memory, and at the end

A W in a skeleton is a deadline: it runs there unless it ran earlier. Recomputes stay at their positions. They have no
inputs from other ranks, so they run while the rank would be idle.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from penstock.schedule.search.lower_bound import memory_bound_period
from penstock.schedule.search.orders import sequential_orders
from penstock.schedule.search.problem import TOLERANCE, C, F, I, Orders, Problem, R, W


def _connect_arcs(problem: Problem) -> tuple[list[list[list[float]]], list[list[tuple[list[float], float, int]]]]:
    """For F and I of each stage: the lists of arrival times of their inputs, and the lists that they append to, with
    the transfer time and the receiving rank. Each arc has two lists, forward and backward.
    """
    count, placement = problem.num_stages, problem.placement
    incoming: list[list[list[float]]] = [[] for _ in range(2 * count)]
    outgoing: list[list[tuple[list[float], float, int]]] = [[] for _ in range(2 * count)]
    for src, dst, time in problem.arcs:
        for source, target, rank in ((src, dst, placement[dst]), (count + dst, count + src, placement[src])):
            arrivals: list[float] = []
            incoming[target].append(arrivals)
            outgoing[source].append((arrivals, time, rank))
    return incoming, outgoing


def evaluate(problem: Problem, orders: Orders) -> float:
    """The makespan with every W at its position; infinite if memory or a deadlock prevents the orders."""
    return place_weight_grads(problem, orders, None)


def place_weight_grads(
    problem: Problem, skeleton: Orders, overrun: float | None, limit: float = math.inf, filled: Orders | None = None
) -> float:
    """The makespan; infinite if memory or a deadlock prevents the orders, or if it exceeds ``limit``.

    ``overrun`` is the fraction of a W that may exceed its gap; with None every W stays at its position. ``filled`` has
    an empty list per rank, which receives the ops in execution order.
    """
    count = problem.num_stages
    weight_grads, recomputes, checkpoints = W * count, R * count, C * count
    durations, change, needs = problem.durations, problem.memory_change, problem.memory_need
    ranks = len(skeleton)
    incoming, outgoing = _connect_arcs(problem)
    done = [0] * (2 * count)  # by F and I of each stage
    position, clock, held = [0] * ranks, [0.0] * ranks, [0.0] * ranks
    pending: Orders = [[] for _ in skeleton]  # by rank: W with a completed I
    early = [0] * count  # by stage: number of W that ran before their position
    to_recompute: Orders = [[] for _ in range(count)]  # by stage: micro-batches between C and R
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


def list_schedule(problem: Problem) -> tuple[float, Orders]:
    """List-schedule a problem: the makespan and the orders; one micro-batch at a time in case of a deadlock.

    Each rank runs the ready op with the earliest target. The target of a forward or input gradient is its start time if
    micro-batches start one period apart and never wait. Weight gradients have no target: they run when the rank would
    be idle, and when a forward lacks memory. A recompute runs when the rank is idle before its gradient arrives, if
    memory allows; otherwise it runs after the arrival.
    """
    count, m, ranks = problem.num_stages, problem.m, problem.num_ranks
    durations, change, needs = problem.durations, problem.memory_change, problem.memory_need
    recomputed = problem.recomputed
    never = math.inf
    targets = [0.0] * (2 * count)  # by F and I of each stage: start time of micro-batch 0 if it never waits
    for src, dst, time in sorted(problem.arcs, key=lambda arc: arc[1]):
        targets[dst] = max(targets[dst], targets[src] + durations[src] + time)
    for s in range(count):
        targets[count + s] = targets[s] + durations[s]
    for src, dst, time in sorted(problem.arcs, key=lambda arc: -arc[0]):
        targets[count + src] = max(targets[count + src], targets[count + dst] + durations[count + dst] + time)
    period = max(*problem.work, *memory_bound_period(problem))
    incoming, outgoing = _connect_arcs(problem)
    limits = [cap * (1 + TOLERANCE) for cap in problem.cap]
    reserve = [0.0] * count  # by stage: memory for the rank's later stages, without which no micro-batch might finish
    for stages in problem.stages_of:
        for i, s in enumerate(stages):
            reserve[s] = problem.memory_from(stages[i + 1 :])
    num_f, num_i, num_w, num_r = [0] * count, [0] * count, [0] * count, [0] * count  # ops done, by stage
    held = [0.0] * ranks
    orders: Orders = [[] for _ in range(ranks)]
    wake = [0.0] * ranks  # when the rank is considered again; negative if that needs an arrival
    idle_since = [0.0] * ranks  # negative while the rank is busy
    events = [(0.0, rank) for rank in range(ranks)]
    makespan = 0.0
    while events:
        now, rank = heappop(events)
        if wake[rank] != now:
            continue
        best, best_target = -1, never  # the ready op with the earliest target
        next_arrival = never
        blocked = never  # the earliest target of an op that lacks memory
        oldest, weight_grad = never, -1  # the pending W with the earliest micro-batch
        recompute, recompute_by = -1, never  # the R that can run ahead, and the arrival of its gradient
        memory, limit = held[rank], limits[rank]
        for s in problem.stages_of[rank]:
            for line, k, most in ((s, num_f[s], m), (count + s, num_i[s], num_f[s])):
                if k >= most:
                    continue
                at = 0.0
                for arrivals in incoming[line]:
                    if k >= len(arrivals):
                        at = never
                        break
                    if arrivals[k] > at:
                        at = arrivals[k]
                lacks_r = line >= count and recomputed[s] and num_r[s] == k
                if lacks_r and now < at <= recompute_by and memory + needs[R * count + s] + reserve[s] <= limit:
                    recompute, recompute_by = R * count + s, at
                if at > now:
                    if at < next_arrival:
                        next_arrival = at
                    continue
                target = targets[line] + k * period
                if line < count:
                    op, need = (C * count + s if recomputed[s] else s), needs[s] + reserve[s]
                elif lacks_r:
                    op, need = R * count + s, needs[R * count + s]
                else:
                    op, need = line, 0.0
                if need and memory + need > limit:
                    if target < blocked:
                        blocked = target
                elif target < best_target:
                    best, best_target = op, target
            if num_w[s] < num_i[s] and num_w[s] < oldest:
                oldest, weight_grad = num_w[s], W * count + s
        op = best
        if best >= 0:
            if blocked < best_target and weight_grad >= 0:
                op = weight_grad
        else:
            relieves = weight_grad >= 0 and blocked < never
            filler = weight_grad if relieves or (weight_grad >= 0 and recompute_by == never) else recompute
            if filler >= 0 and (relieves or now + durations[filler] <= next_arrival):
                op = filler
        if op < 0:
            idle_since[rank] = now
            if next_arrival < never:
                wake[rank] = next_arrival
                heappush(events, (next_arrival, rank))
            else:
                wake[rank] = -1.0
            continue
        orders[rank].append(op)
        idle_since[rank] = -1.0
        end = now + durations[op]
        held[rank] += change[op]
        kind, s = divmod(op, count)
        {F: num_f, C: num_f, I: num_i, W: num_w, R: num_r}[kind][s] += 1
        if kind in (F, C, I):
            for arrivals, time, other in outgoing[count + s if kind == I else s]:
                at = end + time
                arrivals.append(at)
                if idle_since[other] >= 0.0 and not 0.0 <= wake[other] <= at:
                    wake[other] = max(at, idle_since[other])
                    heappush(events, (wake[other], other))
        makespan = max(makespan, end)
        wake[rank] = end
        heappush(events, (end, rank))
    if all(k == m for done in (num_f, num_i, num_w) for k in done):
        return makespan, orders
    orders = sequential_orders(problem)
    return evaluate(problem, orders), orders
