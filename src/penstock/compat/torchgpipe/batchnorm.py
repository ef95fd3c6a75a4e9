"""BatchNorm layers whose running statistics are those of the mini-batch."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from penstock._torch import BatchNorm
from penstock.engine.forward_context import is_recomputing
from penstock.engine.recompute.batchnorm import DeferredStatistics as Counted

__all__ = ["DeferredBatchNorm"]

M = TypeVar("M", bound=nn.Module)


class DeferredBatchNorm(BatchNorm):
    """Normalises micro-batches by their own statistics, and updates the running ones once for ``chunks`` of them.

    In a ``GPipe`` the mini-batch is known, and its end is when they are updated, however many micro-batches it has.
    """

    sum: Tensor
    sum_squares: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        # Part of torchgpipe's checkpoints. Between mini-batches they are zero there, and here they always are.
        self.register_buffer("sum", torch.zeros(num_features))
        self.register_buffer("sum_squares", torch.zeros(num_features))
        self.chunks = chunks
        self.tracked = 0
        self._counted: Counted | None = None  # what was seen of a mini-batch that is not over

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        # In a pipeline that counts by itself, or that runs without data, the statistics are tensors of other kinds.
        if not self.training or type(self.running_mean) is not Tensor:
            return super().forward(input)
        if self._counted is None:
            self._counted = Counted(self)
        again = is_recomputing()
        with self._counted.quiet if again else self._counted.counting:
            output = super().forward(input)
        self.tracked += not again
        if self.tracked == self.chunks:
            self._counted.commit()
            self._counted, self.tracked = None, 0
        return output

    @classmethod
    def convert_deferred_batch_norm(cls, module: M, chunks: int = 1) -> M:
        """The module with its BatchNorm layers replaced, which keep their parameters, buffers and mode."""
        return _converted(module, chunks, {})


def _converted(module: M, chunks: int, known: dict[int, nn.Module]) -> M:
    found: nn.Module = module
    deferred = isinstance(module, DeferredBatchNorm) and module.chunks == chunks
    if isinstance(module, BatchNorm) and module.track_running_stats and not deferred:
        found = known.get(id(module)) or _like(module, chunks)
        known[id(module)] = found
    for name, child in module.named_children():
        found.add_module(name, _converted(child, chunks, known))
    return found  # type: ignore[return-value]


def _like(module: BatchNorm, chunks: int) -> DeferredBatchNorm:
    made = DeferredBatchNorm(module.num_features, module.eps, module.momentum, module.affine, chunks)
    made._parameters.update(module._parameters)
    made._buffers.update(module._buffers)
    mean = module.running_mean
    for name in ("sum", "sum_squares"):
        if mean is not None and name not in module._buffers:
            made._buffers[name] = torch.zeros_like(mean)
    return made.train(module.training)
