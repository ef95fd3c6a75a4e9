"""Which forwards drop what they made: for orders that know no recomputes, and where it may be chosen."""

from __future__ import annotations

from penstock.schedule.search.lower_bound import by_recompute_benefit, memory_time
from penstock.schedule.search.problem import TOLERANCE, Orders, Problem

__all__ = ["recompute_choices", "with_recomputes"]

_LONGER = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Micro-batches stay at a stage for longer than they must; so much, perhaps."""


def recompute_choices(problem: Problem) -> list[Problem]:
    """The problem with stages chosen to be recomputed: none, all, and as few as it takes on each rank, about."""
    if not problem.loose:
        return [problem]
    every = range(problem.num_stages)
    chosen = [frozenset(every), frozenset[int](), *(_stages_to_recompute(problem, longer) for longer in _LONGER)]
    found = [problem.with_recomputed(stages) for stages in dict.fromkeys(chosen)]
    return [one for one in found if one.fits]


def _stages_to_recompute(problem: Problem, longer: float) -> frozenset[int]:
    """On each rank, stages whose recompute lets it keep pace if micro-batches stay ``longer`` than they must."""
    pairs, count, found = memory_time(problem), problem.num_stages, set[int]()
    for rank, stages in enumerate(problem.local):
        kept, work = longer * sum(pairs[s][0] for s in stages), problem.work[rank]
        for s in by_recompute_benefit(problem, rank):
            if kept <= problem.cap[rank] * work * (1 + TOLERANCE):
                break
            kept -= longer * (pairs[s][0] - pairs[s][1])
            work += problem.durations[4 * count + s]
            found.add(s)
    return frozenset(found)


def with_recomputes(problem: Problem, words: Orders) -> Orders:
    """The words with as many recomputes as the problem has, each right before its backward where there was none."""
    count = problem.num_stages
    if not any(problem.again) and all(max(word, default=0) < 4 * count for word in words):
        return words
    changed: Orders = []
    for stages, word in zip(problem.local, words, strict=True):
        more = {s for s in stages if problem.again[s]} - {letter % count for letter in word if letter >= 5 * count}
        less = {s for s in stages if not problem.again[s]}
        out: list[int] = []
        for letter in word:
            kind, s = divmod(letter, count)
            if s in less and kind >= 4:
                if kind == 5:
                    out.append(s)
            elif s in more and kind in (1, 2):
                out += (4 * count + s, letter)
            else:
                out.append(5 * count + s if s in more and kind == 0 else letter)
        changed.append(out)
    return changed
