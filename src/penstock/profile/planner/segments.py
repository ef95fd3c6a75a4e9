"""What a run of layers takes on a device: the time of a micro-batch, and the bytes that stay or are in flight."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from operator import add

from penstock.profile.costs import Crossing, LayerCosts, ModelCosts
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Edge

__all__ = [
    "Cuts",
    "Ranks",
    "Runs",
    "Segments",
    "bottleneck",
    "choose_recompute",
    "edges_between",
    "evaluation_effort",
    "fits",
    "rank_bytes",
    "rank_time",
    "stage_costs",
    "static_bytes",
]


class Segments:
    """Sums over layers ``i`` to ``j``, not included. What several of them share counts once."""

    def __init__(self, costs: ModelCosts) -> None:
        self.costs, self.n = costs, len(costs.layers)
        layers = costs.layers
        self.works = [_least(layer) for layer in layers]
        self.done = _sums(self.works)  # the work of all layers before each
        self._totals: dict[str, list[float]] = {}
        self._static = _sums(_stays(layer) for layer in layers)
        self._activation = _sums(layer.activation for layer in layers)
        self._waits = any(layer.deferred is not None for layer in layers)
        self._ties = [
            (sorted(set(tie.layers)), tie.bytes * _share([layers[i] for i in tie.layers])) for tie in costs.shared
        ]
        self._twice = sorted((max(a, b), min(a, b), size) for a, b, size in costs.kept_together)
        self._kept: dict[tuple[int, int], float] = {}
        self._runs: dict[tuple[int, int], tuple[float, float, float, float]] = {}
        self._values = _values(costs.crossings)
        self._coming: dict[int, list[tuple[int, float]]] = {}
        self.crossing = self._crossings()
        self.transfer = [size / costs.link.bandwidth for size in self.crossing]

    def work(self, i: int, j: int) -> float:
        """Seconds of forward and backward."""
        return self.done[j] - self.done[i]

    def total(self, what: str, i: int, j: int) -> float:
        """Seconds or bytes of one kind, added up."""
        if what not in self._totals:
            self._totals[what] = _sums(getattr(layer, what) for layer in self.costs.layers)
        return self._totals[what][j] - self._totals[what][i]

    def again(self, i: int, j: int) -> float:
        """Seconds of the forward once more."""
        return self.total("recompute", i, j)

    def static(self, i: int, j: int) -> float:
        """Bytes of parameters, gradients, states of the optimizer and buffers."""
        bytes_ = self._static[j] - self._static[i]
        for layers, size in self._ties:
            inside = bisect_right(layers, j - 1) - bisect_right(layers, i - 1)
            bytes_ -= size * max(0, inside - 1)
        return bytes_

    def activation(self, i: int, j: int) -> float:
        """Bytes that the backward of one micro-batch needs."""
        if not self._twice:
            return self._activation[j] - self._activation[i]
        if (i, j) not in self._kept:
            bytes_ = self._activation[j] - self._activation[i]
            for last, first, size in self._twice:
                if last >= j:
                    break
                if first >= i:
                    bytes_ -= size
            self._kept[i, j] = bytes_
        return self._kept[i, j]

    def deferred(self, i: int, j: int) -> float:
        """Bytes that its weight gradients need of one micro-batch, if they wait."""
        return self.total("deferred_bytes", i, j) if self._waits else self.activation(i, j)

    def run(self, i: int, j: int) -> tuple[float, float, float, float]:
        """Of a run: seconds of the forward once more, bytes that stay, that the backward needs, and of these that came.

        What comes to a run is taken to be a part of what its backward needs, as it is for linear layers and norms.
        """
        found = self._runs.get((i, j))
        if found is None:
            kept = self.activation(i, j)
            found = self.again(i, j), self.static(i, j), kept, min(kept, self.inputs(i, j))
            self._runs[i, j] = found
        return found

    def inputs(self, i: int, j: int) -> float:
        """Bytes that come to the run from layers before it, for one micro-batch: what is kept to recompute it from."""
        if i not in self._coming:
            self._coming[i] = [
                (next(dst for dst in taken if dst >= i), size)
                for src, taken, size in self._values
                if src < i <= taken[-1]
            ]
        return sum(size for dst, size in self._coming[i] if dst < j)

    def _crossings(self) -> list[float]:
        """For a cut before each layer, the bytes that cross it; a value that several layers behind it get, once."""
        cuts = [0.0] * (self.n + 1)
        for src, taken, size in self._values:
            for cut in range(src + 1, taken[-1] + 1):
                cuts[cut] += size
        return cuts


def _values(crossings: Sequence[Crossing]) -> list[tuple[int, list[int], float]]:
    """The values that cross: the layer that each is from, those that take it, and its bytes."""
    taken: dict[tuple[int, int], tuple[list[int], float]] = {}
    for number, (src, dst, key, size) in enumerate(_values_of(crossings)):
        whose = (src, -1 - number if key is None else key)
        taken[whose] = sorted([*taken.get(whose, ([],))[0], dst]), size
    return [(src, layers, size) for (src, _), (layers, size) in taken.items()]


def _values_of(crossings: Sequence[Crossing]) -> Iterator[tuple[int, int, int | None, float]]:
    """What crosses: from which layer, to which one, its number where it has one, and its bytes."""
    for crossing in crossings:
        if crossing.values:
            for key, size in crossing.values:
                yield crossing.src, crossing.dst, key, size
        else:
            yield crossing.src, crossing.dst, None, crossing.bytes


def _sums(numbers: Iterable[float]) -> list[float]:
    return [0.0, *accumulate(numbers)]


def _least(layer: LayerCosts) -> float:
    """Forward and backward, which may be split or not: as it is faster."""
    return layer.forward + min(layer.full_backward, layer.input_gradient + layer.weight_gradient)


def _stays(layer: LayerCosts) -> float:
    return layer.parameters + layer.gradients + layer.optimizer + layer.buffers


def _share(layers: Sequence[LayerCosts]) -> float:
    """How many times their own size parameters take with gradients and states."""
    own = sum(layer.parameters for layer in layers)
    return sum(_stays(layer) - layer.buffers for layer in layers) / own if own else 1.0


# How busy ranks are with given cuts, and whether they have the memory for them.

Cuts = tuple[int, ...]
"""Where the stages end: the last one at the last layer."""

Runs = Sequence[tuple[int, int]]
"""The layers of a rank's stages: from which, up to which, not included."""


@dataclass(frozen=True)
class Ranks:
    """The devices in their order: how fast each is, its memory, and how many micro-batches it has in flight.

    ``recompute``: all stages, none, or (None) those that need it for the memory.
    """

    speed: tuple[float, ...]
    memory: tuple[float, ...]
    in_flight: tuple[float, ...]
    recompute: bool | None = False

    def __len__(self) -> int:
        return len(self.speed)


def bottleneck(segments: Segments, ranks: Ranks, placement: Sequence[int], cuts: Cuts) -> float:
    """The time of the busiest rank or channel for one micro-batch; infinite where a rank's memory is too small."""
    runs: list[list[tuple[int, int]]] = [[] for _ in range(len(ranks))]
    for rank, run in zip(placement, pairwise((0, *cuts)), strict=True):
        runs[rank].append(run)
    busiest = max(rank_time(segments, ranks, rank, own) for rank, own in enumerate(runs))
    here = pairwise(zip(placement, (0, *cuts), strict=False))
    crossing = [segments.transfer[begin] for (a, _), (b, begin) in here if a != b]
    return max([busiest, *crossing])


def rank_time(segments: Segments, ranks: Ranks, rank: int, runs: Runs) -> float:
    """A rank's time for one micro-batch; infinite where its memory is too small."""
    again = choose_recompute(segments, ranks, rank, runs)
    return inf if again is None else _work(segments, runs, again) / ranks.speed[rank]


def fits(segments: Segments, ranks: Ranks, rank: int, below: float, runs: Runs) -> bool:
    """Whether a rank takes less than some time for these runs of layers, and has the memory."""
    most = below * ranks.speed[rank]
    if not _work(segments, runs, ()) < most:
        return False
    if ranks.recompute is False and ranks.memory[rank] == inf:
        return True
    again = choose_recompute(segments, ranks, rank, runs)
    return again is not None and _work(segments, runs, again) < most


def evaluation_effort(ranks: Ranks, runs: int) -> int:
    """How much effort it is to see whether so many runs fit, in less than a microsecond each."""
    if ranks.recompute is None and min(ranks.memory) < inf:
        return 5 + 2 * runs + (1 << runs)
    return 3 + (4 if ranks.recompute else 2) * runs


def choose_recompute(segments: Segments, ranks: Ranks, rank: int, runs: Runs) -> tuple[int, ...] | None:
    """Which of the runs to recompute, so that the rank has the memory, and its work is the least; None if none will."""
    limit, count = ranks.memory[rank], ranks.in_flight[rank]
    if ranks.recompute is not None or limit == inf:
        again = tuple(range(len(runs))) if ranks.recompute else ()
        return again if limit == inf or rank_bytes(segments, runs, again, count) <= limit else None
    if rank_bytes(segments, runs, (), count) <= limit:
        return ()
    return _least_again(segments, runs, limit, count)


def rank_bytes(segments: Segments, runs: Runs, again: Sequence[int], in_flight: float) -> float:
    """A rank's bytes with so many micro-batches in flight; of those that are recomputed, one is there at a time."""
    total, most = 0.0, 0.0
    for number, run in enumerate(runs):
        _, stays, kept, came = segments.run(*run)
        if number in again:
            total += stays + in_flight * came
            most = max(most, kept - came)
        else:
            total += stays + in_flight * kept
    return total + most


def _work(segments: Segments, runs: Runs, again: Sequence[int]) -> float:
    work = 0.0
    for i, j in runs:
        work += segments.work(i, j)
    for number in again:
        work += segments.again(*runs[number])
    return work


def _least_again(segments: Segments, runs: Runs, limit: float, in_flight: float) -> tuple[int, ...] | None:
    """Of all choices of runs, the one that takes the least work again; of several such, one with few runs."""
    sizes = [segments.run(*run) for run in runs]
    excess = sum(stays + in_flight * kept for _, stays, kept, _ in sizes) - limit
    if excess > in_flight * sum(kept - came for _, _, kept, came in sizes):
        return None
    choices: list[tuple[float, float, float, tuple[int, ...]]] = [(0.0, 0.0, 0.0, ())]  # work, bytes less, at once
    for number, (work, _, kept, came) in enumerate(sizes):
        away = kept - came
        if away > 0:
            choices += [
                (more + work, less + in_flight * away, max(most, away), (*again, number))
                for more, less, most, again in choices
            ]
    fit = [(work, len(again), again) for work, less, most, again in choices if less - most >= excess]
    return min(fit)[2] if fit else None


# From layers to stages: what a schedule's work costs where a model is cut.


def stage_costs(segments: Segments, ranks: Ranks, placement: Sequence[int], cuts: Cuts) -> Costs:
    """Seconds and bytes of each stage, on the rank that it is placed on.

    The host's time for messages is part of the actions around them.
    """
    link, beside = segments.costs.link, segments.costs.overhead
    runs = list(pairwise((0, *cuts)))

    def of(what: str, extra: float) -> tuple[float, ...]:
        return tuple(
            (segments.total(what, i, j) + extra) / ranks.speed[rank]
            for rank, (i, j) in zip(placement, runs, strict=True)
        )

    edges = edges_between(segments, cuts)
    messages = [  # of one micro-batch there, and as much back
        sum(link.host_seconds(size) for edge, size in edges.items() if stage in edge and _crosses(edge, placement))
        for stage in range(len(runs))
    ]
    activation = [segments.activation(i, j) for i, j in runs]
    inputs = [min(segments.inputs(i, j), kept) for (i, j), kept in zip(runs, activation, strict=True)]
    return Costs(
        f=tuple(map(add, of("forward", beside.forward), messages)),
        i=tuple(map(add, of("input_gradient", beside.input_gradient), messages)),
        w=of("weight_gradient", beside.weight_gradient),
        b=tuple(map(add, of("full_backward", beside.backward), messages)),
        r=of("recompute", beside.recompute),
        latency=link.latency,
        bandwidth=link.bandwidth,
        bytes=edges,
        activation=tuple(activation),
        keep=tuple(
            segments.deferred(i, j) / kept if kept else 1.0 for (i, j), kept in zip(runs, activation, strict=True)
        ),
        checkpoint=tuple(came / kept if kept else 0.0 for came, kept in zip(inputs, activation, strict=True)),
    )


def _crosses(edge: Edge, placement: Sequence[int]) -> bool:
    """Whether an edge goes from one rank to another."""
    return placement[edge[0]] != placement[edge[1]]


def edges_between(segments: Segments, cuts: Cuts) -> dict[Edge, float]:
    """What goes from one stage to another: bytes. Every stage has an edge to the next, if only with nothing in it."""
    stages = [range(i, j) for i, j in pairwise((0, *cuts))]
    stage_of = [stage for stage, layers in enumerate(stages) for _ in layers]
    pairs = {(stage_of[crossing.src], stage_of[crossing.dst]) for crossing in segments.costs.crossings}
    wanted = sorted({pair for pair in pairs if pair[0] != pair[1]} | set(pairwise(range(len(cuts)))))
    return {(src, dst): segments.costs.bytes_between(stages[src], stages[dst]) for src, dst in wanted}


def static_bytes(segments: Segments, placement: Sequence[int], cuts: Cuts, p: int) -> tuple[float, ...]:
    """For each rank, what it holds all the time: parameters, gradients, states of the optimizer, buffers."""
    held = [0.0] * p
    for rank, (i, j) in zip(placement, pairwise((0, *cuts)), strict=True):
        held[rank] += segments.static(i, j)
    return tuple(held)
