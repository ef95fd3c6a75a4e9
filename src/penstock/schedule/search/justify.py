"""Double justification: run all ops as early as possible, then all as late as possible, and so on.

In each pass, ops move into gaps. Instead of waiting, a rank runs a later op of its order, if that op is ready, fits in
memory and ends before the latest start of the op that it overtakes, known from the previous pass. So no pass makes an
order slower, and most passes make it faster.

An order reversed in time is an order, too: there a W allocates memory, and an F frees it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

from penstock.schedule.search.problem import TOLERANCE, Orders
from penstock.schedule.search.tabu import NodeTable

_LOOKAHEAD = 24
"""The number of next ops of its order that a rank considers."""


def justify(table: NodeTable, orders: Orders, passes: int, expired: Callable[[], bool]) -> tuple[float, Orders]:
    """Run up to ``passes`` passes; fewer if two in a row do not reduce the makespan, or if the time has expired."""
    justification = Justification(table, orders)
    passes_without_gain = 0
    for _ in range(passes):
        before = justification.makespan
        justification.run_pass()
        passes_without_gain = passes_without_gain + 1 if justification.makespan > before * (1 - TOLERANCE) else 0
        if passes_without_gain == 2 or expired():
            break
    orders = justification.early_orders()
    return justification.makespan, orders


class Justification:
    """The state between passes. The constructor runs the first pass, after which all ops are early."""

    def __init__(self, table: NodeTable, orders: Orders) -> None:
        self.table = table
        problem = table.problem
        self.orders, self.ops = table.number(orders)
        self.duration = [problem.durations[op] for op in self.ops]
        change = [problem.memory_change[op] for op in self.ops]
        none = -math.inf
        # Forward and reversed: the change of memory by a node, and its peak relative to the memory before it.
        self._change = change, [-more for more in change]
        self._peaks = (
            [need or none for need in table.needs],
            [need - more if need else none for need, more in zip(table.needs, change, strict=True)],
        )
        self._successors = table.targets, table.sources
        self._num_inputs = [len(each) for each in table.sources], [len(each) for each in table.targets]
        self._memory_limit = [cap * (1 + TOLERANCE) for cap in problem.cap]
        self._reversed = False
        self._latest = [none] * table.none
        self.makespan = 0.0
        self.run_pass()

    def early_orders(self) -> Orders:
        """The orders with all ops early. Runs one more pass if the last one shifted them late."""
        if not self._reversed:
            self.run_pass()
        return [[self.ops[node] for node in reversed(order)] for order in self.orders]

    def run_pass(self) -> None:
        """Shift all ops in the direction opposite to the last pass: early first, then late."""
        table, duration, latest = self.table, self.duration, self._latest
        orders, line, pair, rank_of = self.orders, table.line, table.pair, table.rank
        change, peaks = self._change[self._reversed], self._peaks[self._reversed]
        successors = self._successors[self._reversed]
        missing = list(self._num_inputs[self._reversed])
        arrival = [0.0] * len(missing)
        starts = [0.0] * len(missing)
        ranks = len(orders)
        position, held, free = [0] * ranks, [0.0] * ranks, [0.0] * ranks
        wake = [0.0] * ranks  # when an idle rank is considered again; infinite if that needs an arrival
        events = [(0.0, rank) for rank in range(ranks)]
        tolerance = TOLERANCE * self.makespan
        never = math.inf
        done = 0.0
        while events:
            now, rank = heappop(events)
            if wake[rank] != now:
                continue
            wake[rank] = -1.0
            order, at, memory, limit = orders[rank], position[rank], held[rank], self._memory_limit[rank]
            count = len(order)
            up_to_date = True  # whether all arrivals until now are known; False if the rank is ahead of others
            while at < count:
                node = order[at]
                if missing[node] or arrival[node] > now + tolerance:
                    if not up_to_date:
                        wake[rank] = free[rank] = now
                        heappush(events, (now, rank))
                        break
                    deadline = latest[node] + tolerance
                    soon = never if missing[node] else arrival[node]
                    found = -1
                    if now + table.shortest[rank] <= deadline:
                        lines, pairs = [line[node]], [pair[node]]
                        after, top = memory + change[node], memory + peaks[node]
                        for i in range(at + 1, min(at + _LOOKAHEAD, count)):
                            other = order[i]
                            if not missing[other] and line[other] not in lines and pair[other] not in pairs:
                                begin = arrival[other]
                                if begin <= now + tolerance:
                                    if (
                                        now + duration[other] <= deadline
                                        and memory + peaks[other] <= limit
                                        and (change[other] <= 0.0 or top + change[other] <= limit)
                                    ):
                                        found = i
                                        break
                                elif begin < soon and begin + duration[other] <= deadline:
                                    soon = begin
                            lines.append(line[other])
                            pairs.append(pair[other])
                            if after + peaks[other] > top:
                                top = after + peaks[other]
                            after += change[other]
                    if found < 0:
                        free[rank] = now
                        wake[rank] = soon
                        if soon < never:
                            heappush(events, (soon, rank))
                        break
                    node = order.pop(found)
                    order.insert(at, node)
                at += 1
                if arrival[node] > now:
                    now = arrival[node]
                starts[node] = now
                now += duration[node]
                memory += change[node]
                up_to_date = False
                for other, time in successors[node]:
                    missing[other] -= 1
                    if now + time > arrival[other]:
                        arrival[other] = now + time
                    receiver = rank_of[other]
                    if not missing[other] and receiver != rank and wake[receiver] > arrival[other]:
                        wake_at = arrival[other] if arrival[other] > free[receiver] else free[receiver]
                        if wake_at < wake[receiver]:
                            wake[receiver] = wake_at
                            heappush(events, (wake_at, receiver))
            position[rank], held[rank] = at, memory
            if now > done:
                done = now
        self.makespan = done
        self._latest = [done - start - time for start, time in zip(starts, duration, strict=True)]
        for order in orders:
            order.reverse()
        self._reversed = not self._reversed
