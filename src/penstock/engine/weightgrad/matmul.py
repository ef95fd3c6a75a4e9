"""``linear``, and products with a weight: ``x @ weight.T + bias``, ``x @ weight + bias``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from penstock._torch import any_autocast_enabled, functorch_active, unchecked_apply, unsafe_view
from penstock.engine.weightgrad.queue import (
    accumulate,
    active,
    autocast,
    autocast_cached,
    autocast_dtype,
    backward_in_forward,
    defers,
    foreign_hooks,
    is_compiling,
    is_grad_enabled,
    modified_error,
)

if TYPE_CHECKING:
    from penstock.engine.weightgrad.queue import WeightGradQueue
    from penstock.engine.weightgrad.record import WeightGradRecorder

__all__ = ["PRODUCTS", "linear_forward"]

_linear = F.linear
_addmm, _matmul, _mm = torch.addmm, torch.matmul, torch.mm
_SMALL = 1 << 22  # elements under which, on a CPU, a product with ones is as quick as a sum, and precise enough


def linear_forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A ``forward`` for a linear, which most of a stage's time goes to: the common case comes first, in one piece.

    Its conditions are those of ``defers``, where they can change; the others hold for the parameters seen here.
    """
    parameters, plain = module._parameters, nn.Linear.forward
    known = module.weight if type(module.weight) is nn.Parameter and module.weight.is_floating_point() else None
    known_bias = module.bias if type(module.bias) is nn.Parameter else None

    def forward(input: Tensor) -> Tensor:
        if is_compiling():
            return plain(module, input)
        weight, bias, queue = parameters.get("weight"), parameters.get("bias"), active.queue
        if (
            queue is not None
            and weight is not None
            and weight is known
            and bias is known_bias
            and type(input) is Tensor
            and input.requires_grad
            and not queue.cautious
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
        return _cast_and_apply(queue, input, weight, bias, _linear_node)
    return _linear(input, weight, bias)


def _matmul_by(plain: Callable[..., Tensor], second: str) -> Callable[..., Tensor]:
    def product(queue: WeightGradQueue, input: Tensor, *others: Tensor, **options: Any) -> Tensor:
        other = options.pop(second) if not others and second in options else others[0]
        if not options and defers(input, other) and other.dim() == 2 and (input.dim() == 2 or plain is not _mm):
            return _cast_and_apply(queue, input, other, None, _matmul_node)
        return plain(input, other, **options)

    return product


def _any_addmm(queue: WeightGradQueue, input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Tensor:
    if not options and defers(mat1, mat2, input) and mat1.dim() == mat2.dim() == 2 and input.shape == mat2.shape[1:]:
        return _cast_and_apply(queue, mat1, mat2, input, _matmul_node)
    return _addmm(input, mat1, mat2, **options)


def _cast_and_apply(
    queue: WeightGradQueue, x: Tensor, weight: Tensor, bias: Tensor | None, node: Callable[..., Tensor]
) -> Tensor:
    used, used_bias = weight, bias
    dtype = autocast_dtype(x)
    if dtype is not None:
        x = autocast(x, dtype)
        used = autocast_cached(queue, weight, dtype)
        used_bias = None if bias is None else autocast_cached(queue, bias, dtype)
    wants = x.requires_grad
    spec = (queue, weight, bias, used, used_bias, wants)
    return node(x, None, None, spec) if wants and not queue.cautious else node(x, weight, bias, spec)


class _Linear(Function):
    """``x @ weight.T + bias``. The second and third inputs are there only for their edges to the parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _w: Tensor | None, _b: Tensor | None, spec: tuple[Any, ...]) -> Tensor:
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        weight = spec[3]
        ctx.save_for_backward(x, weight if spec[5] else None)
        return _own(_linear(x, weight, spec[4]))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        queue, weight, bias, _, _, wants = ctx.spec
        if g is None:
            return None, None, None, None
        x, w = ctx.saved_tensors
        if not queue.open:
            return *_replayed(ctx, _linear, g, x), None
        x = x.detach()  # W needs the values, not the graph that made them
        queue.entries.append((_linear_work, (x, x._version, g, g._version, weight, bias, queue.recorder)))
        return _matmul(g, w) if wants else None, None, None, None


class _MatMul(Function):
    """``x @ weight``, and ``+ bias``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _w: Tensor | None, _b: Tensor | None, spec: tuple[Any, ...]) -> Tensor:
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, spec[3] if spec[5] else None)
        return _own(_product(x, spec[3], spec[4]))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        queue, weight, bias, _, _, wants = ctx.spec
        if g is None:
            return None, None, None, None
        x, w = ctx.saved_tensors
        if not queue.open:
            return *_replayed(ctx, _product, g, x), None
        x = x.detach()
        queue.entries.append((_matmul_work, (x, x._version, g, g._version, weight, bias, queue.recorder)))
        return _matmul(g, w.t()) if wants else None, None, None, None


def _own(output: Tensor) -> Tensor:
    """The output as a tensor of its own: what is a view when it leaves a node cannot be changed in place."""
    return unsafe_view(output, output.shape) if output._is_view() else output


_linear_node, _matmul_node = unchecked_apply(_Linear), unchecked_apply(_MatMul)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _matmul(x, weight) if bias is None else _addmm(bias, x, weight)


def _replayed(ctx: Any, op: Callable[..., Tensor], g: Tensor, x: Tensor) -> list[Tensor | None]:
    queue, weight, bias, used, _, _ = ctx.spec

    def plain() -> Tensor:
        return op(x, weight.to(used.dtype), None if bias is None else bias.to(used.dtype))

    return backward_in_forward(ctx, queue, g, plain, (x, weight, bias))


PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    _linear: linear,
    _addmm: _any_addmm,
    torch.matmul: _matmul_by(_matmul, "other"),
    Tensor.matmul: _matmul_by(_matmul, "other"),
    torch.mm: _matmul_by(_mm, "mat2"),
    Tensor.mm: _matmul_by(_mm, "mat2"),
}


def _linear_work(
    x: Tensor, seen: int, g: Tensor, g_seen: int, weight: Tensor, bias: Tensor | None, recorder: WeightGradRecorder
) -> None:
    if x._version != seen or g._version != g_seen:
        raise modified_error(weight)
    if g.dim() != 2:
        x, g = _rows(x), _rows(g)
    gt = g.t()
    grad, shared = weight.grad, recorder.shared
    if grad is None or grad.dtype is not x.dtype or grad.is_sparse or (shared and id(weight) in shared):
        accumulate(weight, _mm(gt, x), shared)
    else:
        grad.addmm_(gt, x)
    if bias is not None and bias.requires_grad:
        _bias_work(g, gt, bias, recorder)


def _matmul_work(
    x: Tensor, seen: int, g: Tensor, g_seen: int, weight: Tensor, bias: Tensor | None, recorder: WeightGradRecorder
) -> None:
    if x._version != seen or g._version != g_seen:
        raise modified_error(weight)
    if g.dim() != 2:
        x, g = _rows(x), _rows(g)
    grad, shared = weight.grad, recorder.shared
    if grad is None or grad.dtype is not x.dtype or grad.is_sparse or (shared and id(weight) in shared):
        accumulate(weight, _mm(x.t(), g), shared)
    else:
        grad.addmm_(x.t(), g)
    if bias is not None and bias.requires_grad:
        _bias_work(g, g.t(), bias, recorder)


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
    """A vector as long as ``g``. The recorder keeps it: like a stage, it works on one stream."""
    key = g.shape[0], g.dtype, g.device
    found = recorder.ones.get(key)
    if found is None:
        found = torch.ones(key[0], dtype=key[1], device=key[2])
        if not (g.is_cuda and torch.cuda.is_current_stream_capturing()):  # there it has no values yet
            if len(recorder.ones) > 64:
                recorder.ones.clear()
            recorder.ones[key] = found
    return found
