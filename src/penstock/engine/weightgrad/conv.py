"""Convolutions and transposed convolutions over one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from penstock._torch import unchecked_apply
from penstock.engine.weightgrad.queue import (
    accumulate,
    autocast,
    autocast_cached,
    autocast_dtype,
    backward_in_forward,
    defers,
    modified_error,
)

if TYPE_CHECKING:
    from penstock.engine.weightgrad.queue import WeightGradQueue

__all__ = ["CONVOLUTIONS"]

_convolution = torch.convolution
_backward = torch.ops.aten.convolution_backward.default
_Numbers = int | Sequence[int]


def _conv(plain: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
    def conv(
        queue: WeightGradQueue,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: _Numbers = 1,
        padding: _Numbers | str = 0,
        dilation: _Numbers = 1,
        groups: int = 1,
    ) -> Tensor:
        if _fits(input, weight, dims) and defers(input, weight, bias):
            steps, spread = _spread(stride, dims), _spread(dilation, dims)
            pads = _pads(padding, weight, steps, spread, dims)
            if pads is not None:
                options = steps, pads, spread, False, [0] * dims, groups
                return _apply(queue, input, weight, bias, options)
        return plain(input, weight, bias, stride, padding, dilation, groups)

    return conv


def _conv_transpose(plain: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
    def conv_transpose(
        queue: WeightGradQueue,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: _Numbers = 1,
        padding: _Numbers = 0,
        output_padding: _Numbers = 0,
        groups: int = 1,
        dilation: _Numbers = 1,
    ) -> Tensor:
        if _fits(input, weight, dims) and defers(input, weight, bias):
            numbers = (_spread(n, dims) for n in (stride, padding, dilation, output_padding))
            steps, pads, spread, extra = numbers
            return _apply(queue, input, weight, bias, (steps, pads, spread, True, extra, groups))
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


def _fits(x: Tensor, weight: Tensor, dims: int) -> bool:
    """Otherwise the plain op has the error."""
    return weight.dim() == dims + 2 and dims < x.dim() <= dims + 2


def _spread(value: _Numbers, dims: int) -> list[int]:
    if isinstance(value, int):
        return [value] * dims
    return list(value) * dims if len(value) == 1 else list(value)


def _pads(
    padding: _Numbers | str, weight: Tensor, stride: list[int], dilation: list[int], dims: int
) -> list[int] | None:
    """Padding in numbers. None where only the plain op can do it: 'same' with one side longer than the other."""
    if not isinstance(padding, str):
        return _spread(padding, dims)
    if padding == "valid":
        return [0] * dims
    both = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if padding != "same" or any(s != 1 for s in stride) or any(n % 2 for n in both):
        return None
    return [n // 2 for n in both]


def _apply(queue: WeightGradQueue, x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...]) -> Tensor:
    used, used_bias = weight, bias
    dtype = autocast_dtype(x)
    if dtype is not None:
        x = autocast(x, dtype)
        used = autocast_cached(queue, weight, dtype)
        used_bias = None if bias is None else autocast_cached(queue, bias, dtype)
    alone = x.dim() == weight.dim() - 1
    if alone:
        x = x.unsqueeze(0)
    wants = x.requires_grad
    spec = (queue, weight, bias, used, used_bias, wants, options)
    if wants and not queue.cautious:
        out = _conv_node(x, None, None, spec)
    else:
        out = _conv_node(x, weight, bias, spec)
    return out.squeeze(0) if alone else out


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
    _, of_weight, of_bias = _backward(g, x, weight.to(g.dtype), sizes, *options, [False, True, both])
    accumulate(weight, of_weight, shared)
    if both and bias is not None:
        accumulate(bias, of_bias, shared)
