"""An order made to measure: for the costs of each stage, any placement, and what each rank may keep."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from random import Random

from penstock.errors import ScheduleError
from penstock.schedule.auto.drops import choices
from penstock.schedule.auto.fill import fill
from penstock.schedule.auto.floor import lower_bound
from penstock.schedule.auto.found import Found, simulated
from penstock.schedule.auto.problem import SLACK, Problem, Words, make_problem
from penstock.schedule.auto.search import search
from penstock.schedule.auto.seeds import fixed_words
from penstock.schedule.costs import Costs
from penstock.schedule.flow import Edge

__all__ = ["Found", "auto"]


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
) -> Found:
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
    goal = floor * (1 + SLACK)

    def spent() -> float:
        return 0.0 if repeatable else time.thread_time() - begin

    orders = search(problem.with_room(), goal, seconds, Random(seed), spent)
    if problem.with_room() is not problem:
        orders = [(makespan, _whole(problem, words)) for makespan, words in orders]
    if orders[0][0] > goal or problem.contended:
        limit = math.inf if problem.contended else orders[0][0]
        as_fused = problem.as_fused()  # what fixed schedules with whole backwards keep
        known = [words for choice in choices(as_fused) for words in fixed_words(choice)]
        if as_fused is not problem:
            known += [_whole(problem, words) for words in known]
            known += [words for choice in choices(as_fused) for words in fixed_words(choice, as_made=True)]
        timed = ((fill(as_fused, words, None, limit), words) for words in known)
        orders += [(time, words) for time, words in timed if time < math.inf and _fits(problem, words, costs, edges)]
        orders.sort(key=lambda entry: entry[0])
    if not problem.contended:
        del orders[1:]
    best = min((simulated(problem, words, costs, edges) for _, words in orders), key=lambda found: found.makespan)
    return Found(best.schedule, best.makespan, min(floor, best.makespan), best.peak_memory, problem.cap)


def _whole(problem: Problem, words: Words) -> Words:
    """The words with whole backwards."""
    count = problem.num_stages
    return [[letter + count * (letter // count == 1) for letter in word if letter // count != 3] for word in words]


def _fits(problem: Problem, words: Words, costs: Costs, edges: Sequence[Edge]) -> bool:
    """Whether an order that would fit with whole backwards keeps the cap as it is."""
    if min(problem.before) == 1:
        return True
    peaks = simulated(problem, words, costs, edges).peak_memory
    return all(peak <= cap * (1 + SLACK) for peak, cap in zip(peaks, problem.cap, strict=True))
