"""The search: seeds and policies, then tabu search, on few micro-batches; then as many as are wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from random import Random

from penstock.schedule.auto.drops import choices
from penstock.schedule.auto.fill import evaluate, fill
from penstock.schedule.auto.lists import Policy, list_schedule
from penstock.schedule.auto.periodic import in_turn, pack
from penstock.schedule.auto.pieces import Pieces
from penstock.schedule.auto.policies import draw, plain, vary
from penstock.schedule.auto.problem import SLACK, Problem, Words
from penstock.schedule.auto.repeat import few, repeat
from penstock.schedule.auto.seeds import one_at_a_time, skeletons, to_skeleton
from penstock.schedule.auto.squeeze import squeezed
from penstock.schedule.auto.tabu import improve

__all__ = ["first_order", "search"]

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


def first_order(problem: Problem) -> Words:
    """An order that fits, at once."""
    problem = choices(problem)[0]
    makespan, words = list_schedule(problem, plain(problem))
    return words if makespan < math.inf else one_at_a_time(problem)


def search(
    problem: Problem, goal: float, seconds: float, random: Random, spent: Callable[[], float]
) -> list[tuple[float, Words]]:
    """The best orders found, with their makespans, best first. ``goal`` is a makespan that ends the search."""
    small = problem.with_m(few(problem))
    share = 1.0
    if small.m < problem.m:  # carrying over to more micro-batches takes its time, and so do the fixed schedules then
        share, letters = 0.6, 3 * problem.num_stages * problem.m
        seconds = max(seconds / 2, seconds - _FIXED_COST * letters / _LETTERS_PER_SECOND)

    def expired() -> bool:
        return spent() >= share * seconds

    # A makespan of the small problem that would make one of the goal, as every rank would have to be busy.
    small_goal = (goal - (problem.m - small.m) * max(problem.work)) * (1 + SLACK)
    letters = 3 * small.num_stages * small.m
    budget = share * seconds * _LETTERS_PER_SECOND
    each = letters + _OVERHEAD
    pool = _Pool(small, random)
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
        pool.offer(pool.choices[0], one_at_a_time(pool.choices[0]))
    effort *= 1 - _FOR_PERIODS - _FOR_LISTS + left
    pieces = Pieces(small)
    orders = [start.order(small) for start in pool.pick(_SQUEEZED)]
    for turns, most in zip(_TURNS, (_SQUEEZED, _ROUNDS[0]), strict=True):
        for i, (_, words) in enumerate(orders[:most]):
            if min(orders)[0] > small_goal and not expired():
                orders[i] = squeezed(pieces, words, turns, expired)
                effort -= _TURN_COST * (turns + 1)
        orders.sort(key=lambda entry: entry[0])
    steps = int(max(0.0, effort) * each / (_STEP_COST * letters + _STEP_OVERHEAD) / len(_ROUNDS))
    for tracks in (max(1, min(most, steps // _STEPS)) for most in _ROUNDS):
        for i, (_, words) in enumerate(orders[:tracks]):
            if min(orders)[0] > small_goal:
                orders[i] = improve(pieces, words, steps // tracks, random, small_goal, expired)
        orders.sort(key=lambda entry: entry[0])
    if small.m == problem.m:
        return orders

    def late() -> bool:
        return spent() >= 0.8 * seconds

    found = _for_all(problem, small.m, orders[: _ROUNDS[0]], pool, lambda: spent() >= 0.85 * seconds)
    budget = (1 - share) * seconds * _LETTERS_PER_SECOND / 2
    turns = int(budget / (3 * problem.num_stages * problem.m * _TURN_COST))
    if found[0][0] > goal and turns >= _FEW_TURNS and not late():
        found[0] = squeezed(Pieces(problem), found[0][1], min(_TURNS[1], turns - _FEW_TURNS // 2), late)
    return found


@dataclass
class _Start:
    """A skeleton, how far a W may stand out of a gap, and the makespan that comes of them."""

    makespan: float
    skeleton: Words
    overrun: float

    def order(self, problem: Problem) -> tuple[float, Words]:
        words: Words = [[] for _ in self.skeleton]
        fill(problem, self.skeleton, self.overrun, filled=words)
        return evaluate(problem, words), words


class _Pool:
    """The starts met so far, and the policies that some of them come from."""

    def __init__(self, problem: Problem, random: Random) -> None:
        self.choices = choices(problem)
        self.random = random
        self.best = math.inf
        self.starts: list[_Start] = []
        self.policies: list[tuple[float, int, Policy, Problem]] = []

    def skeletons(self, families: int) -> Iterator[tuple[Problem, Words]]:
        """Of all choices in turn."""
        each = families // len(self.choices)
        for turn in zip_longest(*(skeletons(choice, each) for choice in self.choices)):
            yield from ((choice, words) for choice, words in zip(self.choices, turn, strict=True) if words is not None)

    def offer(self, problem: Problem, skeleton: Words, overruns: Sequence[float] = _OVERRUNS) -> float:
        makespans = []
        for overrun in overruns:
            makespan = fill(problem, skeleton, overrun, limit=self.best * _WORTH)
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
            policy = plain(problem)
        elif number % 2 and self.policies:
            _, _, good, problem = self.policies[int(self.random.random() ** 2 * len(self.policies))]
            policy = vary(problem, good, self.random)
        else:
            policy = draw(problem, self.random)
        makespan, words = list_schedule(problem, policy)
        if makespan < math.inf:
            makespan = min(self.offer(problem, words), self.offer(problem, to_skeleton(problem, words)))
            met = [*self.policies, (makespan, number, policy, problem)]
            self.policies = sorted(met, key=lambda entry: entry[:2])[:6]

    def try_period(self, number: int) -> None:
        """As many packed as drawn."""
        problem = self.choices[number // 2 % len(self.choices)]
        policy = pack(problem, self.random) if number % 2 else draw(problem, self.random)
        if policy is not None:
            self.offer(problem, in_turn(problem, policy), (policy.overrun,))

    def pick(self, count: int) -> list[_Start]:
        """The best starts, of different makespans."""
        picked: list[_Start] = []
        for start in sorted(self.starts, key=lambda start: start.makespan):
            if not picked or start.makespan > picked[-1].makespan * (1 + SLACK):
                picked.append(start)
            if len(picked) == count:
                break
        return picked


def _for_all(
    problem: Problem, m: int, orders: list[tuple[float, Words]], pool: _Pool, expired: Callable[[], bool]
) -> list[tuple[float, Words]]:
    """Orders for ``m`` micro-batches, and the best policies, carried over to all micro-batches of the problem."""
    found: list[tuple[float, Words]] = []
    hoped = (orders[0][0] + (problem.m - m) * max(problem.work)) * (1 + SLACK)
    plans: list[tuple[float, Words, float | None]] = []
    for makespan, words in orders:
        plans.append((makespan, words, None))
        plans.append((makespan, to_skeleton(problem, words), 0.0))
    plans[2:2] = [(start.makespan, start.skeleton, start.overrun) for start in pool.pick(4)]  # they repeat themselves
    for makespan, words, overrun in plans:
        longer = repeat(problem, words, m, overrun, makespan)
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
