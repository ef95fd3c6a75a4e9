"""Which of the micro-batches' outputs are kept, and what becomes of them.

"all"       0 1 2 3 4 5    joined along the first dimension
"final"               5
"every:2"     1   3   5    joined
"sum"       0+1+2+3+4+5    added up as they come: no more than one is kept
a function                 called as f(so_far, output) on each in order, with None at first
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from torch import Tensor

from penstock.engine.microbatch import join
from penstock.engine.tree import flatten, unflatten
from penstock.errors import PlanError

__all__ = ["Collector", "Outputs", "collector", "every_of", "refuse_other_layouts"]

Outputs = str | Callable[[Any, Any], Any] | None

Reducer = Callable[[Any, Any], Any]


class Collector:
    """Takes the outputs of a mini-batch's micro-batches, in any order."""

    def wants(self, microbatch: int) -> bool:
        return True

    def add(self, microbatch: int, output: Any) -> None:
        raise NotImplementedError

    def result(self) -> Any:
        raise NotImplementedError


class _Picked(Collector):
    def __init__(self, picked: list[int], sizes: Sequence[int]) -> None:
        self.picked = picked
        self.sizes = sizes
        self.outputs: dict[int, Any] = {}

    def wants(self, microbatch: int) -> bool:
        return microbatch in self.picked

    def add(self, microbatch: int, output: Any) -> None:
        self.outputs[microbatch] = output

    def result(self) -> Any:
        if not self.picked:
            return None
        outputs = [self.outputs[k] for k in self.picked]
        if len(outputs) > 1:
            refuse_other_layouts([flatten(output)[0] for output in outputs], [self.sizes[k] for k in self.picked])
        return join(outputs)


class _Folded(Collector):
    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.so_far: Any = None
        self.next = 0
        self.early: dict[int, Any] = {}

    def add(self, microbatch: int, output: Any) -> None:
        self.early[microbatch] = output
        while self.next in self.early:
            self.so_far = self.reducer(self.so_far, self.early.pop(self.next))
            self.next += 1

    def result(self) -> Any:
        return self.so_far


def collector(outputs: Outputs, sizes: Sequence[int]) -> Collector | None:
    """What keeps the outputs of micro-batches of these sizes; None where none are to be kept."""
    count = len(sizes)
    if outputs is None:
        return None
    if callable(outputs):
        return _Folded(outputs)
    if outputs == "sum":
        return _Folded(_add)
    every = every_of(outputs)
    if outputs == "final":
        return _Picked([count - 1], sizes)
    return _Picked([k for k in range(count) if (k + 1) % every == 0], sizes)


def every_of(outputs: Outputs) -> int:
    """The ``N`` of ``"every:N"``, 1 for other words; an error for what outputs cannot be."""
    if outputs is None or callable(outputs) or outputs in ("all", "final", "sum"):
        return 1
    word, _, number = outputs.partition(":") if isinstance(outputs, str) else ("", "", "")
    if word == "every" and number.isdigit() and int(number) > 0:
        return int(number)
    raise PlanError(
        f"outputs must be 'all', 'final', 'sum', 'every:N', a function of (so_far, output), or None: got {outputs!r}"
    )


def refuse_other_layouts(outputs: Sequence[Sequence[Any]], sizes: Sequence[int]) -> None:
    """Outputs are joined along the first dimension, so it must hold samples: one entry for each, or as many for all.

    How many samples are left may also depend on them: then micro-batches of the same size differ.
    """
    for column in zip(*outputs, strict=False):
        if len(column) < 2 or not all(isinstance(x, Tensor) and x.dim() for x in column):
            continue
        lengths = [len(x) for x in column]
        if set(lengths) == {1} or len(set(zip(sizes, lengths, strict=True))) > len(set(sizes)):
            continue  # what has one entry is a micro-batch's own, such as a loss
        per_sample = {Fraction(length, size) for length, size in zip(lengths, sizes, strict=True)}
        if len(per_sample) > 1 or lengths[0] % sizes[0]:
            raise PlanError(
                f"outputs of micro-batches of {list(sizes)} samples have {lengths} entries along their first "
                "dimension, and cannot be joined there: return outputs with the samples first, or, for a step, say "
                "outputs='final' or None"
            )


def _add(so_far: Any, output: Any) -> Any:
    if so_far is None:
        return output
    (before, spec), (now, other) = flatten(so_far), flatten(output)
    shapes = [[tuple(x.shape) if isinstance(x, Tensor) else None for x in leaves] for leaves in (before, now)]
    if spec != other or shapes[0] != shapes[1]:
        raise PlanError(
            f"outputs='sum' adds outputs of one shape, but micro-batches gave {shapes[0]} and {shapes[1]}: choose a "
            "batch that divides into the micro-batches, or a function of (so_far, output)"
        )
    return unflatten([a + b if isinstance(a, Tensor) else a for a, b in zip(before, now, strict=True)], spec)
