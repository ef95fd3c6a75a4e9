"""BatchNorm whose running statistics are those of mini-batches rather than micro-batches."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
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
        self._statistics: list[tuple[int, Tensor, Tensor]] = []  # count, mean, biased variance per micro-batch

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        # A pipeline that defers the update itself, or traces shapes, replaces the buffers by tensor subclasses.
        if not self.training or type(self.running_mean) is not Tensor:
            return super().forward(input)
        self._check_input_dim(input)
        if not ps.is_recomputing():
            self._track(input.detach())
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    @torch.no_grad()
    def _track(self, input: Tensor) -> None:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        var, mean = torch.var_mean(wide, [d for d in range(input.dim()) if d != 1], correction=0)
        self._statistics.append((input.numel() // input.shape[1], mean, var))
        self.tracked += 1
        if self.tracked == self.chunks:
            self._commit()

    def _commit(self) -> None:
        parts, self._statistics, self.tracked = self._statistics, [], 0
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        total = sum(n for n, _, _ in parts)
        mean = sum((mean * (n / total) for n, mean, _ in parts), start=torch.zeros_like(parts[0][1]))
        squares = sum((n * (var + (m - mean).square()) for n, m, var in parts), start=torch.zeros_like(mean))
        self.num_batches_tracked.add_(1)
        factor = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, squares / (total - 1))):
            running.lerp_(new.to(running.dtype), factor)

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
