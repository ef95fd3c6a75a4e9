"""The search: seeds, then policies, then annealing, on few micro-batches; then as many as are wanted."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from penstock.schedule.auto.anneal import Plan, anneal
from penstock.schedule.auto.fill import Record, fill
from penstock.schedule.auto.lists import Policy, list_schedule
from penstock.schedule.auto.policies import draw, plain, vary
from penstock.schedule.auto.problem import SLACK, Problem, Words
from penstock.schedule.auto.repeat import few, repeat
from penstock.schedule.auto.seeds import one_at_a_time, skeletons, to_skeleton
from penstock.schedule.auto.words import evaluate

__all__ = ["first_order", "search"]

_LETTERS_PER_SECOND = 3.2e6
_OVERHEAD = 300
"""What a core gets through, at least, and what an order costs besides its letters: so much searching is done."""

_FOR_POLICIES = 0.45
"""The part of the search that goes to policies; one costs as much as this many letters of an order:"""
_POLICY_COST = 9.0

_ROUNDS = (4, 2, 1)
"""So many different plans are annealed: in each round the better ones of the last, for longer."""

_WORTH = 1.1
"""A plan that takes so much longer than the best is dropped."""

_OVERRUNS = (0.0, 0.5)


def first_order(problem: Problem) -> Words:
    """An order that fits, at once."""
    makespan, words = list_schedule(problem, plain(problem))
    return words if makespan < math.inf else one_at_a_time(problem)


def search(
    problem: Problem, goal: float, seconds: float, random: Random, spent: Callable[[], float]
) -> list[tuple[float, Words]]:
    """The best orders found, with their makespans, best first. ``goal`` is a makespan that ends the search."""
    small = problem.with_m(few(problem))
    share = 1.0 if small.m == problem.m else 0.7  # carrying over to more micro-batches takes its time, too

    def expired() -> bool:
        return spent() >= share * seconds

    # A makespan of the small problem that would make one of the goal, as every rank would have to be busy.
    small_goal = (goal - (problem.m - small.m) * max(problem.work)) * (1 + SLACK)
    letters = 3 * small.num_stages * small.m
    effort = share * seconds * _LETTERS_PER_SECOND / (letters + _OVERHEAD)
    pool = _Pool(small, random)
    for number, skeleton in enumerate(skeletons(small, families=int(effort / 60))):
        if pool.best <= small_goal or (number >= 2 and expired()):
            break
        pool.offer(skeleton)
    for number in range(1 + int(_FOR_POLICIES * effort / _POLICY_COST)):
        if pool.best <= small_goal or (number >= 1 and expired()):
            break
        pool.try_policy(number)
    if not pool.plans:
        pool.offer(one_at_a_time(small))
    plans = pool.pick(_ROUNDS[0])
    for tracks in _ROUNDS:
        steps = int((1 - _FOR_POLICIES) * effort / len(_ROUNDS) / tracks)
        for i, plan in enumerate(plans[:tracks]):
            if min(plan.makespan for plan in plans) > small_goal:
                plans[i] = anneal(small, plan, steps, random, small_goal, expired)
        plans.sort(key=lambda plan: plan.makespan)
    if small.m < problem.m:
        return _for_all(problem, small.m, plans, pool, lambda: spent() >= seconds)
    return [_order(problem, plan) for plan in plans]


class _Pool:
    """The plans met so far, and the policies that some of them come from."""

    def __init__(self, problem: Problem, random: Random) -> None:
        self.problem = problem
        self.random = random
        self.best = math.inf
        self.plans: list[Plan] = []
        self.policies: list[tuple[float, int, Policy]] = []

    def offer(self, skeleton: Words) -> float:
        makespans = []
        for part in _OVERRUNS:
            overrun = [part] * self.problem.num_ranks
            makespan = fill(self.problem, skeleton, overrun, limit=self.best * _WORTH)
            if makespan < math.inf:
                self.plans.append(Plan(makespan, skeleton, overrun))
            makespans.append(makespan)
        self.best = min(self.best, *makespans)
        return min(makespans)

    def try_policy(self, number: int) -> None:
        """The plain policy first, then as many drawn as varied."""
        if number == 0:
            policy = plain(self.problem)
        elif number % 2 and self.policies:
            _, _, good = self.policies[int(self.random.random() ** 2 * len(self.policies))]
            policy = vary(self.problem, good, self.random)
        else:
            policy = draw(self.problem, self.random)
        makespan, words = list_schedule(self.problem, policy)
        if makespan < math.inf:
            makespan = min(self.offer(words), self.offer(to_skeleton(self.problem, words)))
            self.policies = sorted([*self.policies, (makespan, number, policy)], key=lambda entry: entry[:2])[:6]

    def pick(self, count: int) -> list[Plan]:
        """The best plans, of different makespans."""
        picked: list[Plan] = []
        for plan in sorted(self.plans, key=lambda plan: plan.makespan):
            if not picked or plan.makespan > picked[-1].makespan * (1 + SLACK):
                picked.append(plan)
            if len(picked) == count:
                break
        return picked


def _order(problem: Problem, plan: Plan) -> tuple[float, Words]:
    record = Record(problem.num_ranks, every=sum(map(len, plan.skeleton)) + 1)
    return fill(problem, plan.skeleton, plan.overrun, record=record), record.words


def _for_all(
    problem: Problem, m: int, plans: list[Plan], pool: _Pool, expired: Callable[[], bool]
) -> list[tuple[float, Words]]:
    """Plans for ``m`` micro-batches, and the best policies, carried over to all micro-batches of the problem."""
    found: list[tuple[float, Words]] = []
    hoped = plans[0].makespan + (problem.m - m) * max(problem.work)
    for plan in [*plans, *pool.pick(4)]:
        longer = repeat(problem, plan, m)
        if longer is not None:
            found.append(_order(problem, longer))
        if found and (expired() or (longer and longer.makespan <= hoped * (1 + SLACK))):
            break
    for _, _, policy in pool.policies[:1]:
        if not found or (not expired() and min(found)[0] > hoped * (1 + SLACK)):
            makespan, words = list_schedule(problem, policy)
            if makespan < math.inf:
                found.append((makespan, words))
    if not found:
        words = first_order(problem)
        found.append((evaluate(problem, words), words))
    return sorted(found, key=lambda entry: entry[0])
