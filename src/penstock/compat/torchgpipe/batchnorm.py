"""BatchNorm whose running statistics are those of mini-batches rather than micro-batches."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

import penstock as ps
from penstock import hooks
from penstock._torch import BatchNorm

__all__ = ["DeferredBatchNorm"]

M = TypeVar("M", bound=nn.Module)


class DeferredBatchNorm(BatchNorm):
    """Normalises micro-batches by their own statistics and updates the running statistics once per ``chunks`` of them.

    In a ``GPipe`` the pipeline updates them at the end of each mini-batch, whatever its number of micro-batches.
    """

    sum: Tensor
    sum_squares: Tensor

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True, chunks: int = 1
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        # Entries of torchgpipe's checkpoints, zero between mini-batches; unused here.
        self.register_buffer("sum", torch.zeros(num_features))
        self.register_buffer("sum_squares", torch.zeros(num_features))
        self.chunks = chunks
        self.tracked = 0
        self._statistics: hooks.DeferredStatistics | None = None  # of the mini-batch that has begun

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        # A pipeline that defers the update itself, or traces shapes, replaces the buffers by tensor subclasses.
        if not self.training or type(self.running_mean) is not Tensor:
            return super().forward(input)
        if self._statistics is None:
            self._statistics = hooks.DeferredStatistics(self)
        recomputing = ps.is_recomputing()
        with self._statistics.ignoring if recomputing else self._statistics.counting:
            output = super().forward(input)
        self.tracked += not recomputing
        if self.tracked == self.chunks:
            self._statistics.commit()
            self._statistics, self.tracked = None, 0
        return output

    @classmethod
    def convert_deferred_batch_norm(cls, module: M, chunks: int = 1) -> M:
        """Replace BatchNorm layers in ``module``; parameters, buffers and modes are kept."""
        return _convert(module, chunks, {})


def _convert(module: M, chunks: int, converted: dict[int, nn.Module]) -> M:
    result: nn.Module = module
    deferred = isinstance(module, DeferredBatchNorm) and module.chunks == chunks
    if isinstance(module, BatchNorm) and module.track_running_stats and not deferred:
        if id(module) not in converted:
            new = DeferredBatchNorm(module.num_features, module.eps, module.momentum, module.affine, chunks)
            new._parameters.update(module._parameters)
            for name in ("sum", "sum_squares"):  # of the layer's device and dtype
                new._buffers[name] = None if module.running_mean is None else torch.zeros_like(module.running_mean)
            new._buffers.update(module._buffers)
            converted[id(module)] = new.train(module.training)
        result = converted[id(module)]
    for name, child in module.named_children():
        result.add_module(name, _convert(child, chunks, converted))
    return result  # type: ignore[return-value]
