"""A sequence of costs in consecutive parts, the heaviest of them as light as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from penstock.split.partition import partition

__all__ = ["check", "solve"]


def solve(sequence: Sequence[float], partitions: int = 1) -> list[list[float]]:
    """The parts, none of them empty."""
    check(len(sequence), partitions)
    ends = accumulate(partition(list(sequence), partitions), initial=0)
    return [list(sequence[a:b]) for a, b in pairwise(ends)]


def check(length: int, partitions: int) -> None:
    """A ValueError where there are no such parts."""
    if partitions < 1:
        raise ValueError(f"partitions must be a positive integer ({partitions} < 1)")
    if length < partitions:
        raise ValueError(f"sequence is shorter than intended partitions ({length} < {partitions})")
