"""Dividing a line of weights into contiguous parts whose largest sum is as small as it can be."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["partition"]


def partition(weights: Sequence[int], parts: int) -> list[int]:
    """How many items each part takes: none is empty, and the heaviest part is as light as possible.

    The smallest limit that ``parts`` parts can keep is found by bisection; parts are then filled greedily from
    the left, which is exact for contiguous parts.
    """
    if not 1 <= parts <= len(weights):
        raise ValueError(f"cannot divide {len(weights)} items into {parts} non-empty parts")
    low, high = max(weights), sum(weights)
    while low < high:
        limit = (low + high) // 2
        if len(_fill(weights, limit)) <= parts:
            high = limit
        else:
            low = limit + 1
    sizes = _fill(weights, low)
    while len(sizes) < parts:  # splitting a part never makes the heaviest one heavier
        i = max(range(len(sizes)), key=lambda i: sizes[i])
        sizes[i : i + 1] = [sizes[i] - sizes[i] // 2, sizes[i] // 2]
    return sizes


def _fill(weights: Sequence[int], limit: int) -> list[int]:
    sizes, load = [0], 0
    for weight in weights:
        if load + weight > limit and sizes[-1]:
            sizes.append(0)
            load = 0
        sizes[-1] += 1
        load += weight
    return sizes
