"""``layer_norm``, ``rms_norm`` and ``group_norm``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from penstock._torch import fused_rms_norm, fused_rms_norm_backward, unchecked_apply
from penstock.engine.weightgrad.queue import (
    WeightGradQueue,
    accumulate,
    autocast_dtype,
    backward_in_forward,
    defers,
    modified_error,
)

_aten = torch.ops.aten
_layer_backward = _aten.native_layer_norm_backward.default
_group_backward = _aten.native_group_norm_backward.default
_LARGE, _LARGE_ON_CUDA = 1 << 20, 1 << 24  # elements whose weight gradient takes longer than the node costs
_NONE = (None, None, None, None)
_X, _WEIGHT, _WEIGHT_BIAS = [True, False, False], [False, True, False], [False, True, True]


class _Kernel(NamedTuple):
    """The functions of one norm. ``forward(x, weight, bias, options)`` returns the output and statistics.

    ``backward(g, x, statistics, weight, bias, options, mask)`` returns the gradients of x, weight and bias in ``mask``.
    """

    forward: Callable[[Tensor, Tensor, Tensor | None, tuple[Any, ...]], tuple[Tensor, ...]]
    backward: Callable[[Tensor, Tensor, Any, Tensor, Tensor | None, tuple[Any, ...], list[bool]], Any]


_LAYER = _Kernel(
    lambda x, w, b, options: torch.native_layer_norm(x, options[0], w, b, options[1]),
    lambda g, x, stats, w, b, options, mask: _layer_backward(g, x, options[0], stats[0], stats[1], w, b, mask),
)
_GROUP = _Kernel(
    lambda x, w, b, options: torch.native_group_norm(x, w, b, *options),
    lambda g, x, stats, w, b, options, mask: _group_backward(
        g.contiguous(), x, stats[0], stats[1], w, *options[:4], mask
    ),
)
_RMS = _Kernel(
    lambda x, w, b, options: fused_rms_norm(x, options[0], w, options[1]),
    lambda g, x, stats, w, b, options, mask: fused_rms_norm_backward(g, x, options[0], stats[0], w, mask[:2]),
)
_SCALE = _Kernel(
    lambda x, w, b, options: (x * w,),
    lambda g, x, stats, w, b, options, mask: (
        g * w if mask[0] else None,
        (g * x).sum_to_size(w.shape) if mask[1] else None,
    ),
)


def layer_norm(
    queue: WeightGradQueue,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if weight is not None and worth_deferring(input, weight) and defers(input, weight, bias):
        return _apply(queue, _LAYER, input, weight, bias, (normalized_shape, eps))
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def group_norm(
    queue: WeightGradQueue,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if weight is not None and worth_deferring(input, weight) and defers(input, weight, bias):
        shape = input.shape
        # The plain op keeps the layout of channels-last inputs, and raises for too few values.
        if len(shape) > 1 and input.is_contiguous() and shape.numel() != num_groups:
            return _apply(queue, _GROUP, input, weight, bias, (shape[0], shape[1], prod(shape[2:]), num_groups, eps))
    return F.group_norm(input, num_groups, weight, bias, eps)


def rms_norm(
    queue: WeightGradQueue,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    supported = fused_rms_norm is not None or not input.is_cuda
    if weight is None or not supported or not worth_deferring(input, weight) or not defers(input, weight):
        return F.rms_norm(input, normalized_shape, weight, eps)
    if input.is_cuda:
        return _apply(queue, _RMS, input, weight, None, (normalized_shape, eps))
    # Elsewhere the op is composite, in at least float32: do the same, with the product with the weight deferred.
    dtype = input.dtype
    wide = input.float() if dtype.itemsize < 4 else input
    normal = F.rms_norm(wide, normalized_shape, None, eps)
    return _apply(queue, _SCALE, normal, weight, None, ()).to(dtype)


def worth_deferring(x: Tensor, weight: Tensor) -> bool:
    """Whether the deferred work takes longer than its node costs.

    Mixed dtypes, and dtypes that autocast may change, are left to the plain op.
    """
    large = x.numel() >= (_LARGE_ON_CUDA if x.is_cuda else _LARGE)
    return large and x.dtype is weight.dtype and (x.dtype.itemsize >= 4 or autocast_dtype(x) is None)


def _apply(
    queue: WeightGradQueue,
    kernel: _Kernel,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: tuple[Any, ...],
) -> Tensor:
    wants = x.requires_grad
    spec = (queue, kernel, weight, bias, wants, options)
    if wants and not queue.keeps_edges:
        return _norm(x, None, None, spec)
    return _norm(x, weight, bias, spec)


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _w: Tensor | None, _b: Tensor | None, spec: tuple[Any, ...]) -> Tensor:
        _, kernel, weight, bias, wants, options = ctx.spec = spec
        ctx.set_materialize_grads(False)
        out: Tensor
        out, *statistics = kernel.forward(x, weight, bias, options)
        ctx.save_for_backward(x, weight if wants else None, *statistics)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return _NONE
        queue, kernel, weight, bias, _, options = ctx.spec
        x, w, *statistics = ctx.saved_tensors
        if not queue.open:

            def op() -> Tensor:
                out: Tensor = kernel.forward(x, weight, bias, options)[0]
                return out

            return *backward_in_forward(ctx, queue, g, op, (x, weight, bias)), None
        x = x.detach()
        queue.entries.append(
            (_work, (x, x._version, g, g._version, kernel, statistics, weight, bias, options, queue.shared))
        )
        if w is None:
            return _NONE
        return kernel.backward(g, x, statistics, w, bias, options, _X)[0], None, None, None


_norm = unchecked_apply(_Norm)


def _work(
    x: Tensor,
    x_version: int,
    g: Tensor,
    g_version: int,
    kernel: _Kernel,
    statistics: list[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    options: tuple[Any, ...],
    shared: frozenset[int],
) -> None:
    if x._version != x_version or g._version != g_version:
        raise modified_error(weight)
    both = bias is not None and bias.requires_grad
    grads = kernel.backward(g, x, statistics, weight, bias, options, _WEIGHT_BIAS if both else _WEIGHT)
    accumulate(weight, grads[1], shared)
    if both and bias is not None:
        accumulate(bias, grads[2], shared)
