"""What a word per rank keeps, and whether what belongs together in it comes in the right order."""

from __future__ import annotations

from penstock.schedule.search.problem import TOLERANCE, Orders, Problem


def _fits(problem: Problem, rank: int, word: list[int]) -> bool:
    """Whether a rank's word keeps its cap, and every stage does F, then I, then W of each micro-batch; and R before I,
    of those that F has dropped.
    """
    count = problem.num_stages
    room = problem.cap[rank] * (1 + TOLERANCE)
    kept = 0.0
    forwards: list[list[bool]] = [[] for _ in range(count)]  # without a backward yet: whether it is there
    inputs = [0] * count  # without a W yet
    for letter in word:
        kind, s = divmod(letter, count)
        size, part = problem.activation[s], problem.checkpoint[s]
        if kind in (0, 5):
            if kept + size > room:
                return False
            kept += size if kind == 0 else size * part
            forwards[s].append(kind == 0)
        elif kind == 4:
            kept += size * (1 - part)
            if kept > room or False not in forwards[s]:
                return False
            forwards[s][forwards[s].index(False)] = True
        elif kind in (1, 2):
            if not forwards[s] or not forwards[s].pop(0):
                return False
            kept -= size if kind == 2 else size * (1 - problem.keep[s])
            inputs[s] += kind == 1
        else:
            kept -= size * problem.keep[s]
            inputs[s] -= 1
            if inputs[s] < 0:
                return False
    return True


def fits_all(problem: Problem, words: Orders) -> bool:
    """Whether each rank keeps its cap, and does what belongs together in the right order."""
    return all(_fits(problem, rank, word) for rank, word in enumerate(words))
