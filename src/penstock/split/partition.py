"""Dividing a line of weights into contiguous parts whose largest is as small as it can be.

    weights   4 1 1 │ 5 │ 2 3       no cut into three parts has a heaviest part below 6
    crossing    9 9   1   1  9      and of the cuts that keep it there, these two are the cheapest

What is asked of a partition, in this order: every part within its memory limit, the heaviest part as light as possible,
the cuts as cheap as possible, the parts as even as possible. All of it is exact: floats are taken as the fractions
that they are, so that no rounding decides a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction
from operator import add
from typing import TypeAlias

__all__ = ["MemoryLimitError", "WeightPieces", "partition"]

WeightPieces: TypeAlias = Mapping[Hashable, float]
"""What an item weighs, piece by piece: a part that has a piece (a shared parameter) several times counts it once."""

_Span: TypeAlias = Callable[[int, int], int]


class MemoryLimitError(ValueError):
    """No partition keeps the memory limits. They would have to grow by ``short``, each."""

    def __init__(self, items: int, limits: Sequence[float], short: int, item: int | None, needs: int) -> None:
        self.short, self.item, self.needs, self.limit = short, item, needs, max(limits)
        alone = "" if item is None else f"; item {item} alone needs {needs}"
        super().__init__(
            f"{items} items cannot be divided into {len(limits)} parts within a limit of {self.limit:g} each: "
            f"{short} more would do{alone}"
        )


def partition(
    weights: Sequence[float | WeightPieces],
    parts: int,
    *,
    crossing: Sequence[float] | None = None,
    memory: Sequence[float | WeightPieces] | None = None,
    limits: float | Sequence[float] | None = None,
) -> list[int]:
    """How many items each part takes: none is empty, and the heaviest part is as light as possible.

    ``crossing[i]`` is what a cut before item ``i`` costs (``crossing[0]`` is not used): of the partitions with the
    lightest heaviest part, one with the smallest sum of it is chosen, and of those the one whose parts are most even
    (sum of squares, of the weights and then of the numbers of items). ``limits`` bounds what the ``memory`` of each
    part adds up to: one number for all parts, or one for each.
    """
    n = len(weights)
    if not 1 <= parts <= n:
        raise ValueError(f"cannot divide {n} items into {parts} non-empty parts")
    span, _ = _spans("weights", weights)
    cuts, _ = _integers("crossing", [0.0] * n if crossing is None else crossing)
    if len(cuts) != n:
        raise ValueError(f"{len(cuts)} crossings for {n} items: give one for each, the first of no use")
    bounds = _bounds(memory, limits, n, parts)

    low, high = max(span(i, i + 1) for i in range(n)), span(0, n)
    while low < high:
        limit = (low + high) // 2
        if _fits(_tighter(bounds, _stops(span, n, limit)), n):
            high = limit
        else:
            low = limit + 1
    return _cheapest(_tighter(bounds, _stops(span, n, low)), span, cuts)


def _integers(what: str, numbers: Sequence[float]) -> tuple[list[int], int]:
    """The numbers as whole multiples of one unit, and how many units make 1."""
    for i, number in enumerate(numbers):
        if not 0 <= number < math.inf:
            raise ValueError(f"{what} must be numbers from 0 up: {what}[{i}] is {number}")
    exact = [Fraction(number) for number in numbers]
    unit = math.lcm(*(number.denominator for number in exact))
    return [int(number * unit) for number in exact], unit


def _spans(what: str, items: Sequence[float | WeightPieces]) -> tuple[_Span, int]:
    """What the items ``i`` to ``j`` (not included) weigh together, and how many units make 1."""
    bags = [_pieces(i, item) for i, item in enumerate(items)]
    pieces: dict[Hashable, float] = {}
    for i, bag in enumerate(bags):
        for key, weight in bag.items():
            if pieces.setdefault(key, weight) != weight:
                raise ValueError(f"{what}[{i}] has {key!r} with {weight}, an item before it with {pieces[key]}")
    numbers, unit = _integers(what, list(pieces.values()))
    worth = dict(zip(pieces, numbers, strict=True))
    if sum(map(len, bags)) == len(pieces):  # nothing is shared: differences of sums will do
        sums = [0]
        for bag in bags:
            sums.append(sums[-1] + sum(worth[key] for key in bag))
        return (lambda i, j: sums[j] - sums[i]), unit
    rows: list[list[int]] = []
    for i in range(len(bags)):
        row, seen = [0], set[Hashable]()
        for bag in bags[i:]:
            row.append(row[-1] + sum(worth[key] for key in bag if key not in seen))
            seen.update(bag)
        rows.append(row)
    return (lambda i, j: rows[i][j - i]), unit


def _pieces(i: int, item: float | WeightPieces) -> WeightPieces:
    return item if isinstance(item, Mapping) else {(i,): item}


def _stops(span: _Span, n: int, limit: int) -> list[int]:
    """For each item, where a part that starts with it must stop to stay within ``limit``."""
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
    """For each part and item, where the part must stop if it starts there, to keep to the memory limit."""
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
    low, high = 1, span(0, n) - min(units)
    while low < high:
        more = (low + high) // 2
        low, high = (low, more) if _fits(bounds(more), n) else (more + 1, high)
    largest = max(range(n), key=lambda i: span(i, i + 1))
    needs = span(largest, largest + 1)
    raise MemoryLimitError(n, each, -(-low // unit), largest if needs > max(units) else None, -(-needs // unit))


def _tighter(bounds: list[list[int]], stops: list[int]) -> list[list[int]]:
    """The nearer of two stops, for each part and item. Parts that share their bounds share the result."""
    made = {id(bound): list(map(min, bound, stops)) for bound in bounds}
    return [made[id(bound)] for bound in bounds]


def _fits(bounds: list[list[int]], n: int) -> bool:
    """Whether parts within these bounds, none of them empty, cover all items."""
    if all(stops is bounds[0] for stops in bounds):  # filling greedily is best, and a part can always be split
        at = 0
        for stops in bounds:
            at = n if at == n else stops[at]
        return at == n
    reached = 1  # bit i: the parts so far can stop before item i
    for part, stops in enumerate(bounds):
        starts, reached = reached, 0
        for i in range(part, n - (len(bounds) - part) + 1):
            if starts >> i & 1:
                reached |= (2 << stops[i]) - (2 << i)
    return bool(reached >> n & 1)


def _cheapest(bounds: list[list[int]], span: _Span, cuts: list[int]) -> list[int]:
    """Of the partitions within these bounds, the one with the cheapest cuts; then the most even one.

    From the last part to the first: what the items from ``i`` on cost at least, if a part starts there.
    """
    n, parts = len(cuts), len(bounds)
    # One number for three wishes, each worth more than all that the wishes after it can add up to.
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
                choice[i] = len(sums) - sums[::-1].index(least)  # of equals, the one with more in front
        after = costs
        chosen.append(choice)
    sizes, at = [], 0
    for choice in reversed(chosen):
        sizes.append(choice[at])
        at += choice[at]
    return sizes
