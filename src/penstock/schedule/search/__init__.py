"""Automatic schedules: a search for a short order, given the costs of each stage, any placement, and a memory cap.

The search starts from the fixed schedules and from list schedules, improves the best of them by justification and tabu
search on few micro-batches, and extends the result to all micro-batches.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from penstock.errors import ScheduleError
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Edge, Schedule
from penstock.schedule.search.justify import justify
from penstock.schedule.search.lower_bound import lower_bound, recompute_choices
from penstock.schedule.search.orders import (
    fixed_orders,
    fuse_all,
    simulate_orders,
    warmup_variants,
    without_weight_grads,
)
from penstock.schedule.search.place_weight_grads import list_schedule, place_weight_grads
from penstock.schedule.search.problem import TOLERANCE, B, C, F, I, Orders, Problem, R, W, make_problem
from penstock.schedule.search.tabu import NodeTable, tabu_search

__all__ = ["SearchResult", "auto"]

# The search does a fixed amount of work, counted in ops: the unit is the evaluation of one op of an order.
_OPS_PER_SECOND = 3.2e6  # lower limit for one core
_JUSTIFY_COST = 6.0  # ops of a justification pass, per op of the order
_STEP_OVERHEAD = 150  # ops of a step of tabu search, in addition to those of its order
_SEARCH_SHARE = 0.6  # share of the time for the search with few micro-batches, if its result is extended to more
_TABU_SHARE = 0.6  # share of that time for tabu search
_SMALL = 1024  # largest number of (stage, micro-batch) pairs that is searched without extension

_STARTS = 12  # initial orders that are justified
_START_MARGIN = 1.05  # largest makespan of an initial order, relative to the best
_OVERRUNS = (0.0, 0.5)  # values of ``overrun`` for placing W into an initial order
_PASSES = (2, 8)  # justification passes of all initial orders, then of the best ones
_TRACKS = (4, 2, 1)  # number of orders that each round of tabu search improves
_MIN_STEPS = 150  # least number of steps of tabu search per order

_TimedOrders = tuple[float, Orders]
"""A makespan and its orders."""


@dataclass(frozen=True)
class SearchResult:
    """A schedule, its makespan, and a lower bound: no order under the cap takes less time."""

    schedule: Schedule
    makespan: float
    lower_bound: float
    peak_memory: tuple[float, ...]  # by rank, in the unit of ``Costs.activation``
    cap: tuple[float, ...]  # by rank: the memory that it may use

    @property
    def gap(self) -> float:
        """How far the makespan is above the lower bound, as a fraction of the bound."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else 0.0

    def __str__(self) -> str:
        rank = max(range(len(self.peak_memory)), key=lambda r: self.peak_memory[r])
        certain = f"at most {self.gap:.1%} slower than the best order" if self.gap > TOLERANCE else "no order is faster"
        return (
            f"makespan {self.makespan:.4g}, lower bound {self.lower_bound:.4g}: {certain}\n"
            f"peak memory {self.peak_memory[rank]:.4g} on rank {rank}, with a cap of {self.cap[rank]:.4g}"
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

    ``cap`` is the activation memory of each rank, one number for all or one per rank, in the unit of
    ``costs.activation``; infinity is no limit. The default, for all ranks, is the largest peak of a rank with 1F1B: the
    r-th of p ranks, counted by their first stages, holds p - r micro-batches (at most m) in all its stages. If no order
    fits the cap, ``auto`` raises ``ScheduleError``.

    ``recompute`` selects the stages whose forwards keep only ``costs.checkpoint`` and run again before their backward:
    none, all (True), or the given stages. With None, the search chooses per stage and micro-batch, and recomputes where
    that saves time under the cap. The search places recomputes like other actions, where time and memory allow.

    The result fits the cap. It is never slower than a fixed schedule that fits the cap, with the same placement and
    recomputes. Its times and memory are those of ``simulate``.

    The amount of search depends on the size of the problem and on ``seconds`` of CPU time. The same arguments give the
    same result, unless a slow core exceeds this time. The fixed schedules are always compared. With ``repeatable`` the
    time has no limit, so that all ranks get the same result.
    """
    if not 0 <= seconds < math.inf:
        raise ScheduleError(f"seconds={seconds}: expected a search time of at least 0")
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


def _fixed(problem: Problem, costs: Costs, edges: Sequence[Edge], limit: float) -> list[_TimedOrders]:
    """The fixed schedules that fit the cap, with split and with full backwards, and their makespans up to ``limit``."""
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
        if makespan < math.inf and full is not problem:  # it fits with full backwards, perhaps not with split ones
            peaks = simulate_orders(problem, orders, costs, edges).peak_memory
            if any(peak > cap * (1 + TOLERANCE) for peak, cap in zip(peaks, problem.cap, strict=True)):
                continue
        if makespan < math.inf:
            found.append((makespan, orders))
    return found


def _search(
    problem: Problem, goal: float, seconds: float, random: Random, elapsed: Callable[[], float]
) -> list[_TimedOrders]:
    """Search the best orders, best first. The search ends at a makespan of ``goal``."""
    # A small problem is searched with all its micro-batches, a larger one with enough for warm-up, drain and some
    # periods of the steady state. The difference is a multiple of p, so any kernel whose length divides p can fill it.
    enough = 3 * problem.num_ranks + problem.m % problem.num_ranks
    small = problem if problem.num_stages * problem.m <= _SMALL else replace(problem, m=min(problem.m, enough))
    share = 1.0 if small.m == problem.m else _SEARCH_SHARE

    def expired() -> bool:
        return elapsed() >= share * seconds

    # The makespan of the small problem that extends to the goal, if each added micro-batch adds its work.
    small_goal = (goal - (problem.m - small.m) * max(problem.work)) * (1 + TOLERANCE)
    starts = _starts(small, small_goal, expired)
    table = NodeTable(small)
    found = starts[:_STARTS]
    for passes, count in zip(_PASSES, (_STARTS, _TRACKS[0]), strict=True):
        for i, (_, orders) in enumerate(found[:count]):
            if min(found)[0] > small_goal and not expired():
                found[i] = justify(table, orders, passes, expired)
        found.sort(key=lambda entry: entry[0])
    ops = 3 * small.num_stages * small.m
    steps = int(_TABU_SHARE * share * seconds * _OPS_PER_SECOND / (ops + _STEP_OVERHEAD) / len(_TRACKS))
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


def _starts(problem: Problem, goal: float, expired: Callable[[], bool]) -> list[_TimedOrders]:
    """Initial orders of different makespans, best first.

    They are the fixed schedules, a list schedule and warm-up variants of 1F1B, with their W as deadlines and without.
    """
    found: list[_TimedOrders] = []
    best = math.inf
    choices = recompute_choices(problem)
    for choice in choices:
        for orders in (*fixed_orders(choice), *warmup_variants(choice), list_schedule(choice)[1]):
            for skeleton in (orders, without_weight_grads(problem, orders)):
                if best <= goal or (found and expired()):
                    break
                for overrun in _OVERRUNS:
                    filled: Orders = [[] for _ in skeleton]
                    makespan = place_weight_grads(choice, skeleton, overrun, best * _START_MARGIN, filled)
                    if makespan < math.inf:
                        found.append((makespan, filled))
                        best = min(best, makespan)
    if not found:
        found.append(list_schedule(choices[0]))
    found.sort(key=lambda entry: entry[0])
    return [y for x, y in pairwise([(-math.inf, []), *found]) if y[0] > x[0] * (1 + TOLERANCE)]


def _extend_all(
    problem: Problem, m: int, found: list[_TimedOrders], starts: list[_TimedOrders], expired: Callable[[], bool]
) -> list[_TimedOrders]:
    """Extend orders for ``m`` micro-batches to those of the problem; or list-schedule all of them."""
    extended: list[_TimedOrders] = []
    goal = (found[0][0] + (problem.m - m) * max(problem.work)) * (1 + TOLERANCE)
    for makespan, orders in [found[0], *starts, *found[1:]]:  # initial orders have kernels more often
        for candidate, overrun in ((orders, None), *((without_weight_grads(problem, orders), o) for o in _OVERRUNS)):
            longer = extend(problem, candidate, m, overrun, makespan)
            if longer is not None:
                extended.append(longer)
            if extended and (expired() or extended[-1][0] <= goal):
                return sorted(extended, key=lambda entry: entry[0])
    for choice in recompute_choices(problem):
        if extended and expired():
            break
        extended.append(list_schedule(choice))
    return sorted(extended, key=lambda entry: entry[0])


# F F F I F I F I F I I I              for 6 micro-batches
# F F F I F I F I F I F I F I I I      for 8: the kernel "I F", with one F and one I, twice more


def extend(problem: Problem, orders: Orders, m: int, overrun: float | None, makespan: float) -> _TimedOrders | None:
    """Extend orders for ``m`` micro-batches to those of ``problem``, and place W. None if there is no kernel.

    ``overrun`` is the argument of ``place_weight_grads``; ``makespan`` is that of the given orders. Kernels of lengths
    that divide p, near several positions, are evaluated for p more micro-batches. The result has the kernel that adds
    the least time, or the first one that adds no more than the work of the busiest rank.
    """
    ranks = problem.num_ranks
    trial = replace(problem, m=m + ranks)
    goal = (makespan + ranks * max(problem.work)) * (1 + TOLERANCE)
    tried: list[tuple[float, int, list[tuple[int, int]]]] = []
    for length in (q for q in range(1, ranks + 1) if ranks % q == 0):
        kernels = [_kernels(problem, rank, order, length, overrun is None) for rank, order in enumerate(orders)]
        if not all(kernels):
            continue
        for middle in (m // 2, m // 3, 3 * m // 5):
            nearest = [min(each, key=lambda entry: abs(entry[0] - middle))[1] for each in kernels]
            repeated = _repeat(orders, nearest, ranks // length)
            tried.append((place_weight_grads(trial, repeated, overrun), length, nearest))
            if tried[-1][0] <= goal:
                break
        if tried[-1][0] <= goal:
            break
    for added, length, nearest in sorted(tried)[:2]:
        if added < math.inf:
            repeated = _repeat(orders, nearest, (problem.m - m) // length)
            filled: Orders = [[] for _ in orders]
            extended = place_weight_grads(problem, repeated, overrun, filled=filled)
            if extended < math.inf:
                return extended, filled
    return None


def _kernels(
    problem: Problem, rank: int, order: list[int], length: int, with_w: bool
) -> list[tuple[int, tuple[int, int]]]:
    """Slices of a rank's order that begin with a forward of its first stage, and have ``length`` of each F and
    backward, and of each W if ``with_w``: (first micro-batch, (begin, end)).
    """
    count, stages = problem.num_stages, problem.stages_of[rank]
    starts = [at for at, op in enumerate(order) if op in (F * count + stages[0], C * count + stages[0])]
    kernels = []
    for k, (begin, end) in enumerate(zip(starts, starts[length:], strict=False)):
        ops = Counter(order[begin:end])
        num = [[ops[kind * count + s] for kind in range(6)] for s in stages]
        complete = all(n[F] + n[C] == n[I] + n[B] == length and n[R] == n[C] for n in num)
        if complete and not (with_w and any(n[I] != n[W] for n in num)):
            kernels.append((k, (begin, end)))
    return kernels


def _repeat(orders: Orders, kernels: list[tuple[int, int]], times: int) -> Orders:
    """Repeat the kernel of each rank ``times`` more."""
    return [
        order[:end] + order[begin:end] * times + order[end:]
        for order, (begin, end) in zip(orders, kernels, strict=True)
    ]
