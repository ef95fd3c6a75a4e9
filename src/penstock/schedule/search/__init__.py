"""An order made to measure: for the costs of each stage, any placement, and what each rank may keep."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from random import Random

from penstock.errors import ScheduleError
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Action, Edge, Schedule
from penstock.schedule.search.extend import extend, searched_microbatches
from penstock.schedule.search.justify import justify
from penstock.schedule.search.list_scheduler import (
    Policy,
    default_policy,
    list_schedule,
    perturbed_policy,
    random_policy,
)
from penstock.schedule.search.lower_bound import lower_bound
from penstock.schedule.search.op_graph import OpTable
from penstock.schedule.search.orders import fixed_orders, sequential_orders, start_orders, without_weight_grads
from penstock.schedule.search.periodic import in_turn, pack
from penstock.schedule.search.place_weight_grads import evaluate, place_weight_grads
from penstock.schedule.search.problem import TOLERANCE, Orders, Problem, make_problem
from penstock.schedule.search.recompute_choice import recompute_choices
from penstock.schedule.search.tabu import tabu_search
from penstock.schedule.simulate import Simulation, simulate

__all__ = ["SearchResult", "auto", "first_order", "search", "simulate_orders"]


# The answer: a schedule with its certificate.


@dataclass(frozen=True)
class SearchResult:
    """A schedule, how long it takes, and how good that is: no order under the cap takes less than ``floor``."""

    schedule: Schedule
    makespan: float
    floor: float
    peak: tuple[float, ...]
    """What each rank keeps at its peak, in the unit of ``Costs.activation``."""
    cap: tuple[float, ...]
    """What each rank may keep."""

    @property
    def gap(self) -> float:
        """How far above the floor the makespan is, as a fraction of the floor; the best order is not further below."""
        return self.makespan / self.floor - 1 if self.floor else 0.0

    def __str__(self) -> str:
        rank = max(range(len(self.peak)), key=lambda r: self.peak[r])
        return (
            f"makespan {self.makespan:.4g}, floor {self.floor:.4g}: "
            + ("no order is faster" if self.gap <= TOLERANCE else f"at most {self.gap:.1%} slower than the best order")
            + f"\npeak memory {self.peak[rank]:.4g} on rank {rank}, of {self.cap[rank]:.4g} that it may keep"
        )


def simulate_orders(problem: Problem, words: Orders, costs: Costs, edges: Sequence[Edge]) -> Simulation:
    """The words as a schedule, run on paper. I and W that stand together are a B where that delays nothing."""
    schedule = _decode(problem, words)
    split = simulate(schedule, costs, edges)
    fused = simulate(_fuse_backwards(problem, split), costs, edges)
    return fused if fused.makespan <= split.makespan * (1 + 1e-12) else split


def _decode(problem: Problem, words: Orders) -> Schedule:
    """Letters with their micro-batches."""
    count = problem.num_stages
    forwards, backwards = [0] * count, [0] * count
    deferred: list[deque[int]] = [deque() for _ in range(count)]
    dropped: list[deque[int]] = [deque() for _ in range(count)]
    orders = []
    for word in words:
        order = []
        for letter in word:
            kind, stage = divmod(letter, count)
            if kind in (0, 5):
                k = forwards[stage]
                forwards[stage] += 1
                if kind == 5:
                    dropped[stage].append(k)
            elif kind == 3:
                k = deferred[stage].popleft()
            elif kind == 4:
                k = dropped[stage].popleft()
            else:
                k = backwards[stage]
                backwards[stage] += 1
                if kind == 1:
                    deferred[stage].append(k)
            order.append(Action(stage, "FIBWRF"[kind], k))
        orders.append(order)
    return Schedule.of("auto", problem.placement, orders, problem.m)


def _fuse_backwards(problem: Problem, simulation: Simulation) -> Schedule:
    """One B for an I and the W right after it, where nobody starts before the later gradient arrives."""
    schedule = simulation.schedule
    count, times = problem.num_stages, problem.durations
    starts = {
        (a.stage, a.microbatch): start
        for order, begins in zip(schedule.orders, simulation.starts, strict=True)
        for a, start in zip(order, begins, strict=True)
        if a.kind in "IB"
    }
    sends: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    for src, dst, seconds in problem.arcs:
        sends[dst].append((src, seconds))
    orders = []
    for order, begins in zip(schedule.orders, simulation.starts, strict=True):
        out: list[Action] = []
        at = 0
        while at < len(order):
            action = order[at]
            stage, kind, k = action
            together = kind == "I" and at + 1 < len(order) and order[at + 1] == (stage, "W", k)
            if together and times[2 * count + stage] <= times[count + stage] + times[3 * count + stage]:
                end = begins[at] + times[2 * count + stage]
                if all(starts[src, k] >= (end + time) * (1 - 1e-15) for src, time in sends[stage]):
                    action = Action(stage, "B", k)
                    at += 1
            out.append(action)
            at += 1
        orders.append(tuple(out))
    return replace(schedule, orders=tuple(orders))


# The search: seeds and policies, then tabu search, on few micro-batches; then as many as are wanted.

_LETTERS_PER_SECOND = 3.2e6
_OVERHEAD = 300
"""What a core gets through, at least, and what an order costs besides its letters: so much searching is done."""

_FOR_PERIODS, _FOR_LISTS = 0.05, 0.2
"""The parts of the search that go to finding where to start."""

_VAIN = (8, 0.7)
"""So many tries that bring nothing better end them: a number at least, and a part of all."""

_PERIOD_COST, _LIST_COST = 0.6, 9.0
"""What a period costs, which mostly turns out bad soon, and a list schedule, in letters of an order for each letter."""

_SEED_COST = 4.0
"""What it costs to make an order that is known, or like one, and to fill it, in letters for each letter."""

_TURN_COST = 6.0
"""What it costs to squeeze an order one way, in letters for each letter."""

_TURNS = (2, 8)
"""So often the starts are squeezed, and then the best of them, unless nothing better has come twice."""

_FIXED_COST = 65.0
"""What it costs to compare an order with the fixed schedules, in letters for each letter."""

_FEW_TURNS = 4
"""An order for all micro-batches is squeezed, too, if there is time for so many turns: half of them to prepare it."""

_SQUEEZED = 12
"""So many starts are squeezed."""

_STEP_COST, _STEP_OVERHEAD = 1.05, 150
"""What a step of tabu search costs for each letter, and besides, in letters of an order."""

_ROUNDS = (4, 2, 1)
"""So many different orders are improved at the most: in each round the better ones of the last, for longer."""

_STEPS = 150
"""So many steps an order is improved at least: where they are few in all, so are the orders."""

_WORTH = 1.05
"""A start that takes so much longer than the best is dropped."""

_OVERRUNS = (0.0, 0.5)


def first_order(problem: Problem) -> Orders:
    """An order that fits, at once."""
    problem = recompute_choices(problem)[0]
    makespan, words = list_schedule(problem, default_policy(problem))
    return words if makespan < math.inf else sequential_orders(problem)


def search(
    problem: Problem, goal: float, seconds: float, random: Random, spent: Callable[[], float]
) -> list[tuple[float, Orders]]:
    """The best orders found, with their makespans, best first. ``goal`` is a makespan that ends the search."""
    small = problem.with_m(searched_microbatches(problem))
    share = 1.0
    if small.m < problem.m:  # carrying over to more micro-batches takes its time, and so do the fixed schedules then
        share, letters = 0.6, 3 * problem.num_stages * problem.m
        seconds = max(seconds / 2, seconds - _FIXED_COST * letters / _LETTERS_PER_SECOND)

    def expired() -> bool:
        return spent() >= share * seconds

    # A makespan of the small problem that would make one of the goal, as every rank would have to be busy.
    small_goal = (goal - (problem.m - small.m) * max(problem.work)) * (1 + TOLERANCE)
    letters = 3 * small.num_stages * small.m
    budget = share * seconds * _LETTERS_PER_SECOND
    each = letters + _OVERHEAD
    pool = _StartPool(small, random)
    for number, (choice, skeleton) in enumerate(pool.skeletons(families=int(budget / each / 60))):
        if pool.best <= small_goal or (number >= 2 and expired()):
            break
        pool.offer(choice, skeleton)
        budget -= _SEED_COST * each
    effort = max(0.0, budget) / each
    lists, periods = 1 + int(_FOR_LISTS * effort / _LIST_COST), int(_FOR_PERIODS * effort / _PERIOD_COST)
    left = _FOR_LISTS * pool.search(pool.try_policy, lists, small_goal, expired)
    left += _FOR_PERIODS * pool.search(pool.try_period, periods, small_goal, expired)
    if not pool.starts:
        pool.offer(pool.choices[0], sequential_orders(pool.choices[0]))
    effort *= 1 - _FOR_PERIODS - _FOR_LISTS + left
    pieces = OpTable(small)
    orders = [start.order(small) for start in pool.pick(_SQUEEZED)]
    for turns, most in zip(_TURNS, (_SQUEEZED, _ROUNDS[0]), strict=True):
        for i, (_, words) in enumerate(orders[:most]):
            if min(orders)[0] > small_goal and not expired():
                orders[i] = justify(pieces, words, turns, expired)
                effort -= _TURN_COST * (turns + 1)
        orders.sort(key=lambda entry: entry[0])
    steps = int(max(0.0, effort) * each / (_STEP_COST * letters + _STEP_OVERHEAD) / len(_ROUNDS))
    for tracks in (max(1, min(most, steps // _STEPS)) for most in _ROUNDS):
        for i, (_, words) in enumerate(orders[:tracks]):
            if min(orders)[0] > small_goal:
                orders[i] = tabu_search(pieces, words, steps // tracks, random, small_goal, expired)
        orders.sort(key=lambda entry: entry[0])
    if small.m == problem.m:
        return orders

    def late() -> bool:
        return spent() >= 0.8 * seconds

    found = _extend_to_all(problem, small.m, orders[: _ROUNDS[0]], pool, lambda: spent() >= 0.85 * seconds)
    budget = (1 - share) * seconds * _LETTERS_PER_SECOND / 2
    turns = int(budget / (3 * problem.num_stages * problem.m * _TURN_COST))
    if found[0][0] > goal and turns >= _FEW_TURNS and not late():
        found[0] = justify(OpTable(problem), found[0][1], min(_TURNS[1], turns - _FEW_TURNS // 2), late)
    return found


@dataclass
class _Start:
    """A skeleton, how far a W may stand out of a gap, and the makespan that comes of them."""

    makespan: float
    skeleton: Orders
    overrun: float

    def order(self, problem: Problem) -> tuple[float, Orders]:
        words: Orders = [[] for _ in self.skeleton]
        place_weight_grads(problem, self.skeleton, self.overrun, filled=words)
        return evaluate(problem, words), words


class _StartPool:
    """The starts met so far, and the policies that some of them come from."""

    def __init__(self, problem: Problem, random: Random) -> None:
        self.choices = recompute_choices(problem)
        self.random = random
        self.best = math.inf
        self.starts: list[_Start] = []
        self.policies: list[tuple[float, int, Policy, Problem]] = []

    def skeletons(self, families: int) -> Iterator[tuple[Problem, Orders]]:
        """Of all choices in turn."""
        each = families // len(self.choices)
        for turn in zip_longest(*(start_orders(choice, each) for choice in self.choices)):
            yield from ((choice, words) for choice, words in zip(self.choices, turn, strict=True) if words is not None)

    def offer(self, problem: Problem, skeleton: Orders, overruns: Sequence[float] = _OVERRUNS) -> float:
        makespans = []
        for overrun in overruns:
            makespan = place_weight_grads(problem, skeleton, overrun, limit=self.best * _WORTH)
            if makespan < math.inf:
                self.starts.append(_Start(makespan, skeleton, overrun))
            makespans.append(makespan)
        self.best = min(self.best, *makespans)
        return min(makespans)

    def search(self, try_: Callable[[int], None], count: int, goal: float, expired: Callable[[], bool]) -> float:
        """Try so often, or until nothing better has come for a while; and the part that was not needed."""
        number = since = 0
        while number < count and since < max(_VAIN[0], _VAIN[1] * count):
            if self.best <= goal or (self.starts and expired()):
                break
            before = self.best
            try_(number)
            number, since = number + 1, since + 1 if self.best >= before else 0
        return 1 - number / count if count else 0.0

    def try_policy(self, number: int) -> None:
        """The plain policy first, then as many drawn as varied."""
        problem = self.choices[number // 2 % len(self.choices)]
        if number == 0:
            policy = default_policy(problem)
        elif number % 2 and self.policies:
            _, _, good, problem = self.policies[int(self.random.random() ** 2 * len(self.policies))]
            policy = perturbed_policy(problem, good, self.random)
        else:
            policy = random_policy(problem, self.random)
        makespan, words = list_schedule(problem, policy)
        if makespan < math.inf:
            makespan = min(self.offer(problem, words), self.offer(problem, without_weight_grads(problem, words)))
            met = [*self.policies, (makespan, number, policy, problem)]
            self.policies = sorted(met, key=lambda entry: entry[:2])[:6]

    def try_period(self, number: int) -> None:
        """As many packed as drawn."""
        problem = self.choices[number // 2 % len(self.choices)]
        policy = pack(problem, self.random) if number % 2 else random_policy(problem, self.random)
        if policy is not None:
            self.offer(problem, in_turn(problem, policy), (policy.overrun,))

    def pick(self, count: int) -> list[_Start]:
        """The best starts, of different makespans."""
        picked: list[_Start] = []
        for start in sorted(self.starts, key=lambda start: start.makespan):
            if not picked or start.makespan > picked[-1].makespan * (1 + TOLERANCE):
                picked.append(start)
            if len(picked) == count:
                break
        return picked


def _extend_to_all(
    problem: Problem, m: int, orders: list[tuple[float, Orders]], pool: _StartPool, expired: Callable[[], bool]
) -> list[tuple[float, Orders]]:
    """Orders for ``m`` micro-batches, and the best policies, carried over to all micro-batches of the problem."""
    found: list[tuple[float, Orders]] = []
    hoped = (orders[0][0] + (problem.m - m) * max(problem.work)) * (1 + TOLERANCE)
    plans: list[tuple[float, Orders, float | None]] = []
    for makespan, words in orders:
        plans.append((makespan, words, None))
        plans.append((makespan, without_weight_grads(problem, words), 0.0))
    plans[2:2] = [(start.makespan, start.skeleton, start.overrun) for start in pool.pick(4)]  # they repeat themselves
    for makespan, words, overrun in plans:
        longer = extend(problem, words, m, overrun, makespan)
        if longer is not None:
            found.append(longer)
        if found and (expired() or found[-1][0] <= hoped):
            break
    for _, _, policy, choice in pool.policies[:1]:
        if not found or (not expired() and min(found)[0] > hoped):
            makespan, words = list_schedule(choice.with_m(problem.m), policy)
            if makespan < math.inf:
                found.append((makespan, words))
    if not found:
        words = first_order(problem)
        found.append((evaluate(problem, words), words))
    return sorted(found, key=lambda entry: entry[0])


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
    """A short order for ``m`` micro-batches with stage ``s`` on rank ``placement[s]``, and how good it is.

    ``cap`` is what a rank may keep, one number for all or one for each, in the unit of ``costs.activation``; infinity
    is no limit. By default it is, for all ranks, what 1F1B's fullest rank keeps: the r-th of p ranks, counted by their
    first stages, holds p - r micro-batches (at most m) of all that its stages keep. A cap under which there is no order
    at all is a ``ScheduleError``.

    ``recompute`` says whose forwards drop what they made, of which ``costs.checkpoint`` stays, and run again before
    their backward: those of no stage, of all (True), or of these stages. None leaves the choice to the search, for each
    micro-batch of each stage: it recomputes where that lets it keep the cap in less time. A recompute is work like any
    other, done whenever there is time and room for what it brings back.

    The answer keeps the cap and is never slower than a fixed schedule on the same placement, with the same recomputes,
    that keeps it too. Its figures are those of ``simulate``.

    How much is searched depends on the size of the problem and on ``seconds``, a core's time for the search; the same
    arguments give the same answer, unless the core is so slow that the search is cut off when that time is up. The
    fixed schedules are looked at even then. ``repeatable`` never cuts it off: for ranks that must have the same.
    """
    if not 0 <= seconds < math.inf:
        raise ScheduleError(f"seconds={seconds}: expected how long to search, from 0")
    begin = time.thread_time()
    problem, edges = make_problem(costs, placement, m, cap, edges, recompute)
    floor = lower_bound(problem)
    goal = floor * (1 + TOLERANCE)

    def spent() -> float:
        return 0.0 if repeatable else time.thread_time() - begin

    orders = search(problem.relaxed_to_fit(), goal, seconds, Random(seed), spent)
    if problem.relaxed_to_fit() is not problem:
        orders = [(makespan, _with_full_backwards(problem, words)) for makespan, words in orders]
    if orders[0][0] > goal or problem.contended:
        limit = math.inf if problem.contended else orders[0][0]
        with_full_backwards = problem.with_full_backwards()  # what fixed schedules with whole backwards keep
        known = [words for choice in recompute_choices(with_full_backwards) for words in fixed_orders(choice)]
        if with_full_backwards is not problem:
            known += [_with_full_backwards(problem, words) for words in known]
            known += [
                words
                for choice in recompute_choices(with_full_backwards)
                for words in fixed_orders(choice, as_made=True)
            ]
        timed = ((place_weight_grads(with_full_backwards, words, None, limit), words) for words in known)
        orders += [
            (time, words) for time, words in timed if time < math.inf and _keeps_cap(problem, words, costs, edges)
        ]
        orders.sort(key=lambda entry: entry[0])
    if not problem.contended:
        del orders[1:]
    best = min((simulate_orders(problem, words, costs, edges) for _, words in orders), key=lambda found: found.makespan)
    return SearchResult(best.schedule, best.makespan, min(floor, best.makespan), best.peak_memory, problem.cap)


def _with_full_backwards(problem: Problem, words: Orders) -> Orders:
    """The words with whole backwards."""
    count = problem.num_stages
    return [[letter + count * (letter // count == 1) for letter in word if letter // count != 3] for word in words]


def _keeps_cap(problem: Problem, words: Orders, costs: Costs, edges: Sequence[Edge]) -> bool:
    """Whether an order that would fit with whole backwards keeps the cap as it is."""
    if min(problem.before) == 1:
        return True
    peaks = simulate_orders(problem, words, costs, edges).peak_memory
    return all(peak <= cap * (1 + TOLERANCE) for peak, cap in zip(peaks, problem.cap, strict=True))
