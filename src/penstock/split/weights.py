"""What the layers of a line weigh: their parameters, the memory that they take, and limits on it."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.split.line import Line

__all__ = [
    "TRAINED",
    "LayerCost",
    "Measurement",
    "bytes_of",
    "limits_of",
    "memory_pieces",
    "parameter_counts",
    "tensor_bytes",
]

TRAINED = 4.0
"""How many times its own size a parameter takes in training: itself, its gradient, two states of the optimizer."""

_UNITS = {"": 1} | {
    f"{letter}{i}b": (1024 if i else 1000) ** n for n, letter in enumerate("kmgt", 1) for i in ("", "i")
}
_UNITS["b"] = 1


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs on a sample: seconds and bytes."""

    name: str
    forward: float
    backward: float
    activation_bytes: int
    parameter_bytes: int
    sends: tuple[Mapping[int, int], ...]
    """What goes over each edge that leaves it, in the order of their destinations: the numbers of its values (one that
    goes over several edges has one number) and their bytes."""

    @property
    def output_bytes(self) -> tuple[int, ...]:
        """The bytes that go over each edge."""
        return tuple(sum(values.values()) for values in self.sends)


@dataclass(frozen=True)
class Measurement:
    """What all layers cost, and what they share."""

    layers: tuple[LayerCost, ...]
    kept: tuple[Mapping[int, int], ...]
    """What each layer keeps for its backward: the number of a storage, and its bytes."""
    crossing: tuple[int, ...]
    """The bytes that cross a cut before each layer; what several layers behind it need counts once."""


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def parameter_counts(line: Line) -> list[int]:
    """The number of parameters of each layer, and one more.

    A layer without parameters is not free: one unit keeps such layers from all landing in one stage. What two layers
    share counts in both, since both have to compute with it.
    """
    counts = []
    for layer in line.layers:
        own = {id(tensor): tensor.numel() for _, tensor in line.members(layer) if isinstance(tensor, nn.Parameter)}
        counts.append(1 + sum(own.values()))
    return counts


def memory_pieces(
    line: Line, measured: Measurement | None, *, scale: float = TRAINED, chunks: int = 1
) -> list[dict[Hashable, float]]:
    """The bytes that each layer takes, piece by piece, so that a stage counts what its layers share once.

    A parameter that is trained counts ``scale`` times, one that is frozen and a buffer once. With a measurement, the
    values that its backward needs count too: those of one micro-batch, if the sample makes ``chunks`` of them.
    """
    pieces: list[dict[Hashable, float]] = []
    for i, layer in enumerate(line.layers):
        taken: dict[Hashable, float] = {}
        for _, tensor in line.members(layer):
            trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
            taken["member", id(tensor)] = tensor_bytes(tensor) * (scale if trained else 1)
        if measured is not None:
            taken.update((("kept", key), size / chunks) for key, size in measured.kept[i].items())
        pieces.append(taken)
    return pieces


def limits_of(memory: Any, stages: int) -> list[int]:
    """The limit of each stage in bytes, from one for all stages or a list with one for each."""
    if isinstance(memory, (str, int, float)) or not isinstance(memory, Iterable):
        return [bytes_of(memory)] * stages
    limits = [bytes_of(limit) for limit in memory]
    if len(limits) != stages:
        raise PlanError(f"memory has {len(limits)} limits, but there are {stages} stages: give one for each, or one")
    return limits


def bytes_of(size: Any) -> int:
    """A number of bytes, from a number or a text such as "16GiB" or "500 MB"."""
    number, unit = size, ""
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)\s*", size)
        if found is None or found[2].lower() not in _UNITS:
            raise PlanError(f'memory={size!r} is not a size: write a number of bytes, "16GiB" or "500MB"')
        number, unit = float(found[1]), found[2].lower()
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
        raise PlanError(f'memory={size!r} is not a size: write a number of bytes, "16GiB" or "500MB"')
    return int(number * _UNITS[unit])
