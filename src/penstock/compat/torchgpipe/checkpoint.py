"""A function whose forward is run again for its backward; and whether the code that runs is in one of the two.

In ``GPipe`` the core does this, as part of the schedule. ``checkpoint`` is the same for a function by itself.

    input ──Checkpoint──▶ output ──Recompute──▶        backward comes to Recompute first, which runs the function again,
          (keeps nothing)                              then to Checkpoint, which goes back through what that has made
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from penstock.compat.torchgpipe.microbatch import Batch, TensorOrTensors
from penstock.compat.torchgpipe.phony import get_phony
from penstock.engine.forward_context import (
    CallerContext,
    caller_context,
    forward_state,
    is_checkpointing,
    is_recomputing,
)

__all__ = [
    "Checkpointing",
    "Function",
    "TensorOrTensors",
    "checkpoint",
    "enable_checkpointing",
    "enable_recomputing",
    "is_checkpointing",
    "is_recomputing",
]

Function = Callable[[Any], Any]


def checkpoint(function: Function, input: TensorOrTensors) -> TensorOrTensors:
    """What the function makes of the input. Only that is kept for backward, autocast and the random numbers' states."""
    checkpointing = Checkpointing(function, Batch(input))
    batch = checkpointing.checkpoint()
    checkpointing.recompute(batch)
    return batch.tensor_or_tensors


class Checkpointing:
    """The two halves of ``checkpoint``: ``checkpoint`` gives the output, ``recompute`` is then applied to it."""

    def __init__(self, function: Function, batch: Batch) -> None:
        self.function = function
        self.batch = batch
        self._states: list[Any] = []  # of the random number generators, when the function began
        self._ambient: CallerContext | None = None  # and of the thread
        self._made: tuple[list[Tensor], list[Tensor]] | None = None  # inputs and outputs of the second run

    def checkpoint(self) -> Batch:
        token = get_phony(self.batch[0].device, requires_grad=True)  # so that the output has a graph in any case
        return Batch(Checkpoint.apply(token, self, *self.batch), self.batch.index)  # type: ignore[no-untyped-call]

    def recompute(self, batch: Batch) -> None:
        batch[:] = [
            Recompute.apply(output, self) if output.requires_grad else output  # type: ignore[no-untyped-call]
            for output in batch
        ]

    def _run(self, row: list[Tensor]) -> Any:
        return self.function(row[0] if self.batch.atomic else tuple(row))

    def _first(self, row: list[Tensor]) -> Any:
        cuda = row[0].device if row[0].is_cuda else None
        self._states = [torch.get_rng_state(), None if cuda is None else torch.cuda.get_rng_state(cuda)]
        self._ambient = caller_context()
        with torch.no_grad(), enable_checkpointing():
            return self._run(row)

    def _again(self, saved: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
        if self._made is None:
            inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in saved]
            cuda = [inputs[0].device] if inputs[0].is_cuda else []
            assert self._ambient is not None
            with torch.random.fork_rng(cuda), torch.enable_grad(), enable_recomputing(), ExitStack() as state:
                for context in self._ambient.contexts():
                    state.enter_context(context)
                torch.set_rng_state(self._states[0])
                if cuda:
                    torch.cuda.set_rng_state(self._states[1], cuda[0])
                self._made = inputs, list(Batch(self._run(inputs)))
        return self._made

    def _back(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        inputs, outputs = self._again(saved)
        self._made = None
        pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        return [tensor.grad for tensor in inputs]


class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, of: Checkpointing, *row: Tensor) -> Any:
        ctx.of = of
        ctx.save_for_backward(*row)
        return of._first(list(row))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.of._back(ctx.saved_tensors, grads)


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, of: Checkpointing) -> Tensor:
        ctx.of = of
        ctx.save_for_backward(*of.batch)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.of._again(ctx.saved_tensors)
        return grads[0], None


@contextmanager
def enable_checkpointing() -> Iterator[None]:
    """``is_checkpointing()`` is true meanwhile."""
    before, forward_state.checkpointing = forward_state.checkpointing, True
    try:
        yield
    finally:
        forward_state.checkpointing = before


@contextmanager
def enable_recomputing() -> Iterator[None]:
    """``is_recomputing()`` is true meanwhile."""
    before, forward_state.recomputing = forward_state.recomputing, True
    try:
        yield
    finally:
        forward_state.recomputing = before
