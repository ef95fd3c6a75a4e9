"""``embedding``: its input has no gradient, so its whole backward is ``W``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from penstock._torch import unchecked_apply
from penstock.engine.weightgrad.queue import WeightGradQueue, accumulate, backward_in_forward, defers, modified_error

_dense_backward = torch.ops.aten.embedding_dense_backward.default


def embedding(
    queue: WeightGradQueue,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    rows = weight.shape[0]
    if (
        max_norm is None  # changes the weight
        and not sparse
        and (padding_idx is None or -rows <= padding_idx < rows)
        and defers(input, weight)
    ):
        padding = -1 if padding_idx is None else padding_idx % rows
        return _embedding(weight, input, (queue, weight, padding, scale_grad_by_freq))
    return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, spec: tuple[Any, ...]) -> Tensor:
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        return torch.embedding(weight, indices, spec[2], spec[3])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return None, None, None
        queue, weight, padding, scale = ctx.spec
        (indices,) = ctx.saved_tensors
        if not queue.open:

            def op() -> Tensor:
                return torch.embedding(weight, indices, padding, scale)

            return *backward_in_forward(ctx, queue, g, op, (weight,)), None, None
        arguments = indices, indices._version, g, g._version, weight, padding, scale, queue.shared
        queue.entries.append((_work, arguments))
        return None, None, None


_embedding = unchecked_apply(_Embedding)


def _work(
    indices: Tensor,
    indices_version: int,
    g: Tensor,
    g_version: int,
    weight: Tensor,
    padding: int,
    scale: bool,
    shared: frozenset[int],
) -> None:
    if indices._version != indices_version or g._version != g_version:
        raise modified_error(weight)
    grad = weight.grad
    in_use = shared and id(weight) in shared
    if grad is None or in_use or scale or not g.is_cpu or grad.is_sparse or grad.dtype is not g.dtype:
        # On CUDA: the plain backward, which sums by sorted rows. index_add_ there has no fixed order.
        accumulate(weight, _dense_backward(g, indices, weight.shape[0], padding, scale), shared)
        return
    indices, g = indices.flatten(), g.reshape(-1, g.shape[-1])
    if padding >= 0:
        kept = indices != padding
        indices, g = indices[kept], g[kept]
    grad.index_add_(0, indices, g)  # touches only the rows in use
