"""``linear``, and products with a weight: ``x @ weight.T + bias``, ``x @ weight + bias``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from penstock._torch import any_autocast_enabled, functorch_active, unchecked_apply, unsafe_view
from penstock.engine.weightgrad.queue import (
    WeightGradQueue,
    WeightGradRecorder,
    accumulate,
    active,
    autocast_arguments,
    backward_in_forward,
    defers,
    foreign_hooks,
    is_compiling,
    is_grad_enabled,
    modified_error,
)

_linear, _addmm, _matmul, _mm = F.linear, torch.addmm, torch.matmul, torch.mm
_SMALL = 1 << 22  # elements under which, on a CPU, a product with ones is as quick as a sum, and precise enough


def linear_forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A ``forward`` for a linear, where most of a stage's time goes: the common case comes first, in one expression.

    It tests those conditions of ``defers`` that can change; the others hold for the parameters found here.
    """
    parameters, plain = module._parameters, nn.Linear.forward
    known = module.weight if type(module.weight) is nn.Parameter and module.weight.is_floating_point() else None
    known_bias = module.bias if type(module.bias) is nn.Parameter else None

    def forward(input: Tensor) -> Tensor:
        if is_compiling():
            return plain(module, input)
        weight, bias, queue = parameters.get("weight"), parameters.get("bias"), active.recording
        if (
            queue is not None
            and weight is not None
            and weight is known
            and bias is known_bias
            and type(input) is Tensor
            and input.requires_grad
            and not queue.keeps_edges
            and weight.requires_grad
            and not weight._backward_hooks
            and not weight._post_accumulate_grad_hooks
            and (
                bias is None
                or (bias.requires_grad and not bias._backward_hooks and not bias._post_accumulate_grad_hooks)
            )
            and is_grad_enabled()
            and not any_autocast_enabled()
            and not functorch_active()
            and not foreign_hooks()
            and input.layout is torch.strided
            and not input.is_nested
        ):
            return _linear_node(input, None, None, (queue, weight, bias, weight, bias, True))
        if queue is None or weight is None:
            return plain(module, input)
        return linear(queue, input, weight, bias)

    return forward


def linear(queue: WeightGradQueue, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if defers(input, weight, bias) and weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1]):
        return _apply(_linear_node, queue, input, weight, bias)
    return _linear(input, weight, bias)


def _deferring_product(plain: Callable[..., Tensor], second: str) -> Callable[..., Tensor]:
    """A deferring ``matmul`` or ``mm``; ``second`` is the keyword of its second argument."""

    def product(queue: WeightGradQueue, input: Tensor, *others: Tensor, **options: Any) -> Tensor:
        other = options.pop(second) if not others and second in options else others[0]
        if not options and defers(input, other) and other.dim() == 2 and (input.dim() == 2 or plain is not _mm):
            return _apply(_matmul_node, queue, input, other, None)
        return plain(input, other, **options)

    return product


def _deferring_addmm(queue: WeightGradQueue, input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Tensor:
    if not options and defers(mat1, mat2, input) and mat1.dim() == mat2.dim() == 2 and input.shape == mat2.shape[1:]:
        return _apply(_matmul_node, queue, mat1, mat2, input)
    return _addmm(input, mat1, mat2, **options)


PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    _linear: linear,
    _addmm: _deferring_addmm,
    torch.matmul: _deferring_product(_matmul, "other"),
    Tensor.matmul: _deferring_product(_matmul, "other"),
    torch.mm: _deferring_product(_mm, "mat2"),
    Tensor.mm: _deferring_product(_mm, "mat2"),
}


def _apply(
    node: Callable[..., Tensor], queue: WeightGradQueue, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    x, used, used_bias = autocast_arguments(queue, x, weight, bias)
    wants = x.requires_grad
    spec = (queue, weight, bias, used, used_bias, wants)
    return node(x, None, None, spec) if wants and not queue.keeps_edges else node(x, weight, bias, spec)


class _Linear(Function):
    """``x @ weight.T + bias``. The second and third inputs are there only for their edges to the parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _w: Tensor | None, _b: Tensor | None, spec: tuple[Any, ...]) -> Tensor:
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        weight = spec[3]
        ctx.save_for_backward(x, weight if spec[5] else None)
        return _not_a_view(_linear(x, weight, spec[4]))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        queue, weight, bias, _, _, wants = ctx.spec
        if g is None:
            return None, None, None, None
        x, w = ctx.saved_tensors
        if not queue.open:
            return *_all_grads(ctx, _linear, g, x), None
        x = x.detach()  # W needs the values, not their graph
        queue.entries.append((_work, (True, x, x._version, g, g._version, weight, bias, queue.recorder)))
        return _matmul(g, w) if wants else None, None, None, None


class _MatMul(Function):
    """``x @ weight + bias``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _w: Tensor | None, _b: Tensor | None, spec: tuple[Any, ...]) -> Tensor:
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, spec[3] if spec[5] else None)
        return _not_a_view(_product(x, spec[3], spec[4]))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        queue, weight, bias, _, _, wants = ctx.spec
        if g is None:
            return None, None, None, None
        x, w = ctx.saved_tensors
        if not queue.open:
            return *_all_grads(ctx, _product, g, x), None
        x = x.detach()
        queue.entries.append((_work, (False, x, x._version, g, g._version, weight, bias, queue.recorder)))
        return _matmul(g, w.t()) if wants else None, None, None, None


_linear_node, _matmul_node = unchecked_apply(_Linear), unchecked_apply(_MatMul)


def _not_a_view(output: Tensor) -> Tensor:
    """A node's output that is a view could not be changed in place."""
    return unsafe_view(output, output.shape) if output._is_view() else output


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _matmul(x, weight) if bias is None else _addmm(bias, x, weight)


def _all_grads(ctx: Any, op: Callable[..., Tensor], g: Tensor, x: Tensor) -> list[Tensor | None]:
    queue, weight, bias, used, _, _ = ctx.spec

    def plain() -> Tensor:
        return op(x, weight.to(used.dtype), None if bias is None else bias.to(used.dtype))

    return backward_in_forward(ctx, queue, g, plain, (x, weight, bias))


def _work(
    is_linear: bool,
    x: Tensor,
    x_version: int,
    g: Tensor,
    g_version: int,
    weight: Tensor,
    bias: Tensor | None,
    recorder: WeightGradRecorder,
) -> None:
    """Add ``g.T @ x`` (linear) or ``x.T @ g`` to the weight's gradient, and the sum of ``g`` to the bias's."""
    if x._version != x_version or g._version != g_version:
        raise modified_error(weight)
    if g.dim() != 2:
        x, g = _rows(x), _rows(g)
    left, right = (g.t(), x) if is_linear else (x.t(), g)
    grad, shared = weight.grad, recorder.shared
    if grad is None or grad.dtype is not x.dtype or grad.is_sparse or (shared and id(weight) in shared):
        accumulate(weight, _mm(left, right), shared)
    else:
        grad.addmm_(left, right)
    if bias is not None and bias.requires_grad:
        _bias_work(g, left if is_linear else g.t(), bias, recorder)


def _rows(t: Tensor) -> Tensor:
    return t.flatten(0, -2) if t.dim() > 1 else t.unsqueeze(0)


def _bias_work(g: Tensor, gt: Tensor, bias: Tensor, recorder: WeightGradRecorder) -> None:
    grad, dtype = bias.grad, g.dtype
    if (
        grad is None
        or grad.dtype is not dtype
        or (recorder.shared and id(bias) in recorder.shared)
        or (g.is_cpu and (g.numel() > _SMALL or dtype.itemsize < 4))
    ):
        accumulate(bias, g.sum(0), recorder.shared)
    else:
        grad.addmv_(gt, _ones(g, recorder))  # sum and add in one call


def _ones(g: Tensor, recorder: WeightGradRecorder) -> Tensor:
    """A vector of ones, one per row of ``g``. The recorder keeps it: like its stage, it works on one stream."""
    key = g.shape[0], g.dtype, g.device
    ones = recorder.ones.get(key)
    if ones is None:
        ones = torch.ones(key[0], dtype=key[1], device=key[2])
        if not (g.is_cuda and torch.cuda.is_current_stream_capturing()):  # a captured tensor has no values yet
            if len(recorder.ones) > 64:
                recorder.ones.clear()
            recorder.ones[key] = ones
    return ones
