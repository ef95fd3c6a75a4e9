"""Conversion of encoded orders (see ``problem``): from and to schedules, with and without W and recomputes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache

from penstock.schedule.costs import Costs
from penstock.schedule.one_f_one_b import alternate
from penstock.schedule.registry import SCHEDULES
from penstock.schedule.schedule import Action, Edge, Schedule, loop, vee
from penstock.schedule.search.problem import KINDS, TOLERANCE, B, C, F, I, Orders, Problem, R, W
from penstock.schedule.simulate import Simulation, simulate


def encode(schedule: Schedule, fused: Sequence[bool]) -> Orders:
    """Encode a schedule's orders as op codes. A B is one op on ``fused`` stages, and I and W on the others."""
    count = schedule.num_stages
    orders: Orders = []
    for actions in schedule.orders:
        order: list[int] = []
        for stage, kind, k in actions:
            if kind == "B" and not fused[stage]:
                order += (I * count + stage, W * count + stage)
            elif kind == "F" and (stage, k) in schedule.recomputed:
                order.append(C * count + stage)
            else:
                order.append(KINDS.index(kind) * count + stage)
        orders.append(order)
    return orders


def microbatches(problem: Problem, orders: Orders) -> list[list[int]]:
    """By rank: the micro-batch of each op. W and R have the earliest micro-batch with a completed I or C."""
    count = problem.num_stages
    done = [0] * (2 * count)  # by F and I of each stage
    waiting: list[deque[int]] = [deque() for _ in range(2 * count)]  # by W and R of each stage
    numbered = []
    for order in orders:
        numbers = []
        for op in order:
            kind, stage = divmod(op, count)
            if kind in (W, R):
                k = waiting[op - W * count].popleft()
            else:
                line = stage if kind in (F, C) else count + stage
                k = done[line]
                done[line] = k + 1
                if kind in (I, C):
                    waiting[(kind == C) * count + stage].append(k)
            numbers.append(k)
        numbered.append(numbers)
    return numbered


def simulate_orders(problem: Problem, orders: Orders, costs: Costs, edges: Sequence[Edge]) -> Simulation:
    """Simulate the orders as a schedule. Adjacent I and W are fused to a B where that delays no other action."""
    actions = (
        [Action(op % problem.num_stages, KINDS[op // problem.num_stages], k) for op, k in zip(order, ks, strict=True)]
        for order, ks in zip(orders, microbatches(problem, orders), strict=True)
    )
    split = simulate(Schedule.of("auto", problem.placement, actions, problem.m), costs, edges)
    fused = simulate(_fuse_backwards(problem, split), costs, edges)
    return fused if fused.makespan <= split.makespan * (1 + 1e-12) else split


def _fuse_backwards(problem: Problem, simulation: Simulation) -> Schedule:
    """Replace an I directly followed by its W with a B, if no consumer starts before the gradient of the B arrives."""
    schedule = simulation.schedule
    starts = {
        (action.stage, action.microbatch): start
        for order, times in zip(schedule.orders, simulation.starts, strict=True)
        for action, start in zip(order, times, strict=True)
        if action.kind in "IB"
    }
    consumers: list[list[tuple[int, float]]] = [[] for _ in schedule.placement]
    for src, dst, time in problem.arcs:
        consumers[dst].append((src, time))
    orders: list[list[Action]] = [[] for _ in schedule.orders]
    for fused, order in zip(orders, schedule.orders, strict=True):
        for action in order:
            stage, kind, k = action
            duration = problem.duration(B, stage)
            pays = duration <= problem.duration(I, stage) + problem.duration(W, stage)
            if kind == "W" and pays and fused[-1] == (stage, "I", k):
                end = starts[stage, k] + duration
                if all(starts[src, k] >= (end + time) * (1 - 1e-15) for src, time in consumers[stage]):
                    fused[-1] = Action(stage, "B", k)
                    continue
            fused.append(action)
    return Schedule.of(schedule.name, schedule.placement, orders, schedule.num_microbatches)


def without_weight_grads(problem: Problem, orders: Orders) -> Orders:
    count = problem.num_stages
    return [[op for op in order if op // count != W] for order in orders]


def fuse_all(problem: Problem, orders: Orders) -> Orders:
    """The orders with a B instead of each I, and without W."""
    count = problem.num_stages
    return [[op + (B - I) * count * (op // count == I) for op in order if op // count != W] for order in orders]


def with_recomputes(problem: Problem, orders: Orders) -> Orders:
    """The orders with the recomputes of the problem. Each additional R is directly before its backward."""
    count = problem.num_stages
    if not any(problem.recomputed) and all(max(order, default=0) < R * count for order in orders):
        return orders
    changed: Orders = []
    for stages, order in zip(problem.stages_of, orders, strict=True):
        kept = {s for s in stages if not problem.recomputed[s]}
        added = set(stages) - kept - {op % count for op in order if op // count == C}
        out: list[int] = []
        for op in order:
            kind, s = divmod(op, count)
            if s in kept and kind in (R, C):
                if kind == C:
                    out.append(F * count + s)
            elif s in added and kind in (I, B):
                out += (R * count + s, op)
            else:
                out.append(C * count + s if s in added and kind == F else op)
        changed.append(out)
    return changed


def sequential_orders(problem: Problem) -> Orders:
    """Each micro-batch completes its backward before the next one starts: slow, with the least memory."""
    count = problem.num_stages
    backwards = [
        (B * count + s,) if fused else (I * count + s, W * count + s) for s, fused in enumerate(problem.fusing_pays)
    ]
    return with_recomputes(
        problem,
        [[*stages, *(op for s in reversed(stages) for op in backwards[s])] * problem.m for stages in problem.stages_of],
    )


def fixed_schedules(placement: tuple[int, ...], m: int) -> Iterator[Schedule]:
    """All registered training schedules with this placement."""
    ranks = max(placement) + 1
    per_rank = len(placement) // ranks
    if placement not in (loop(ranks, per_rank), vee(ranks)):
        return
    for kind in SCHEDULES.values():
        if kind.stages_per_rank in (None, per_rank):
            schedule = kind.make(ranks, m, per_rank) if kind.takes_v else kind.make(ranks, m)
            if schedule.trains and schedule.placement == placement:
                yield schedule


@lru_cache(4)
def _encode_fixed(placement: tuple[int, ...], m: int, fused: tuple[bool, ...]) -> list[Orders]:
    return [encode(schedule, fused) for schedule in fixed_schedules(placement, m)]


def fixed_orders(problem: Problem, fused: tuple[bool, ...] | None = None) -> list[Orders]:
    """The fixed schedules, encoded, with the recomputes of the problem; ``fused`` as for ``encode``."""
    known = _encode_fixed(problem.placement, problem.m, fused or problem.fusing_pays)
    return [with_recomputes(problem, orders) for orders in known]


def warmup_variants(problem: Problem) -> Iterator[Orders]:
    """On a loop: skeletons of interleaved 1F1B with different numbers of warm-up forwards, as the caps allow."""
    ranks, count = problem.num_ranks, problem.num_stages
    per_rank = count // ranks
    if problem.placement != loop(ranks, per_rank):
        return
    full, rest = divmod(problem.m, ranks)
    groups = [ranks] * full + [rest]
    if full and 2 * rest < ranks:  # a small remainder is divided with the last group
        groups[-2:] = (ranks + rest + 1) // 2, (ranks + rest) // 2
    deepest = (per_rank - 1) * min(problem.m, ranks)
    for slope in (1, 2, 0):
        for base in range(deepest + 1, deepest + ranks * (1 if slope else 2) + 1, max(1, ranks // 8)):
            orders: Orders = []
            for rank, stages in enumerate(problem.stages_of):
                forwards = [s for group in groups for s in stages for _ in range(group)]
                backwards = [I * count + s for group in groups for s in reversed(stages) for _ in range(group)]
                warmup, held = 0, 0.0
                for s in forwards[: base + slope * (ranks - 1 - rank)]:
                    if held + problem.activation[s] > problem.cap[rank] * (1 + TOLERANCE):
                        break
                    held += problem.held_after_forward(s)
                    warmup += 1
                orders.append(alternate(forwards, backwards, warmup))
            yield with_recomputes(problem, orders)
