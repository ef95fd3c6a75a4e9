"""Assign layers to stages: by given sizes, or so that the weight of the heaviest stage is minimal.

    weights   4 1 1 │ 5 │ 2 3       no partition into three parts has a heaviest part below 6
    crossing    9 9   1   1  9      of the partitions with 6, this one has the cheapest cuts

The objectives of a partition, in this order: every part within its memory limit, the heaviest part minimal, the cuts as
cheap as possible, the parts as even as possible. Arithmetic is exact: floats are converted to fractions, so that
rounding never decides a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from operator import add
from typing import Any, TypeAlias

from torch import nn

from penstock.errors import PlanError
from penstock.format import format_size_exact, parse_bytes
from penstock.split.measure import Measurement, measure, tensor_bytes
from penstock.split.plan import Groups, LayerChain

WeightPieces: TypeAlias = Mapping[Hashable, float]
"""The weight of an item by piece: a part counts a piece that several items share (a tied parameter) once."""

_Span: TypeAlias = Callable[[int, int], int]

BALANCE_CRITERIA = ("uniform", "parameters", "time", "memory")

TRAINING_FACTOR = 4.0  # bytes per byte of a trained parameter: itself, its gradient and two optimizer states


def balance_stages(
    chain: LayerChain,
    *,
    balance: Sequence[int] | str | None,
    stages: int | None,
    sample: Any = None,
    memory: Any = None,
) -> list[tuple[str, ...]]:
    """The layers of each stage: ``balance[i]`` layers in stage ``i``, or ``stages`` stages of even weight.

    The weight is ``balance``: ``"uniform"`` counts layers, ``"parameters"`` (the default without a sample) parameters,
    ``"time"`` (the default with one) seconds of forward and backward, ``"memory"`` bytes.

    ``memory`` limits the bytes of a stage (a number, ``"16GiB"``, or a list with one limit per stage): parameters,
    their gradients, two optimizer states each, and with a sample the tensors that one forward saves for backward.
    """
    if isinstance(balance, str) and balance not in BALANCE_CRITERIA:
        _check_sizes(chain, balance)
    criterion = balance if isinstance(balance, str) else None
    if criterion is not None and stages is None:
        raise PlanError(f"balance={criterion!r} says what to balance, but not over how many stages: give stages=n too")
    if criterion is None and (balance is None) == (stages is None):
        raise PlanError("say how to cut: either balance=[2, 2] (layers per stage) or stages=2, not both")
    if criterion is None and balance is not None:
        sizes = _check_sizes(chain, balance)
    else:
        count = check_stage_count(chain, stages)
        if criterion is None and any(tensor.is_meta for layer in chain.layers for _, tensor in chain.members(layer)):
            sample = None  # a model without data cannot be measured
        criterion = criterion or ("parameters" if sample is None else "time")
        if sample is None and criterion in ("time", "memory"):
            raise PlanError(f"balance={criterion!r} is measured: give sample=, the arguments of a call")
        limits = None if memory is None else _memory_limits(memory, count)
        measured = _measure_if_sample(chain, sample) if limits is not None or criterion in ("time", "memory") else None
        sizes = partition_layers(chain, count, criterion, measured, limits=limits)
    ends = list(accumulate(sizes))
    groups = [chain.layers[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    if memory is not None and criterion is None:
        check_limits(chain, groups, memory, sample)
    return groups


def _measure_if_sample(chain: LayerChain, sample: Any) -> Measurement | None:
    return None if sample is None else measure(chain, sample)


def partition_layers(
    chain: LayerChain,
    stages: int,
    criterion: str,
    measured: Measurement | None,
    *,
    limits: list[int] | None = None,
    scale: float = TRAINING_FACTOR,
    chunks: int = 1,
) -> list[int]:
    pieces: list[dict[Hashable, float]] = []
    if criterion == "memory" or limits is not None:
        pieces = _layer_memory(chain, measured, scale=scale, chunks=chunks)
    weights: list[float | WeightPieces] = []
    if criterion == "uniform":
        weights = [1] * len(chain.layers)
    elif criterion == "memory":
        weights = list(pieces)
    elif criterion == "time" and measured is not None:
        weights = [layer.forward + layer.backward for layer in measured.layers]
    else:
        # A layer without parameters is not free: the one keeps such layers from all going to one stage. A parameter
        # of two layers counts in both, since both compute with it.
        for layer in chain.layers:
            own = {id(t): t.numel() for _, t in chain.members(layer) if isinstance(t, nn.Parameter)}
            weights.append(1 + sum(own.values()))
    if measured is not None:
        crossing: Sequence[float] = measured.crossing
    else:
        crossing = [0.0, *(chain.crossing(cut) for cut in range(1, len(chain.layers)))]
    try:
        return partition(weights, stages, crossing=crossing, memory=pieces, limits=limits)
    except MemoryLimitError as error:
        what = "parameters, gradients and optimizer states" + ("" if measured is None else " and activations")
        size, short = format_size_exact(error.limit), format_size_exact(error.short)
        if error.item is None:
            remedy = "use more stages, or raise the limit"
        else:
            alone = format_size_exact(error.needs)
            remedy = f"layer {chain.layers[error.item]} alone needs {alone}: divide it into smaller layers"
        raise PlanError(
            f"{len(chain.layers)} layers do not fit into {stages} stages with their {what}: the limit of a stage (at "
            f"most {size}) must grow by {short}; {remedy}"
        ) from None


def _layer_memory(
    chain: LayerChain, measured: Measurement | None, *, scale: float = TRAINING_FACTOR, chunks: int = 1
) -> list[dict[Hashable, float]]:
    """The bytes of each layer by tensor, so that a stage counts tensors that its layers share once.

    Trained parameters count ``scale`` times, frozen ones and buffers once. With a measurement, tensors saved for
    backward count too: those of one micro-batch, if the sample is ``chunks`` micro-batches.
    """
    pieces: list[dict[Hashable, float]] = []
    for i, layer in enumerate(chain.layers):
        sizes: dict[Hashable, float] = {}
        for _, tensor in chain.members(layer):
            trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
            sizes["member", id(tensor)] = tensor_bytes(tensor) * (scale if trained else 1)
        if measured is not None:
            sizes.update((("kept", key), size / chunks) for key, size in measured.kept[i].items())
        pieces.append(sizes)
    return pieces


def _memory_limits(memory: Any, stages: int) -> list[int]:
    """The limit of each stage in bytes, from one limit for all stages or a list."""
    if isinstance(memory, (str, int, float)) or not isinstance(memory, Iterable):
        return [parse_bytes(memory)] * stages
    limits = [parse_bytes(limit) for limit in memory]
    if len(limits) != stages:
        raise PlanError(f"memory has {len(limits)} limits, but there are {stages} stages: give one for each, or one")
    return limits


def check_limits(chain: LayerChain, groups: Groups, memory: Any, sample: Any) -> None:
    """Raise an error if a stage that the user chose exceeds its memory limit."""
    pieces = dict(zip(chain.layers, _layer_memory(chain, _measure_if_sample(chain, sample)), strict=True))
    for stage, (layers, limit) in enumerate(zip(groups, _memory_limits(memory, len(groups)), strict=True)):
        needs = sum({key: value for layer in layers for key, value in pieces[layer].items()}.values())
        if needs > limit:
            raise PlanError(
                f"stage {stage} has layers that need {format_size_exact(needs)}, but its limit is "
                f"{format_size_exact(limit)}: give it fewer layers"
            )


def _check_sizes(chain: LayerChain, balance: Any) -> list[int]:
    if isinstance(balance, str) or not isinstance(balance, Iterable):
        raise PlanError(
            "balance must be a list with the number of layers of each stage, "
            f"or with stages=n one of {', '.join(map(repr, BALANCE_CRITERIA))}; got {balance!r}"
        )
    sizes = list(balance)
    if not sizes or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in sizes):
        raise PlanError(f"every stage needs at least one layer: balance={sizes}")
    if sum(sizes) != len(chain.layers):
        raise PlanError(f"balance={sizes} has {sum(sizes)} layers, but the model has {len(chain.layers)}: change it")
    return sizes


def check_stage_count(chain: LayerChain, stages: int | None) -> int:
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise PlanError(f"stages must be a positive number, got {stages!r}")
    if stages > len(chain.layers):
        raise PlanError(f"{stages} stages asked for, but the model has only {len(chain.layers)} layers to divide")
    return stages


class MemoryLimitError(ValueError):
    """No partition is within the memory limits. Each, at most ``limit``, would have to grow by ``short``."""

    def __init__(self, limit: float, short: int, item: int | None, needs: int) -> None:
        super().__init__(f"the items do not fit into the parts: {short} more would do")
        self.limit, self.short, self.item, self.needs = limit, short, item, needs


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
    raise MemoryLimitError(max(each), -(-short // unit), largest if needs > max(units) else None, -(-needs // unit))


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
