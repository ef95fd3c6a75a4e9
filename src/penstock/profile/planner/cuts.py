"""Costs of ranges of layers and of stages; partitions of a model that minimize the time of the slowest rank.

    straight   rank 0 │ rank 1 │ rank 2                 one range of layers per rank
    v          rank 0 │ rank 1 │ rank 2 │ 2 │ 1 │ 0      two ranges per rank, in a V
    loop       rank 0 │ rank 1 │ rank 2 │ 0 │ 1 │ 2      several ranges per rank, round-robin

The objective is the bottleneck: the time per micro-batch of the slowest rank (the sum of its stages, divided by its
speed) or of the slowest channel (the bytes sent at its cut). The memory of every rank limits the static bytes of its
stages plus the activations of its micro-batches in flight.

Straight partitions are optimal, by dynamic programming. The others are balanced partitions, improved by local moves.
The joint search moves their cuts further.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import inf
from operator import add

from penstock.profile.costs import ModelCosts
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Edge, loop, vee


class Segments:
    """Sums over ranges of layers, ``i`` to ``j`` (exclusive). Bytes shared by several layers count once."""

    def __init__(self, costs: ModelCosts) -> None:
        self.costs, self.n = costs, len(costs.layers)
        layers = costs.layers
        self.layer_work = [
            layer.forward + min(layer.full_backward, layer.input_gradient + layer.weight_gradient) for layer in layers
        ]  # a backward may be split or not, whichever is faster
        self.work_before = _cumulative(self.layer_work)
        self._totals: dict[str, list[float]] = {}
        self._has_deferred = any(layer.deferred is not None for layer in layers)
        self._ties: list[tuple[list[int], float]] = []  # layers, and their shared static bytes
        for tie in costs.shared:
            own = sum(layers[i].parameters for i in tie.layers)
            static = sum(layers[i].static_bytes - layers[i].buffers for i in tie.layers)
            self._ties.append((sorted(set(tie.layers)), tie.bytes * (static / own if own else 1.0)))
        self._kept_together = sorted((max(a, b), min(a, b), size) for a, b, size in costs.kept_together)
        self._range_cache: dict[tuple[int, int], tuple[float, float, float, float]] = {}
        values: dict[tuple[int, int], tuple[list[int], float]] = {}  # destinations and bytes by source and number
        for number, crossing in enumerate(costs.crossings):
            for key, size in crossing.values or [(-1 - number, crossing.bytes)]:
                destinations = values.get((crossing.src, key), ([],))[0]
                values[crossing.src, key] = sorted([*destinations, crossing.dst]), size
        self._values = [(src, destinations, size) for (src, _), (destinations, size) in values.items()]
        self._inputs_at: dict[int, list[tuple[int, float]]] = {}
        self.cut_bytes = [0.0] * (self.n + 1)  # bytes sent at a cut before each layer; a value counts once
        for src, destinations, size in self._values:
            for cut in range(src + 1, destinations[-1] + 1):
                self.cut_bytes[cut] += size
        self.cut_seconds = [size / costs.link.bandwidth for size in self.cut_bytes]

    def work(self, i: int, j: int) -> float:
        """Seconds of forward and backward."""
        return self.work_before[j] - self.work_before[i]

    def total(self, name: str, i: int, j: int) -> float:
        """The sum of one attribute of ``LayerCosts``."""
        if name not in self._totals:
            self._totals[name] = _cumulative(getattr(layer, name) for layer in self.costs.layers)
        return self._totals[name][j] - self._totals[name][i]

    def static_bytes(self, i: int, j: int) -> float:
        """Bytes of parameters, gradients, optimizer state and buffers."""
        size = self.total("static_bytes", i, j)
        for layers, tied in self._ties:
            inside = bisect_right(layers, j - 1) - bisect_right(layers, i - 1)
            size -= tied * max(0, inside - 1)
        return size

    def activation_bytes(self, i: int, j: int) -> float:
        """Bytes saved for the backward of one micro-batch."""
        size = self.total("activation", i, j)
        for last, first, shared in self._kept_together:
            if last >= j:
                break
            if first >= i:
                size -= shared
        return size

    def deferred_bytes(self, i: int, j: int) -> float:
        """Bytes kept from I to W for the weight gradients of one micro-batch."""
        return self.total("deferred_bytes", i, j) if self._has_deferred else self.activation_bytes(i, j)

    def range_costs(self, i: int, j: int) -> tuple[float, float, float, float]:
        """Recompute seconds, static bytes, activation bytes, and the bytes of the input of the range.

        The input is assumed to be part of the activation, as for linear layers and norms.
        """
        found = self._range_cache.get((i, j))
        if found is None:
            kept = self.activation_bytes(i, j)
            repeated = self.total("recompute", i, j)
            found = repeated, self.static_bytes(i, j), kept, min(kept, self.input_bytes(i, j))
            self._range_cache[i, j] = found
        return found

    def input_bytes(self, i: int, j: int) -> float:
        """Bytes sent to the range for one micro-batch, which are kept for a recompute."""
        if i not in self._inputs_at:
            self._inputs_at[i] = [
                (next(dst for dst in destinations if dst >= i), size)
                for src, destinations, size in self._values
                if src < i <= destinations[-1]
            ]
        return sum(size for dst, size in self._inputs_at[i] if dst < j)


def _cumulative(numbers: Iterable[float]) -> list[float]:
    return [0.0, *accumulate(numbers)]


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────

Cuts = tuple[int, ...]
"""The end of each stage as a layer index, exclusive; that of the last stage is the number of layers."""

Runs = Sequence[tuple[int, int]]
"""The layer ranges of a rank's stages."""


@dataclass(frozen=True)
class Ranks:
    """Relative speed, memory in bytes, and micro-batches in flight of each rank.

    ``recompute``: all stages (True), none (False), or as few as the memory requires (None).
    """

    speed: tuple[float, ...]
    memory: tuple[float, ...]
    in_flight: tuple[float, ...]
    recompute: bool | None = False

    def __len__(self) -> int:
        return len(self.speed)


def rank_runs(placement: Sequence[int], cuts: Cuts, p: int) -> list[list[tuple[int, int]]]:
    """The layer ranges of the stages of each of ``p`` ranks."""
    runs: list[list[tuple[int, int]]] = [[] for _ in range(p)]
    for rank, run in zip(placement, pairwise((0, *cuts)), strict=True):
        runs[rank].append(run)
    return runs


def bottleneck(segments: Segments, ranks: Ranks, placement: Sequence[int], cuts: Cuts) -> float:
    """Seconds per micro-batch of the slowest rank or channel; infinite if a rank's memory is too small."""
    runs = enumerate(rank_runs(placement, cuts, len(ranks)))
    slowest = max(rank_time(segments, ranks, rank, own) for rank, own in runs)
    begins = pairwise(zip(placement, (0, *cuts), strict=False))
    channels = [segments.cut_seconds[begin] for (a, _), (b, begin) in begins if a != b]
    return max([slowest, *channels])


def rank_time(segments: Segments, ranks: Ranks, rank: int, runs: Runs) -> float:
    """Seconds per micro-batch of a rank; infinite if its memory is too small."""
    recomputed = choose_recompute(segments, ranks, rank, runs)
    if recomputed is None:
        return inf
    work = sum(segments.work(*run) for run in runs)
    return (work + sum(segments.total("recompute", *runs[number]) for number in recomputed)) / ranks.speed[rank]


def choose_recompute(segments: Segments, ranks: Ranks, rank: int, runs: Runs) -> tuple[int, ...] | None:
    """The ranges to recompute, with the least extra work, so that the rank fits its memory; None if impossible."""
    limit, in_flight = ranks.memory[rank], ranks.in_flight[rank]
    if ranks.recompute is not None or limit == inf:
        recomputed = tuple(range(len(runs))) if ranks.recompute else ()
        return recomputed if limit == inf or rank_bytes(segments, runs, recomputed, in_flight) <= limit else None
    if rank_bytes(segments, runs, (), in_flight) <= limit:
        return ()
    sizes = [segments.range_costs(*run) for run in runs]
    excess = sum(static + in_flight * kept for _, static, kept, _ in sizes) - limit
    if excess > in_flight * sum(kept - inputs for _, _, kept, inputs in sizes):
        return None
    # All subsets: extra work, bytes saved, bytes of the largest recomputed activation, the subset.
    choices: list[tuple[float, float, float, tuple[int, ...]]] = [(0.0, 0.0, 0.0, ())]
    for number, (work, _, kept, inputs) in enumerate(sizes):
        dropped = kept - inputs
        if dropped > 0:
            choices += [
                (extra + work, saved + in_flight * dropped, max(largest, dropped), (*chosen, number))
                for extra, saved, largest, chosen in choices
            ]
    fitting = [(work, len(chosen), chosen) for work, saved, largest, chosen in choices if saved - largest >= excess]
    return min(fitting)[2] if fitting else None


def rank_bytes(segments: Segments, runs: Runs, recomputed: Sequence[int], in_flight: float) -> float:
    """Peak bytes of a rank with ``in_flight`` micro-batches; at most one recomputed range holds its activations."""
    total, largest = 0.0, 0.0
    for number, run in enumerate(runs):
        _, static, kept, inputs = segments.range_costs(*run)
        if number in recomputed:
            total += static + in_flight * inputs
            largest = max(largest, kept - inputs)
        else:
            total += static + in_flight * kept
    return total + largest


# ── stages ───────────────────────────────────────────────────────────────────────────────────────────────────────


def stage_costs(segments: Segments, ranks: Ranks, placement: Sequence[int], cuts: Cuts) -> Costs:
    """The costs of each stage on its rank. Compute time of messages is part of the adjacent actions."""
    link, overhead = segments.costs.link, segments.costs.overhead
    runs = list(pairwise((0, *cuts)))

    def seconds(name: str, extra: float) -> tuple[float, ...]:
        return tuple(
            (segments.total(name, i, j) + extra) / ranks.speed[rank]
            for rank, (i, j) in zip(placement, runs, strict=True)
        )

    edges = edges_between(segments, cuts)
    messages = [  # in each direction, for one micro-batch
        sum(
            link.host_seconds(size)
            for edge, size in edges.items()
            if stage in edge and placement[edge[0]] != placement[edge[1]]
        )
        for stage in range(len(runs))
    ]
    _, _, activation, inputs = zip(*(segments.range_costs(*run) for run in runs), strict=True)
    return Costs(
        f=tuple(map(add, seconds("forward", overhead.forward), messages)),
        i=tuple(map(add, seconds("input_gradient", overhead.input_gradient), messages)),
        w=seconds("weight_gradient", overhead.weight_gradient),
        b=tuple(map(add, seconds("full_backward", overhead.backward), messages)),
        r=seconds("recompute", overhead.recompute),
        latency=link.latency,
        bandwidth=link.bandwidth,
        bytes=edges,
        activation=activation,
        keep=tuple(
            segments.deferred_bytes(i, j) / kept if kept else 1.0 for (i, j), kept in zip(runs, activation, strict=True)
        ),
        checkpoint=tuple(size / kept if kept else 0.0 for size, kept in zip(inputs, activation, strict=True)),
    )


def edges_between(segments: Segments, cuts: Cuts) -> dict[Edge, float]:
    """Bytes sent from stage to stage. Every stage has an edge to the next one, which may have 0 bytes."""
    stages = [range(i, j) for i, j in pairwise((0, *cuts))]
    stage_of = [stage for stage, layers in enumerate(stages) for _ in layers]
    pairs = {(stage_of[crossing.src], stage_of[crossing.dst]) for crossing in segments.costs.crossings}
    edges = sorted({pair for pair in pairs if pair[0] != pair[1]} | set(pairwise(range(len(cuts)))))
    return {(src, dst): segments.costs.bytes_between(stages[src], stages[dst]) for src, dst in edges}


def rank_static_bytes(segments: Segments, placement: Sequence[int], cuts: Cuts, p: int) -> tuple[float, ...]:
    """Per rank: bytes of parameters, gradients, optimizer state and buffers."""
    return tuple(sum(segments.static_bytes(*run) for run in runs) for runs in rank_runs(placement, cuts, p))


# ── partitions ───────────────────────────────────────────────────────────────────────────────────────────────────


def placement_of(shape: str, p: int, v: int) -> tuple[int, ...]:
    return vee(p) if shape == "v" else loop(p, v)


def find_cuts(segments: Segments, ranks: Ranks, placement: Sequence[int]) -> list[Cuts]:
    """Balanced cuts, and the optimal straight cuts if their bottleneck is smaller; empty if no cuts fit the memory."""
    start = balanced(segments, ranks, placement)
    found = [] if start is None else [start]
    if len(placement) == len(ranks):
        limit = inf if start is None else bottleneck(segments, ranks, placement, start)
        straight = _best_straight(segments, ranks, limit)
        found += [] if straight is None else [straight]
    return found


def least_memory(segments: Segments, ranks: Ranks, placement: Sequence[int]) -> float:
    """Smallest factor by which device memory must grow for a feasible partition (±1 %)."""

    def is_feasible(factor: float) -> bool:
        return bool(find_cuts(segments, replace(ranks, memory=tuple(factor * m for m in ranks.memory)), placement))

    low, high = 0.0, 1.0
    while not is_feasible(high):
        low, high = high, 2 * high
    while high - low > 1e-2 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_feasible(middle) else (middle, high)
    return high


def _best_straight(segments: Segments, ranks: Ranks, limit: float) -> Cuts | None:
    """The straight cuts with the smallest bottleneck below ``limit``; None if there are none.

    Dynamic programming over ranks: ``best[j]`` is the smallest bottleneck of the ranks so far with the first j layers.
    """
    n, p = segments.n, len(ranks)
    best, begins = [0.0] + [inf] * n, list[list[int]]()
    for rank in range(p):
        before, best, begin_of = best, [inf] * (n + 1), [0] * (n + 1)
        for end in range(rank + 1, n - (p - rank - 1) + 1):
            value = limit
            for begin in range(end - 1, rank - 1, -1):
                if segments.work(begin, end) >= value * ranks.speed[rank]:
                    break  # ranges that begin earlier take longer
                reached = max(before[begin], segments.cut_seconds[begin] if begin else 0.0)
                if reached < value:
                    reached = max(reached, rank_time(segments, ranks, rank, [(begin, end)]))
                if reached < value:
                    value = best[end] = reached
                    begin_of[end] = begin
        begins.append(begin_of)
    if best[n] == inf:
        return None
    cuts = [n]
    for begin_of in reversed(begins[1:]):
        cuts.append(begin_of[cuts[-1]])
    return tuple(reversed(cuts))


# ── balanced start and local moves ───────────────────────────────────────────────────────────────────────────────


def balanced(segments: Segments, ranks: Ranks, placement: Sequence[int]) -> Cuts | None:
    """Cut into stages of equal work, or of work in proportion to memory; then move cuts while the objective decreases.

    None if this finds no partition within the memory.
    """
    n = segments.n
    if len(placement) > n:
        return None
    static, kept = segments.static_bytes(0, n), segments.activation_bytes(0, n)
    fitting = [  # the share of the model that the memory of each rank holds
        min(1.0, limit / (static + in_flight * kept or 1.0))
        for limit, in_flight in zip(ranks.memory, ranks.in_flight, strict=True)
    ]
    starts = {_even_cuts(segments, placement, share) for share in (ranks.speed, fitting) if any(share)}
    searches = [_LocalSearch(segments, ranks, placement, list(cuts)) for cuts in starts]
    best = min(searches, key=lambda search: (search.value, search.cuts))
    return None if best.value[0] else tuple(best.cuts)


def _even_cuts(segments: Segments, placement: Sequence[int], share: Sequence[float]) -> Cuts:
    """Cuts for work in proportion to the ``share`` of each rank; each is at the layer boundary closest to the ideal."""
    before, stages = segments.work_before, len(placement)
    ideals = list(accumulate(share[rank] for rank in placement))
    cuts = [0]
    for s, ideal in enumerate(ideals[:-1], 1):
        work = ideal / ideals[-1] * before[-1]
        first, last = cuts[-1] + 1, segments.n - (stages - s)  # every stage has a layer
        cuts.append(min(range(first, last + 1), key=lambda cut: abs(before[cut] - work)))
    return (*cuts[1:], segments.n)


class _LocalSearch:
    """Moves cuts while their ``value`` decreases, in lexicographic order: (missing memory as a fraction of the limit,
    bottleneck, sum of the 8th powers of all times relative to it). The last part counts the ranks near the bottleneck.
    """

    def __init__(self, segments: Segments, ranks: Ranks, placement: Sequence[int], cuts: list[int]) -> None:
        self.segments, self.ranks, self.placement, self.cuts = segments, ranks, placement, cuts
        self.own = [[s for s, other in enumerate(placement) if other == rank] for rank in range(len(ranks))]
        self.channels = [s for s in range(1, len(placement)) if placement[s - 1] != placement[s]]
        self.missing = [0.0] * len(ranks)
        self.times = [self._evaluate(rank) for rank in range(len(ranks))]
        self.value = self._value()
        while sum(map(self._move, self._adjacent_moves())) or any(map(self._move, self._paired_moves())):
            pass

    def _adjacent_moves(self) -> Iterator[dict[int, int]]:
        """Moves of one to three adjacent cuts by one layer."""
        inner = len(self.cuts) - 1
        for first, width, step in product(range(inner), (1, 2, 3), (-1, 1)):
            yield dict.fromkeys(range(first, min(first + width, inner)), step)

    def _paired_moves(self) -> Iterator[dict[int, int]]:
        """Moves of a cut of the slowest rank and of any other cut by one layer."""
        inner = range(len(self.cuts) - 1)
        slowest = self.times.index(max(self.times))
        ends = sorted({at for s in self.own[slowest] for at in (s - 1, s)} & set(inner))
        for a, b, step, other in product(ends, inner, (-1, 1), (-1, 1)):
            if a != b:
                yield {a: step, b: other}

    def _move(self, shifts: dict[int, int]) -> bool:
        """Shift cuts by layers; undo the move unless the value decreases."""
        cuts, before, times, missing = self.cuts, self.value, self.times[:], self.missing[:]
        for at, shift in shifts.items():
            cuts[at] += shift
        if all((cuts[at - 1] if at else 0) < cuts[at] < cuts[at + 1] for at in shifts):
            for rank in {self.placement[s] for at in shifts for s in (at, at + 1)}:
                self.times[rank] = self._evaluate(rank)
            self.value = self._value()
            if self.value < before:
                return True
        for at, shift in shifts.items():
            cuts[at] -= shift
        self.value, self.times, self.missing = before, times, missing
        return False

    def _evaluate(self, rank: int) -> float:
        """The rank's time; infinite if its memory is too small. Sets ``missing`` to the missing fraction."""
        runs = [(self.cuts[s - 1] if s else 0, self.cuts[s]) for s in self.own[rank]]
        time, ranks = rank_time(self.segments, self.ranks, rank, runs), self.ranks
        self.missing[rank] = 0.0
        if time == inf:
            recomputed = {None: ((), range(len(runs))), True: (range(len(runs)),), False: ((),)}[ranks.recompute]
            size = min(rank_bytes(self.segments, runs, chosen, ranks.in_flight[rank]) for chosen in recomputed)
            self.missing[rank] = max(1e-9, size / (ranks.memory[rank] or 1.0) - 1)
        return time

    def _value(self) -> tuple[float, float, float]:
        channels = [self.segments.cut_seconds[self.cuts[s - 1]] for s in self.channels]
        times = [time for time in self.times if time < inf] + channels
        top = max(times, default=0.0)
        return sum(self.missing), top, sum((time / top) ** 8 for time in times) if top else 0.0
