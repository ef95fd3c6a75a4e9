"""What a run of layers takes on a device: the time of a micro-batch, and the bytes that stay or are in flight."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from penstock.profile.costs import Crossing, LayerCosts, ModelCosts

__all__ = ["Segments", "values_of"]


class Segments:
    """Sums over layers ``i`` to ``j``, not included. What several of them share counts once.

    ``recomputed``: a stage keeps what came to it of each micro-batch, and has the activations of one at a time.
    """

    def __init__(self, costs: ModelCosts, *, recomputed: bool = False) -> None:
        self.costs, self.n, self.recomputed = costs, len(costs.layers), recomputed
        layers = costs.layers
        self.works = [_least(layer) + recomputed * layer.recompute for layer in layers]
        self._work = _sums(self.works)
        self._static = _sums(_stays(layer) for layer in layers)
        self._activation = _sums(layer.activation for layer in layers)
        factor = _share(layers)
        self._ties = [(sorted(set(tie.layers)), tie.bytes * factor) for tie in costs.shared]
        self._twice = sorted((max(a, b), min(a, b), size) for a, b, size in costs.kept_together)
        self.crossing = self._crossings()
        self.transfer = [size / costs.link.bandwidth for size in self.crossing]

    def work(self, i: int, j: int) -> float:
        """Seconds of forward and backward."""
        return self._work[j] - self._work[i]

    def static(self, i: int, j: int) -> float:
        """Bytes of parameters, gradients, states of the optimizer and buffers; and of what is recomputed."""
        bytes_ = self._static[j] - self._static[i]
        for layers, size in self._ties:
            inside = bisect_right(layers, j - 1) - bisect_right(layers, i - 1)
            bytes_ -= size * max(0, inside - 1)
        return bytes_ + self._kept(i, j) if self.recomputed else bytes_

    def activation(self, i: int, j: int) -> float:
        """Bytes that are kept of one micro-batch."""
        return self.crossing[i] if self.recomputed else self._kept(i, j)

    def _kept(self, i: int, j: int) -> float:
        """Bytes that the backward of one micro-batch needs."""
        bytes_ = self._activation[j] - self._activation[i]
        for last, first, size in self._twice:
            if last >= j:
                break
            if first >= i:
                bytes_ -= size
        return bytes_

    def _crossings(self) -> list[float]:
        """For a cut before each layer, the bytes that cross it; a value that several layers behind it get, once."""
        reach: dict[tuple[int, int], tuple[int, float]] = {}
        for number, (src, dst, key, size) in enumerate(values_of(self.costs.crossings)):
            whose = (src, -1 - number if key is None else key)
            reach[whose] = max(dst, reach.get(whose, (0, 0.0))[0]), size
        cuts = [0.0] * (self.n + 1)
        for (src, _), (dst, size) in reach.items():
            for cut in range(src + 1, dst + 1):
                cuts[cut] += size
        return cuts


def values_of(crossings: Sequence[Crossing]) -> Iterator[tuple[int, int, int | None, float]]:
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
