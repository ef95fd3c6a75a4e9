"""Convolutions and transposed convolutions over one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from penstock._torch import unchecked_apply
from penstock.engine.weightgrad.queue import (
    WeightGradQueue,
    accumulate,
    autocast_arguments,
    backward_in_forward,
    defers,
    modified_error,
)

_convolution = torch.convolution
_backward = torch.ops.aten.convolution_backward.default
_Ints = int | Sequence[int]


def _conv(plain: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
    def conv(
        queue: WeightGradQueue,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: _Ints = 1,
        padding: _Ints | str = 0,
        dilation: _Ints = 1,
        groups: int = 1,
    ) -> Tensor:
        if _shapes_fit(input, weight, dims) and defers(input, weight, bias):
            strides, dilations = _per_dim(stride, dims), _per_dim(dilation, dims)
            pads = _padding(padding, weight, strides, dilations, dims)
            if pads is not None:
                options = strides, pads, dilations, False, [0] * dims, groups
                return _apply(queue, input, weight, bias, options)
        return plain(input, weight, bias, stride, padding, dilation, groups)

    return conv


def _conv_transpose(plain: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
    def conv_transpose(
        queue: WeightGradQueue,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: _Ints = 1,
        padding: _Ints = 0,
        output_padding: _Ints = 0,
        groups: int = 1,
        dilation: _Ints = 1,
    ) -> Tensor:
        if _shapes_fit(input, weight, dims) and defers(input, weight, bias):
            strides, pads, dilations = (_per_dim(value, dims) for value in (stride, padding, dilation))
            options = strides, pads, dilations, True, _per_dim(output_padding, dims), groups
            return _apply(queue, input, weight, bias, options)
        return plain(input, weight, bias, stride, padding, output_padding, groups, dilation)

    return conv_transpose


CONVOLUTIONS: dict[Any, Callable[..., Tensor]] = {
    F.conv1d: _conv(F.conv1d, 1),
    F.conv2d: _conv(F.conv2d, 2),
    F.conv3d: _conv(F.conv3d, 3),
    F.conv_transpose1d: _conv_transpose(F.conv_transpose1d, 1),
    F.conv_transpose2d: _conv_transpose(F.conv_transpose2d, 2),
    F.conv_transpose3d: _conv_transpose(F.conv_transpose3d, 3),
}


def _shapes_fit(x: Tensor, weight: Tensor, dims: int) -> bool:
    """If not, the plain op raises the error."""
    return weight.dim() == dims + 2 and dims < x.dim() <= dims + 2


def _per_dim(value: _Ints, dims: int) -> list[int]:
    if isinstance(value, int):
        return [value] * dims
    return list(value) * dims if len(value) == 1 else list(value)


def _padding(
    padding: _Ints | str, weight: Tensor, stride: list[int], dilation: list[int], dims: int
) -> list[int] | None:
    """Padding as numbers; None for 'same' with unequal sides, which only the plain op supports."""
    if not isinstance(padding, str):
        return _per_dim(padding, dims)
    if padding == "valid":
        return [0] * dims
    both = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if padding != "same" or any(s != 1 for s in stride) or any(n % 2 for n in both):
        return None
    return [n // 2 for n in both]


def _apply(queue: WeightGradQueue, x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...]) -> Tensor:
    x, used, used_bias = autocast_arguments(queue, x, weight, bias)
    unbatched = x.dim() == weight.dim() - 1
    if unbatched:
        x = x.unsqueeze(0)
    wants = x.requires_grad
    spec = (queue, weight, bias, used, used_bias, wants, options)
    if wants and not queue.keeps_edges:
        out = _conv_node(x, None, None, spec)
    else:
        out = _conv_node(x, weight, bias, spec)
    return out.squeeze(0) if unbatched else out


class _Conv(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _w: Tensor | None, _b: Tensor | None, spec: tuple[Any, ...]) -> Tensor:
        _, _, _, weight, bias, wants, options = ctx.spec = spec
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight if wants else None)
        return _convolution(x, weight, bias, *options)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return None, None, None, None
        queue, weight, bias, used, _, _, options = ctx.spec
        x, w = ctx.saved_tensors
        if not queue.open:

            def op() -> Tensor:
                b = None if bias is None else bias.to(used.dtype)
                return _convolution(x, weight.to(used.dtype), b, *options)

            return *backward_in_forward(ctx, queue, g, op, (x, weight, bias)), None
        x = x.detach()
        queue.entries.append((_work, (x, x._version, g, g._version, weight, bias, options, queue.shared)))
        if w is None:
            return None, None, None, None
        return _backward(g, x, w, None, *options, [True, False, False])[0], None, None, None


_conv_node = unchecked_apply(_Conv)


def _work(
    x: Tensor,
    x_version: int,
    g: Tensor,
    g_version: int,
    weight: Tensor,
    bias: Tensor | None,
    options: tuple[Any, ...],
    shared: frozenset[int],
) -> None:
    if x._version != x_version or g._version != g_version:
        raise modified_error(weight)
    both = bias is not None and bias.requires_grad
    sizes = list(bias.shape) if both and bias is not None else None
    _, weight_grad, bias_grad = _backward(g, x, weight.to(g.dtype), sizes, *options, [False, True, both])
    accumulate(weight, weight_grad, shared)
    if both and bias is not None:
        accumulate(bias, bias_grad, shared)
