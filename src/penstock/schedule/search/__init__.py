"""Automatic schedules: a search for a short order, given the costs of each stage, any placement, and a memory cap.

The search starts from the fixed schedules and from list schedules, improves the best of them by justification and tabu
search on few micro-batches, and extends the result to all micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from random import Random

from penstock.errors import ScheduleError
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Edge, Schedule
from penstock.schedule.search.extend import extend, searched_microbatches
from penstock.schedule.search.justify import justify
from penstock.schedule.search.list_scheduler import list_schedule
from penstock.schedule.search.lower_bound import lower_bound, recompute_choices
from penstock.schedule.search.op_graph import NodeTable
from penstock.schedule.search.orders import (
    fixed_orders,
    fuse_all,
    sequential_orders,
    simulate_orders,
    warmup_variants,
    without_weight_grads,
)
from penstock.schedule.search.place_weight_grads import evaluate, place_weight_grads
from penstock.schedule.search.problem import TOLERANCE, Orders, Problem, make_problem
from penstock.schedule.search.tabu import tabu_search

__all__ = ["SearchResult", "auto", "first_order"]

# The search does a fixed amount of work, counted in ops: the unit is the evaluation of one op of an order.

_OPS_PER_SECOND = 3.2e6
"""Evaluations per second that a core reaches at least."""

_ORDER_OVERHEAD = 300
"""The cost of an evaluation besides its ops."""

_START_COST, _JUSTIFY_COST, _COMPARE_COST = 4.0, 6.0, 65.0
"""Per op: to make a start, to justify an order once, and to compare the result with all fixed schedules."""

_STEP_COST, _STEP_OVERHEAD = 1.05, 150
"""The cost of a step of tabu search, per op and besides."""

_SEARCH_SHARE = 0.6
"""The share of the time that is spent on few micro-batches, where the result has to be extended to more."""

_STARTS, _START_MARGIN = 12, 1.05
"""The number of starts that are justified, and how much slower than the best a start may be."""

_PASSES = (2, 8)
"""Passes of justification: of all starts, then of the best ones."""

_TRACKS, _MIN_STEPS = (4, 2, 1), 150
"""The number of orders that each round of tabu search improves, and the least number of steps for each."""

_OVERRUNS = (0.0, 0.5)
"""Values of ``overrun`` with which W is placed into a start."""

_Found = tuple[float, Orders]
"""A makespan and its orders."""


@dataclass(frozen=True)
class SearchResult:
    """A schedule, its makespan, and a lower bound: no order under the cap takes less time."""

    schedule: Schedule
    makespan: float
    lower_bound: float
    peak_memory: tuple[float, ...]
    """By rank, in the unit of ``Costs.activation``."""
    cap: tuple[float, ...]
    """By rank: the memory that it may use."""

    @property
    def gap(self) -> float:
        """How far the makespan is above the lower bound, as a fraction of the bound."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else 0.0

    def __str__(self) -> str:
        rank = max(range(len(self.peak_memory)), key=lambda r: self.peak_memory[r])
        certain = (
            "no order is faster" if self.gap <= TOLERANCE else f"at most {self.gap:.1%} slower than the best order"
        )
        return (
            f"makespan {self.makespan:.4g}, lower bound {self.lower_bound:.4g}: {certain}\n"
            f"peak memory {self.peak_memory[rank]:.4g} on rank {rank}, of {self.cap[rank]:.4g} that it may keep"
        )


def auto(
    costs: Costs,
    placement: Sequence[int],
    m: int,
    *,
    cap: float | Sequence[float] | None = None,
    edges: Iterable[Edge] | None = None,
    recompute: Iterable[int] | bool | None = False,
    seconds: float = 0.8,
    seed: int = 0,
    repeatable: bool = False,
) -> SearchResult:
    """Search a short schedule for ``m`` micro-batches with stage ``s`` on rank ``placement[s]``.

    ``cap`` is the memory of each rank, one number for all or one per rank, in the unit of ``costs.activation``;
    infinity is no limit. By default it is, for all ranks, the peak of 1F1B's fullest rank: the r-th of p ranks, counted
    by their first stages, holds p - r micro-batches (at most m) in all its stages. A cap under which there is no order
    raises ``ScheduleError``.

    ``recompute`` selects the stages whose forwards keep only ``costs.checkpoint`` and run again before their backward:
    none, all (True), or the given stages. With None the search chooses, per stage and micro-batch, and recomputes where
    that saves time under the cap. A recompute is an action like any other: it runs whenever there is time, and memory
    for its activations.

    The result keeps the cap, and is never slower than a fixed schedule that keeps it on the same placement with the
    same recomputes. Its figures are those of ``simulate``.

    The amount of search depends on the size of the problem and on ``seconds`` of one core's time. The same arguments
    give the same result, unless the core is so slow that the time expires; the fixed schedules are compared even then.
    With ``repeatable`` the time never expires, for ranks that must agree on the result.
    """
    if not 0 <= seconds < math.inf:
        raise ScheduleError(f"seconds={seconds}: expected how long to search, from 0")
    begin = time.thread_time()
    problem, edges = make_problem(costs, placement, m, cap, edges, recompute)
    bound = lower_bound(problem)
    goal = bound * (1 + TOLERANCE)

    def elapsed() -> float:
        return 0.0 if repeatable else time.thread_time() - begin

    relaxed = problem.relaxed_to_fit()
    found = _search(relaxed, goal, seconds, Random(seed), elapsed)
    if relaxed is not problem:
        found = [(makespan, fuse_all(problem, orders)) for makespan, orders in found]
    if found[0][0] > goal or problem.contended:
        found += _fixed(problem, costs, edges, limit=math.inf if problem.contended else found[0][0])
        found.sort(key=lambda entry: entry[0])
    if not problem.contended:
        del found[1:]
    simulations = (simulate_orders(problem, orders, costs, edges) for _, orders in found)
    best = min(simulations, key=lambda simulation: simulation.makespan)
    return SearchResult(best.schedule, best.makespan, min(bound, best.makespan), best.peak_memory, problem.cap)


def _fixed(problem: Problem, costs: Costs, edges: Sequence[Edge], limit: float) -> list[_Found]:
    """The fixed schedules that keep the cap, split and with full backwards, with their makespans up to ``limit``."""
    full = problem.with_full_backwards()
    choices = recompute_choices(full)
    known = [orders for choice in choices for orders in fixed_orders(choice)]
    if full is not problem:
        known += [fuse_all(problem, orders) for orders in known]
        unchanged = (True,) * problem.num_stages
        known += [orders for choice in choices for orders in fixed_orders(choice, fused=unchanged)]
    found = []
    for orders in known:
        makespan = place_weight_grads(full, orders, None, limit)
        if makespan < math.inf and full is not problem:  # it fits with full backwards, perhaps not as it is
            peaks = simulate_orders(problem, orders, costs, edges).peak_memory
            if any(peak > cap * (1 + TOLERANCE) for peak, cap in zip(peaks, problem.cap, strict=True)):
                continue
        if makespan < math.inf:
            found.append((makespan, orders))
    return found


def first_order(problem: Problem) -> Orders:
    """Orders that fit, without a search."""
    problem = recompute_choices(problem)[0]
    makespan, orders = list_schedule(problem)
    return orders if makespan < math.inf else sequential_orders(problem)


def _search(
    problem: Problem, goal: float, seconds: float, random: Random, elapsed: Callable[[], float]
) -> list[_Found]:
    """The best orders, best first. A makespan of ``goal`` ends the search."""
    small = problem.with_m(searched_microbatches(problem))
    share = 1.0
    if small.m < problem.m:  # extending takes time, and so does the comparison with fixed schedules then
        share, all_ops = _SEARCH_SHARE, 3 * problem.num_stages * problem.m
        seconds = max(seconds / 2, seconds - _COMPARE_COST * all_ops / _OPS_PER_SECOND)

    def expired() -> bool:
        return elapsed() >= share * seconds

    # A makespan of the small problem that would extend to the goal, if every added micro-batch costs its work.
    small_goal = (goal - (problem.m - small.m) * max(problem.work)) * (1 + TOLERANCE)
    ops = 3 * small.num_stages * small.m
    evaluation = ops + _ORDER_OVERHEAD
    evaluations = share * seconds * _OPS_PER_SECOND / evaluation
    starts, tried = _starts(small, int(evaluations / 60), small_goal, expired)
    evaluations -= _START_COST * tried
    table = NodeTable(small)
    found = starts[:_STARTS]
    for passes, count in zip(_PASSES, (_STARTS, _TRACKS[0]), strict=True):
        for i, (_, orders) in enumerate(found[:count]):
            if min(found)[0] > small_goal and not expired():
                found[i] = justify(table, orders, passes, expired)
                evaluations -= _JUSTIFY_COST * (passes + 1)
        found.sort(key=lambda entry: entry[0])
    steps = int(max(0.0, evaluations) * evaluation / (_STEP_COST * ops + _STEP_OVERHEAD) / len(_TRACKS))
    for tracks in (max(1, min(most, steps // _MIN_STEPS)) for most in _TRACKS):
        for i, (_, orders) in enumerate(found[:tracks]):
            if min(found)[0] > small_goal:
                found[i] = tabu_search(table, orders, steps // tracks, random, small_goal, expired)
        found.sort(key=lambda entry: entry[0])
    if small.m == problem.m:
        return found
    found = _extend_all(problem, small.m, found[: _TRACKS[0]], starts[:4], lambda: elapsed() >= 0.85 * seconds)
    passes = int((1 - share) / 2 * seconds * _OPS_PER_SECOND / (3 * problem.num_stages * problem.m * _JUSTIFY_COST))
    if found[0][0] > goal and passes >= 4 and elapsed() < 0.8 * seconds:  # two of the passes prepare the justification
        found[0] = justify(
            NodeTable(problem), found[0][1], min(_PASSES[1], passes - 2), lambda: elapsed() >= 0.8 * seconds
        )
    return found


def _starts(problem: Problem, variants: int, goal: float, expired: Callable[[], bool]) -> tuple[list[_Found], int]:
    """Complete orders of different makespans to start from, best first; and the number of skeletons tried."""
    found: list[_Found] = []
    best, tried = math.inf, 0
    choices = recompute_choices(problem)
    for choice in choices:
        for skeleton in _skeletons(choice, max(4, variants // len(choices))):
            if best <= goal or (found and expired()):
                break
            tried += 1
            for overrun in _OVERRUNS:
                orders: Orders = [[] for _ in skeleton]
                makespan = place_weight_grads(choice, skeleton, overrun, best * _START_MARGIN, orders)
                if makespan < math.inf:
                    found.append((makespan, orders))
                    best = min(best, makespan)
    if not found:
        orders = sequential_orders(choices[0])
        found.append((evaluate(problem, orders), orders))
    found.sort(key=lambda entry: entry[0])
    distinct = [y for x, y in pairwise([(-math.inf, []), *found]) if y[0] > x[0] * (1 + TOLERANCE)]
    return distinct, tried


def _skeletons(problem: Problem, variants: int) -> Iterator[Orders]:
    """Warm-up variants of 1F1B, the fixed schedules and a list schedule, with their W as deadlines and without."""
    warmups = islice(warmup_variants(problem), variants)
    yield from islice(warmups, 2)
    for orders in fixed_orders(problem):
        yield orders
        yield without_weight_grads(problem, orders)
    yield from warmups
    makespan, orders = list_schedule(problem)
    if makespan < math.inf:
        yield orders
        yield without_weight_grads(problem, orders)


def _extend_all(
    problem: Problem, m: int, found: list[_Found], starts: list[_Found], expired: Callable[[], bool]
) -> list[_Found]:
    """Orders for ``m`` micro-batches extended to those of the problem, and list schedules for all of them."""
    extended: list[_Found] = []
    goal = (found[0][0] + (problem.m - m) * max(problem.work)) * (1 + TOLERANCE)
    for makespan, orders in [found[0], *starts, *found[1:]]:  # starts have kernels more often than improved orders
        for candidate, overrun in ((orders, None), *((without_weight_grads(problem, orders), o) for o in _OVERRUNS)):
            longer = extend(problem, candidate, m, overrun, makespan)
            if longer is not None:
                extended.append(longer)
            if extended and (expired() or extended[-1][0] <= goal):
                return sorted(extended, key=lambda entry: entry[0])
    for choice in recompute_choices(problem):
        if extended and expired():
            break
        makespan, orders = list_schedule(choice)
        if makespan < math.inf:
            extended.append((makespan, orders))
    if not extended:
        orders = first_order(problem)
        extended.append((evaluate(problem, orders), orders))
    return sorted(extended, key=lambda entry: entry[0])
