"""``Batch``, a tensor or a tuple of tensors, and splitting mini-batches into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import PlanError

__all__ = ["Batch", "TensorOrTensors", "Tensors", "check", "gather", "scatter"]

Tensors: TypeAlias = tuple[Tensor, ...]
TensorOrTensors: TypeAlias = Tensor | Tensors


class Batch:
    """One micro-batch: a tensor (``atomic``) or a tuple of tensors, whose items can be replaced."""

    def __init__(self, value: TensorOrTensors, index: int = 0) -> None:
        self.value, self.index = value, index
        self.atomic = isinstance(value, Tensor)

    @property
    def tensor(self) -> Tensor:
        if not isinstance(self.value, Tensor):
            raise AttributeError("not atomic batch")
        return self.value

    @property
    def tensors(self) -> Tensors:
        if isinstance(self.value, Tensor):
            raise AttributeError("batch is atomic")
        return self.value

    @property
    def tensor_or_tensors(self) -> TensorOrTensors:
        return self.value

    def call(self, function: Callable[[Any], Any]) -> Batch:
        return Batch(function(self.value), self.index)

    def _items(self) -> Tensors:
        return (self.value,) if isinstance(self.value, Tensor) else self.value

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._items())

    def __len__(self) -> int:
        return len(self._items())

    def __getitem__(self, index: int) -> Tensor:
        if self.atomic and index != 0:
            raise IndexError("atomic batch allows index 0 only")
        return self._items()[index]

    def __setitem__(self, index: int | slice, value: Any) -> None:
        if not isinstance(index, slice):
            items = list(self._items())
            _ = self[index]  # raises an IndexError
            items[index] = value
        elif index != slice(None):
            raise NotImplementedError("only slice [:] supported")
        else:
            items = list(value)
            if self.atomic and len(items) != 1:
                raise IndexError("atomic batch cannot be replaced with multiple tensors")
        self.value = items[0] if self.atomic else tuple(items)

    def __repr__(self) -> str:
        return f"Batch[atomic={self.atomic!r}]({self.value!r})"


def check(input: TensorOrTensors) -> None:
    """Raise a ``TypeError`` unless ``input`` is a tensor or a (nested) tuple of tensors."""
    for item in input if isinstance(input, tuple) else (input,):
        if isinstance(item, tuple):
            check(item)
        elif not isinstance(item, Tensor):
            raise TypeError(f"expected Tensor, but got {type(item).__name__}")


def count(input: TensorOrTensors, chunks: int) -> int:
    """The number of micro-batches of a mini-batch: ``chunks``, or its number of samples if that is smaller."""
    lengths = _lengths(input)
    counts = {min(length, chunks) for length in lengths}
    if len(counts) > 1:
        raise PlanError(
            f"the tensors of the input disagree on the batch size: their first dimensions are {lengths}. Give each "
            "sample one entry along dimension 0 of every tensor"
        )
    return counts.pop() if counts else 1


def _lengths(value: Any) -> list[int]:
    if isinstance(value, tuple):
        return [length for item in value for length in _lengths(item)]
    return [len(value)] if value.dim() else []


def scatter(input: TensorOrTensors, chunks: int) -> list[Batch]:
    """Split a mini-batch into micro-batches of nearly equal size. Tensors without dimensions go to each."""
    parts = _split(input, max(1, count(input, chunks)))
    return [Batch(part, index) for index, part in enumerate(parts)]


def _split(value: Any, parts: int) -> Sequence[Any]:
    if isinstance(value, tuple):
        return list(zip(*(_split(item, parts) for item in value), strict=True)) if value else [()] * parts
    return torch.tensor_split(value, parts) if value.dim() else [value] * parts


def gather(outputs: Sequence[Batch]) -> TensorOrTensors:
    """Concatenate micro-batches into a mini-batch."""
    joined: TensorOrTensors = _join([batch.value for batch in outputs])
    return joined


def _join(values: Sequence[Any]) -> Any:
    if isinstance(values[0], tuple):
        return tuple(_join(column) for column in zip(*values, strict=True))
    return torch.cat(list(values)) if values[0].dim() else torch.stack(list(values))
