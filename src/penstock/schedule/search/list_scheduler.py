"""List scheduling: an event simulation in which every rank runs the ready op with the earliest target time.

The target of a forward or input gradient is the time at which its micro-batch would pass there if all micro-batches
travelled as fast as they can, one period apart. Weight gradients have no target: they fill waits, and run when a
forward lacks memory. A recompute fills a wait before its gradient arrives, if there is memory for it; otherwise it runs
when the gradient is there.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from penstock.schedule.search.lower_bound import memory_bound_period
from penstock.schedule.search.orders import sequential_orders
from penstock.schedule.search.place_weight_grads import evaluate
from penstock.schedule.search.problem import TOLERANCE, C, F, I, Orders, Problem, R, W, connect_arcs


def list_schedule(problem: Problem) -> tuple[float, Orders]:
    """The makespan and the orders; one micro-batch at a time in case of a deadlock."""
    count, m, ranks = problem.num_stages, problem.m, problem.num_ranks
    durations, change, needs = problem.durations, problem.memory_change, problem.memory_need
    recomputed = problem.recomputed
    never = math.inf
    targets = [0.0] * (2 * count)  # by F and I of each stage: when micro-batch 0 passes if it never waits
    for src, dst, time in sorted(problem.arcs, key=lambda arc: arc[1]):
        targets[dst] = max(targets[dst], targets[src] + durations[src] + time)
    for s in range(count):
        targets[count + s] = targets[s] + durations[s]
    for src, dst, time in sorted(problem.arcs, key=lambda arc: -arc[0]):
        targets[count + src] = max(targets[count + src], targets[count + dst] + durations[count + dst] + time)
    period = max(*problem.work, *memory_bound_period(problem))
    incoming, outgoing = connect_arcs(problem)
    limits = [cap * (1 + TOLERANCE) for cap in problem.cap]
    reserve = [0.0] * count  # memory for the rank's later stages, without which no micro-batch might ever finish
    for stages in problem.stages_of:
        for i, s in enumerate(stages):
            reserve[s] = problem.memory_from(stages[i + 1 :])
    num_f, num_i, num_w, num_r = [0] * count, [0] * count, [0] * count, [0] * count  # ops done, by stage
    held = [0.0] * ranks
    orders: Orders = [[] for _ in range(ranks)]
    wake = [0.0] * ranks  # when the rank looks again; negative while only an arrival can wake it
    idle_since = [0.0] * ranks  # negative while the rank works
    events = [(0.0, rank) for rank in range(ranks)]
    makespan = 0.0
    while events:
        now, rank = heappop(events)
        if wake[rank] != now:
            continue
        best, best_target = -1, never  # the ready op with the earliest target
        next_arrival = never
        blocked = never  # the earliest target of an op that lacks memory
        oldest, weight_grad = never, -1  # the W that has waited longest
        recompute, recompute_by = -1, never  # the R that could run ahead, and when its gradient arrives
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
