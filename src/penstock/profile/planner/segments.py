"""What a run of layers takes on a device: the time of a micro-batch, and the bytes that stay or are in flight."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from penstock.profile.costs import Crossing, LayerCosts, ModelCosts

__all__ = ["Segments"]


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
        chain = all(taken == [src + 1] for src, taken, _ in self._values)
        self.even = chain and len(set(self.crossing[1:-1])) < 2  # as much comes to a run wherever it begins
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
        return self.total("waits", i, j) if self._waits else self.activation(i, j)

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

    def own(self, i: int) -> tuple[float, float]:
        """Of a layer's bytes that stay, and of its activation, what it shares with no other."""
        stays = self._static[i + 1] - self._static[i] - sum(size for layers, size in self._ties if i in layers)
        kept = self.activation(i, i + 1) - sum(size for last, first, size in self._twice if i in (first, last))
        return max(0.0, stays), max(0.0, kept)

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
