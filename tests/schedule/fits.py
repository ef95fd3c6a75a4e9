"""What a word per rank keeps, and whether what belongs together in it comes in the right order."""

from __future__ import annotations

from penstock.schedule.auto.problem import SLACK, Problem, Words


def _fits(problem: Problem, rank: int, word: list[int]) -> bool:
    """Whether a rank's word keeps its cap, and every stage does F, then I, then W of each micro-batch."""
    count = problem.num_stages
    takes = problem.takes
    room = problem.cap[rank] * (1 + SLACK)
    kept = 0.0
    forwards = [0] * count  # without a backward yet
    inputs = [0] * count  # without a W yet
    for letter in word:
        kept += takes[letter]
        if letter < count:
            if kept > room:
                return False
            forwards[letter] += 1
        elif letter < 2 * count:
            forwards[letter - count] -= 1
            inputs[letter - count] += 1
            if forwards[letter - count] < 0:
                return False
        elif letter < 3 * count:
            forwards[letter - 2 * count] -= 1
            if forwards[letter - 2 * count] < 0:
                return False
        else:
            inputs[letter - 3 * count] -= 1
            if inputs[letter - 3 * count] < 0:
                return False
    return True


def fits_all(problem: Problem, words: Words) -> bool:
    """Whether each rank keeps its cap, and does what belongs together in the right order."""
    return all(_fits(problem, rank, word) for rank, word in enumerate(words))

