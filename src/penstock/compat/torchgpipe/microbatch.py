"""Values that are a tensor or a tuple of tensors, and mini-batches in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from penstock.engine import microbatch as core
from penstock.engine.message import flatten

__all__ = ["Batch", "TensorOrTensors", "Tensors", "check", "gather", "scatter"]

Tensors: TypeAlias = tuple[Tensor, ...]
TensorOrTensors: TypeAlias = Tensor | Tensors


class Batch:
    """A tensor, or a tuple of tensors, as a row of tensors that can be replaced. ``index`` is the micro-batch's."""

    def __init__(self, value: TensorOrTensors, index: int = 0) -> None:
        self.value = value
        self.atomic = isinstance(value, Tensor)
        self.index = index

    @property
    def tensor(self) -> Tensor:
        """The tensor, of a batch that is one."""
        if not isinstance(self.value, Tensor):
            raise AttributeError("not atomic batch")
        return self.value

    @property
    def tensors(self) -> Tensors:
        """The tuple of tensors, of a batch that is one."""
        if isinstance(self.value, Tensor):
            raise AttributeError("batch is atomic")
        return self.value

    @property
    def tensor_or_tensors(self) -> TensorOrTensors:
        return self.value

    def call(self, function: Callable[[Any], Any]) -> Batch:
        """What a function makes of the value, as a batch."""
        return Batch(function(self.value), self.index)

    @property
    def anchor(self) -> int:
        """Which tensor to tie to other parts of autograd's graph: one with a gradient, or that may have one."""
        fitting = [[x.requires_grad for x in self], [x.is_floating_point() for x in self]]
        return next((fits.index(True) for fits in fitting if any(fits)), 0)

    def _row(self) -> Tensors:
        return (self.value,) if isinstance(self.value, Tensor) else self.value

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._row())

    def __len__(self) -> int:
        return len(self._row())

    def __getitem__(self, index: int) -> Tensor:
        self._check(index)
        return self._row()[index]

    def __setitem__(self, index: int | slice, value: Any) -> None:
        if isinstance(index, slice):
            if index != slice(None):
                raise NotImplementedError("only slice [:] supported")
            row = tuple(value)
            if self.atomic and len(row) != 1:
                raise IndexError("atomic batch cannot be replaced with multiple tensors")
        else:
            self._check(index)
            changed = list(self._row())
            changed[index] = value
            row = tuple(changed)
        self.value = row[0] if self.atomic else row

    def _check(self, index: int) -> None:
        if self.atomic and index != 0:
            raise IndexError("atomic batch allows index 0 only")

    def __repr__(self) -> str:
        return f"Batch[atomic={self.atomic!r}]({self.value!r})"


def check(input: TensorOrTensors) -> None:
    """A TypeError for anything but a tensor or a tuple of tensors."""
    for part in input if isinstance(input, tuple) else (input,):
        if isinstance(part, tuple):
            check(part)
        elif not isinstance(part, Tensor):
            raise TypeError(f"expected Tensor, but got {type(part).__name__}")


def scatter(input: TensorOrTensors, chunks: int) -> list[Batch]:
    """The micro-batches of a mini-batch, as even as can be: as many as ``chunks``, if there are enough samples.

    Tensors of a tuple may differ in their sizes, if as many parts can be made of each.
    """
    if len({len(tensor) for tensor in flatten(input)[0] if tensor.dim()}) <= 1:
        parts: Iterable[Any] = core.scatter(input, sizes(input, chunks))
    else:
        columns = [core.scatter(tensor, sizes(tensor, chunks)) for tensor in input]
        if len(set(map(len, columns))) > 1:
            core.batch_size(input, "input")  # says what is wrong
        parts = zip(*columns, strict=True)
    return [Batch(part, i) for i, part in enumerate(parts)]


def sizes(input: TensorOrTensors, chunks: int) -> Sequence[int]:
    """How many samples each of the micro-batches has."""
    size = core.batch_size(input, "input")
    return core.microbatch_sizes(1 if size is None else size, chunks)


def gather(outputs: Sequence[Batch]) -> TensorOrTensors:
    """The mini-batch of some micro-batches."""
    joined: TensorOrTensors = core.join([batch.value for batch in outputs])
    return joined
