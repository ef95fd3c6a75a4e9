"""What a call returns of the outputs of its micro-batches.

A call has ``deviceIterations × gradientAccumulation`` turns; in each, every replica has one micro-batch:

    turn       0     1     2     3        samples of a call, in order: turn by turn, replica by replica
    replica    0 1   0 1   0 1   0 1
    Final                        ▪ ▪
    EveryN(2)        ▪ ▪         ▪ ▪
    All        ▪ ▪   ▪ ▪   ▪ ▪   ▪ ▪
    Sum        the sum of each replica's outputs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.compat.poptorch.enums import OutputMode
from penstock.compat.poptorch.errors import Error
from penstock.compat.poptorch.options import Options
from penstock.engine.message import flatten, unflatten

__all__ = ["Kept", "Taker"]


class Kept:
    """Takes the outputs of one call's micro-batches in order; ``result`` is what the call returns, on the host."""

    def __init__(self, options: Options, *, training: bool) -> None:
        mode = options.output_mode
        if mode == OutputMode.Default:
            mode = OutputMode.Final if training else OutputMode.All
        self.sums = mode == OutputMode.Sum
        self.replicas: int = options.replication_factor
        self.turns: int = options.device_iterations * options.Training.gradient_accumulation
        self.period = {OutputMode.Final: self.turns, OutputMode.EveryN: options.output_return_period}.get(mode, 1)
        self.taken = 0
        self.spec: Any = None
        self.rows: list[list[Any]] = []  # the leaves of each output that is kept
        if self.period > self.turns:
            raise Error(
                f"OutputMode.EveryN returns the output of every {self.period}th micro-batch, but a call has "
                f"{self.turns}: choose an output_return_period of at most that"
            )

    def take(self, output: Any) -> None:
        """The output of the next micro-batch."""
        turn, replica = divmod(self.taken, self.replicas)
        self.taken += 1
        if (turn + 1) % self.period:
            return
        leaves, spec = flatten(output)
        if self.rows and spec != self.spec:
            raise Error("the model returned outputs of another structure than before: they cannot be joined")
        self.spec = spec
        if self.sums and turn:
            self.rows[replica] = [_sum(pair) for pair in zip(self.rows[replica], leaves, strict=True)]
        else:
            self.rows.append(leaves)

    def result(self) -> Any:
        leaves = [_joined(column) for column in zip(*self.rows, strict=True)]
        return unflatten(leaves, self.spec)


class Taker:
    """A pipeline's ``outputs``: hands each one on to what the call that is under way keeps."""

    kept: Kept | None = None

    def __call__(self, so_far: None, output: Any) -> None:
        assert self.kept is not None
        self.kept.take(output)


def _sum(pair: tuple[Any, Any]) -> Any:
    before, now = pair
    return before + now if isinstance(now, Tensor) else now


def _joined(column: Sequence[Any]) -> Any:
    """One value of many: tensors along their first dimension, and numbers as a vector, unless there is just one."""
    if not isinstance(column[-1], Tensor):
        return column[-1]
    if column[0].dim():
        whole = torch.cat(list(column))
    else:
        whole = torch.stack(list(column)) if len(column) > 1 else column[0].clone()
    on_host = whole.cpu()
    refuse: Callable[..., None] = _no_backward
    on_host.backward = refuse  # type: ignore[method-assign]
    return on_host


def _no_backward(*args: Any, **kwargs: Any) -> None:
    raise Error(
        "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a trainingModel, the "
        "backwards pass is performed automatically when invoking the model. If you're using an inferenceModel, you "
        "should use a trainingModel instead."
    )
