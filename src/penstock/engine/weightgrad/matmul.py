"""``linear``, and products with a weight: ``x @ weight.T + bias``, ``x @ weight + bias``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from penstock.engine.weightgrad.queue import accumulate, changed
from penstock.engine.weightgrad.rules import (
    applier,
    autocast_dtype,
    defers,
    lower,
    lowered,
    optional,
    replay,
)

if TYPE_CHECKING:
    from penstock.engine.weightgrad.queue import WeightGradQueue

__all__ = ["PRODUCTS", "linear"]

_linear = torch._C._nn.linear
_addmm, _matmul, _mm = torch.addmm, torch.matmul, torch.mm
_SMALL = 1 << 16  # elements under which one call counts for more than threads and pairwise sums
_ones: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def linear(queue: WeightGradQueue, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if defers(input, weight) and weight.dim() == 2 and optional(bias):
        return _apply(queue, input, weight, bias, False)
    return _linear(input, weight, bias)


def _any_linear(
    queue: WeightGradQueue, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    if bias is not None and bias.shape != weight.shape[:1]:  # to be broadcast
        return _linear(input, weight, bias)
    return linear(queue, input, weight, bias)


def _matmul_by(plain: Callable[..., Tensor], second: str) -> Callable[..., Tensor]:
    def product(queue: WeightGradQueue, input: Tensor, *others: Tensor, **options: Any) -> Tensor:
        other = options.pop(second) if not others and second in options else others[0]
        flat = plain is _mm
        if not options and defers(input, other) and other.dim() == 2 and (input.dim() == 2 or not flat):
            return _apply(queue, input, other, None, True)
        return plain(input, other, **options)

    return product


def _any_addmm(queue: WeightGradQueue, input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Tensor:
    if (
        not options
        and defers(mat1, mat2)
        and mat1.dim() == mat2.dim() == 2
        and input.shape == mat2.shape[1:]
        and optional(input)
    ):
        return _apply(queue, mat1, mat2, input, True)
    return _addmm(input, mat1, mat2, **options)


def _apply(queue: WeightGradQueue, x: Tensor, weight: Tensor, bias: Tensor | None, flip: bool) -> Tensor:
    used, used_bias = weight, bias
    dtype = autocast_dtype(x)
    if dtype is not None:
        x = lower(x, dtype)
        used = lowered(queue, weight, dtype)
        used_bias = None if bias is None else lowered(queue, bias, dtype)
    wants = x.requires_grad
    spec = (queue, weight, bias, used, used_bias, wants, flip)
    if wants and not queue.recorder.cautious:
        return _product(x, None, None, spec)
    return _product(x, weight, bias, spec)


class _Product(Function):
    """The second and third inputs are there for their edges: without them the node has no way to the parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _w: Tensor | None, _b: Tensor | None, spec: tuple[Any, ...]) -> Tensor:
        _, _, _, weight, bias, wants, flip = ctx.spec = spec
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight if wants else None)
        return _forward(x, weight, bias, flip)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return None, None, None, None
        queue, weight, bias, used, used_bias, _, flip = ctx.spec
        x, w = ctx.saved_tensors
        if not queue.open:
            if used is not weight:  # autocast

                def op() -> Tensor:
                    b = None if bias is None else bias.to(used_bias.dtype)
                    return _forward(x, weight.to(used.dtype), b, flip)
            else:

                def op() -> Tensor:
                    return _forward(x, weight, bias, flip)

            return *replay(ctx, queue, g, op, (x, weight, bias)), None
        queue.entries.append((_work, (x, x._version, g, g._version, weight, bias, flip, queue.recorder.shared)))
        if w is None:
            return None, None, None, None
        return _matmul(g, w.t() if flip else w), None, None, None


_product = applier(_Product)


PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    _linear: _any_linear,
    _addmm: _any_addmm,
    torch.matmul: _matmul_by(_matmul, "other"),
    Tensor.matmul: _matmul_by(_matmul, "other"),
    torch.mm: _matmul_by(_mm, "mat2"),
    Tensor.mm: _matmul_by(_mm, "mat2"),
}


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, flip: bool) -> Tensor:
    if not flip:
        return _linear(x, weight, bias)
    return _matmul(x, weight) if bias is None else _addmm(bias, x, weight)


def _work(
    x: Tensor,
    x_version: int,
    g: Tensor,
    g_version: int,
    weight: Tensor,
    bias: Tensor | None,
    flip: bool,
    shared: frozenset[int],
) -> None:
    if x._version != x_version or g._version != g_version:
        raise changed(weight)
    dims = g.dim()
    if dims == 1:
        x, g = x.unsqueeze(0), g.unsqueeze(0)
    elif dims > 2:
        x, g = x.flatten(0, -2), g.flatten(0, -2)
    gt = g.t()
    left, right = (x.t(), g) if flip else (gt, x)
    grad = weight.grad
    if grad is None or grad.dtype is not x.dtype or shared or grad.is_sparse:
        accumulate(weight, _mm(left, right), shared)
    else:
        grad.addmm_(left, right)
    if bias is not None and bias.requires_grad:
        _bias_work(g, gt, bias, shared)


def _bias_work(g: Tensor, gt: Tensor, bias: Tensor, shared: frozenset[int]) -> None:
    grad = bias.grad
    rows, dtype = g.shape[0], g.dtype
    if grad is None or grad.dtype is not dtype or shared or g.numel() > _SMALL or dtype.itemsize < 4:
        accumulate(bias, g.sum(0), shared)
        return
    key = rows, dtype, g.device
    ones = _ones.get(key)
    if ones is None:
        if len(_ones) > 64:
            _ones.clear()
        ones = _ones[key] = torch.ones(rows, dtype=dtype, device=g.device)
    grad.addmv_(gt, ones)  # one call for sum and add
