"""Partition a sequence of weights into contiguous parts with a minimal heaviest part.

    weights   4 1 1 │ 5 │ 2 3       no partition into three parts has a heaviest part below 6
    crossing    9 9   1   1  9      of the partitions with 6, this one has the cheapest cuts

The objectives, in this order: every part within its memory limit, the heaviest part minimal, the cuts as cheap as
possible, the parts as even as possible. Arithmetic is exact: floats are converted to fractions, so that rounding never
decides a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction
from operator import add
from typing import TypeAlias

WeightPieces: TypeAlias = Mapping[Hashable, float]
"""The weight of an item by piece: a part counts a piece that several items share (a tied parameter) once."""

_Span: TypeAlias = Callable[[int, int], int]


class MemoryLimitError(ValueError):
    """No partition is within the memory limits. Each limit would have to grow by ``short``."""

    def __init__(self, items: int, limits: Sequence[float], short: int, item: int | None, needs: int) -> None:
        super().__init__(f"{items} items do not fit into {len(limits)} parts: {short} more would do")
        self.short, self.item, self.needs, self.limit = short, item, needs, max(limits)


def partition(
    weights: Sequence[float | WeightPieces],
    parts: int,
    *,
    crossing: Sequence[float] | None = None,
    memory: Sequence[float | WeightPieces] | None = None,
    limits: float | Sequence[float] | None = None,
) -> list[int]:
    """The number of items of each part: no part is empty, and the heaviest part is minimal.

    ``crossing[i]`` is the cost of a cut before item ``i`` (``crossing[0]`` is not used). Among the partitions with a
    minimal heaviest part, the one with the smallest total cost is chosen, and among those the most even one (sum of
    squares of weights, then of numbers of items). ``limits`` bounds the ``memory`` of a part: one number for all parts,
    or one per part.
    """
    n = len(weights)
    if not 1 <= parts <= n:
        raise ValueError(f"cannot divide {n} items into {parts} non-empty parts")
    span, _ = _spans("weights", weights)
    cuts, _ = _integers("crossing", [0.0] * n if crossing is None else crossing)
    if len(cuts) != n:
        raise ValueError(f"{len(cuts)} crossings for {n} items: give one for each, the first is not used")
    bounds = _bounds(memory, limits, n, parts)

    def within(limit: int) -> list[list[int]]:
        stops = _stops(span, n, limit)
        return [list(map(min, bound, stops)) for bound in bounds]

    lightest = max(span(i, i + 1) for i in range(n))
    heaviest = _least(lightest, span(0, n), lambda limit: _fits(within(limit), n))
    return _cheapest(within(heaviest), span, cuts)


def _least(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The smallest number from ``low`` to ``high`` that fits; ``high`` does, and so do all above one that does."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _integers(what: str, numbers: Sequence[float]) -> tuple[list[int], int]:
    """The numbers as integer multiples of a unit, and the number of units in 1."""
    for i, number in enumerate(numbers):
        if not 0 <= number < math.inf:
            raise ValueError(f"{what} must be numbers from 0 up: {what}[{i}] is {number}")
    exact = [Fraction(number) for number in numbers]
    unit = math.lcm(*(number.denominator for number in exact))
    return [int(number * unit) for number in exact], unit


def _spans(what: str, items: Sequence[float | WeightPieces]) -> tuple[_Span, int]:
    """A function for the weight of the items ``i`` to ``j`` (exclusive), and the number of units in 1."""
    bags = [item if isinstance(item, Mapping) else {(i,): item} for i, item in enumerate(items)]
    pieces: dict[Hashable, float] = {}
    for i, bag in enumerate(bags):
        for key, weight in bag.items():
            if pieces.setdefault(key, weight) != weight:
                raise ValueError(f"{what}[{i}] has {key!r} with {weight}, an item before it with {pieces[key]}")
    numbers, unit = _integers(what, list(pieces.values()))
    units = dict(zip(pieces, numbers, strict=True))
    if sum(map(len, bags)) == len(pieces):  # nothing is shared: prefix sums suffice
        sums = [0]
        for bag in bags:
            sums.append(sums[-1] + sum(units[key] for key in bag))
        return (lambda i, j: sums[j] - sums[i]), unit
    rows: list[list[int]] = []
    for i in range(len(bags)):
        row, seen = [0], set[Hashable]()
        for bag in bags[i:]:
            row.append(row[-1] + sum(units[key] for key in bag if key not in seen))
            seen.update(bag)
        rows.append(row)
    return (lambda i, j: rows[i][j - i]), unit


def _stops(span: _Span, n: int, limit: int) -> list[int]:
    """For each item, the furthest end of a part that starts there and is within ``limit``."""
    stops, j = [], 0
    for i in range(n):
        j = max(j, i)
        while j < n and span(i, j + 1) <= limit:
            j += 1
        stops.append(j)
    return stops


def _bounds(
    memory: Sequence[float | WeightPieces] | None, limits: float | Sequence[float] | None, n: int, parts: int
) -> list[list[int]]:
    """For each part and item, the furthest end of the part if it starts there and is within its memory limit."""
    if memory is None or limits is None:
        return [[n] * n] * parts
    each = list(limits) if isinstance(limits, Sequence) else [limits] * parts
    if len(each) != parts or len(memory) != n:
        raise ValueError(f"{len(each)} limits and {len(memory)} memories for {parts} parts and {n} items")
    span, unit = _spans("memory", memory)
    units = [math.floor(Fraction(limit) * unit) for limit in each]

    def bounds(more: int) -> list[list[int]]:
        stops = {limit: _stops(span, n, limit + more) for limit in set(units)}
        return [stops[limit] for limit in units]

    if _fits(bounds(0), n):
        return bounds(0)
    short = _least(1, span(0, n) - min(units), lambda more: _fits(bounds(more), n))
    largest = max(range(n), key=lambda i: span(i, i + 1))
    needs = span(largest, largest + 1)
    raise MemoryLimitError(n, each, -(-short // unit), largest if needs > max(units) else None, -(-needs // unit))


def _fits(bounds: list[list[int]], n: int) -> bool:
    """Whether non-empty parts within these bounds can cover all items."""
    reached = 1  # bit i: the parts so far can stop before item i
    for part, stops in enumerate(bounds):
        starts, reached = reached, 0
        for i in range(part, n - (len(bounds) - part) + 1):
            if starts >> i & 1:
                reached |= (2 << stops[i]) - (2 << i)
    return bool(reached >> n & 1)


def _cheapest(bounds: list[list[int]], span: _Span, cuts: list[int]) -> list[int]:
    """The partition within these bounds with the cheapest cuts, and among those the most even one.

    Dynamic programming from the last part to the first: the least cost of the items from ``i`` on.
    """
    n, parts = len(cuts), len(bounds)
    # Three objectives in one number: a unit of each outweighs the largest sum of those after it.
    even = n * n + 1
    cheap = parts * even * span(0, n) ** 2 + even
    never = cheap * (sum(cuts) + 1)
    furthest = [max(stops) for stops in zip(*bounds, strict=True)]
    shares = [[even * span(i, j) ** 2 + (j - i) ** 2 for j in range(i + 1, furthest[i] + 1)] for i in range(n)]
    after = [never] * n + [0]
    chosen: list[list[int]] = []
    for part in reversed(range(parts)):
        costs, choice = [never] * (n + 1), [0] * (n + 1)
        for i in range(part, n - (parts - part) + 1):
            sums = list(map(add, shares[i], after[i + 1 : bounds[part][i] + 1]))
            least = min(sums, default=never)
            if least < never:
                costs[i] = least + (cheap * cuts[i] if i else 0)
                choice[i] = len(sums) - sums[::-1].index(least)  # of equals, the one with more items in the first part
        after = costs
        chosen.append(choice)
    sizes, at = [], 0
    for choice in reversed(chosen):
        sizes.append(choice[at])
        at += choice[at]
    return sizes
