"""Ops whose weight gradients can be deferred: ``linear``, products with a weight, convolutions, norms, ``embedding``.

Each kind of op has a rule: its forward, the gradient of its input for I, and the work for W. One autograd function
implements all of them. The functions in ``OPS`` take a queue and the arguments of the torch functions that they
replace. They call the torch function if nothing can be deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from penstock._torch import (
    any_autocast_enabled,
    functorch_active,
    fused_rms_norm,
    fused_rms_norm_backward,
    unchecked_apply,
    unsafe_view,
)
from penstock.engine.weightgrad.queue import (
    WeightGradQueue,
    WeightGradRecorder,
    accumulate,
    active,
    defers,
    foreign_hooks,
    is_compiling,
    is_grad_enabled,
    modified_error,
)
from penstock.errors import PipelineError

_linear, _addmm, _matmul, _mm, _convolution = F.linear, torch.addmm, torch.matmul, torch.mm, torch.convolution
_aten = torch.ops.aten
_SMALL = 1 << 22  # below this number of elements, on a CPU, a product with ones is as fast as a sum and precise enough
_LARGE, _LARGE_ON_CUDA = 1 << 20, 1 << 24  # elements from which a norm's weight gradient takes longer than its node
_Options = tuple[Any, ...]
_DeferringFunction = Callable[..., Tensor]  # a queue, then the arguments of a torch function


class _Rule(NamedTuple):
    """One kind of op: ``forward(x, weight, bias, *options)`` returns y, or y with statistics for the backward.

    ``input_grad(g, x, weight, bias, statistics, options)`` returns the gradient of x. ``work(entry)`` adds to the
    gradients of the parameters. With ``autocast`` the arguments are cast as for a matrix product.
    """

    forward: Callable[..., Any]
    input_grad: Callable[..., Tensor] | None
    work: Callable[..., None]
    autocast: bool


# An entry of the queue: the rule, x and its version, g and its version, weight, bias, statistics, options, recorder.
_Entry = tuple[_Rule, Tensor, int, Tensor, int, Tensor, Tensor | None, tuple[Tensor, ...], _Options, WeightGradRecorder]


class _DeferringOp(Function):
    """The second and third inputs serve only for the gradient edges to the parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _w: Tensor | None, _b: Tensor | None, spec: tuple[Any, ...]) -> Tensor:
        _, rule, _, _, weight, bias, wants, options = ctx.spec = spec
        ctx.set_materialize_grads(False)
        out = rule.forward(x, weight, bias, *options)
        if type(out) is tuple:
            out, *statistics = out
            ctx.save_for_backward(x, weight if wants else None, *statistics)
        else:
            ctx.save_for_backward(x, weight if wants else None)
        # If the output of a node is a view, it cannot be changed in place.
        return unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return None, None, None, None
        queue, rule, weight, bias, _, _, wants, options = ctx.spec
        saved = ctx.saved_tensors
        x, w, statistics = saved[0], saved[1], saved[2:]
        if not queue.open:
            return *_backward_in_forward(ctx, g, x), None
        x = x.detach()  # W needs the values, not their graph
        _, input_grad, work, _ = rule
        queue.entries.append(
            (work, (rule, x, x._version, g, g._version, weight, bias, statistics, options, queue.recorder))
        )
        return input_grad(g, x, w, bias, statistics, options) if wants else None, None, None, None


def _backward_in_forward(ctx: Any, g: Tensor, x: Tensor) -> list[Tensor | None]:
    """All gradients of a node in a backward that is not an I, because autograd was called in a stage's forward.

    Parameters have gradient edges only while the recorder keeps them.
    """
    queue, rule, weight, bias, used, _, _, options = ctx.spec
    inputs = list(zip((x, weight, bias), ctx.needs_input_grad, strict=False))
    if any(tensor is not None and tensor.requires_grad and not needed for tensor, needed in inputs):
        raise PipelineError(
            "autograd ran inside the forward of a stage whose backward is split into I and W, and did not on the "
            "stage's first micro-batch. Call it on every micro-batch, or use a schedule without W, such as '1f1b'."
        )
    queue.recorder.autograd_in_forward = True
    create_graph = is_grad_enabled()
    with torch.enable_grad():
        out = rule.forward(x, weight.to(used.dtype), None if bias is None else bias.to(used.dtype), *options)
        out = out[0] if type(out) is tuple else out
        wanted = [tensor for tensor, needed in inputs if needed]
        grads = iter(torch.autograd.grad(out, wanted, g, create_graph=create_graph))
    return [next(grads) if needed else None for _, needed in inputs]


class _DeferringLinear(_DeferringOp):
    """The forward of ``_DeferringOp`` for ``linear`` only, which saves 2 % of a small forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _w: Tensor | None, _b: Tensor | None, spec: tuple[Any, ...]) -> Tensor:
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        weight = spec[4]
        ctx.save_for_backward(x, weight)
        out = _linear(x, weight, spec[5])
        return unsafe_view(out, out.shape) if out._is_view() else out


_node, _linear_node = unchecked_apply(_DeferringOp), unchecked_apply(_DeferringLinear)


def _apply(
    queue: WeightGradQueue, rule: _Rule, x: Tensor, weight: Tensor, bias: Tensor | None = None, options: _Options = ()
) -> Tensor:
    used, used_bias = weight, bias
    if rule.autocast and any_autocast_enabled() and (dtype := _autocast_dtype(x)) is not None:
        x, used = _cast(x, dtype), _cast_cached(queue, weight, dtype)
        used_bias = None if bias is None else _cast_cached(queue, bias, dtype)
    wants = x.requires_grad
    spec = (queue, rule, weight, bias, used, used_bias, wants, options)
    return _node(x, None, None, spec) if wants and not queue.keeps_edges else _node(x, weight, bias, spec)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast runs matrix products, if it is enabled for the device of ``x``."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor


def _cast_cached(queue: WeightGradQueue, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter as autocast casts it, once per forward, like autocast's cache."""
    cached = queue.casts.get(id(parameter))
    if cached is None or cached[1] != parameter._version or cached[2].dtype is not dtype:
        cached = parameter, parameter._version, _cast(parameter.detach(), dtype)
        queue.casts[id(parameter)] = cached
    return cached[2]


# ── products ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def linear(queue: WeightGradQueue, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if defers(input, weight, bias) and weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1]):
        return _apply(queue, _LINEAR, input, weight, bias)
    return _linear(input, weight, bias)


def linear_forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A ``forward`` for ``nn.Linear``, optimised for its most common case because most ops of a stage are linears."""
    parameters, plain = module._parameters, nn.Linear.forward
    known = module.weight if type(module.weight) is nn.Parameter else None
    known_bias = module.bias if type(module.bias) is nn.Parameter else None

    def forward(input: Tensor) -> Tensor:
        if is_compiling() or (queue := active.recording) is None:
            return plain(module, input)
        weight, bias = parameters.get("weight"), parameters.get("bias")
        # The conditions of ``defers``, inlined for known parameters: the call costs 4 % of a small forward.
        if (
            weight is not None
            and weight is known
            and bias is known_bias
            and type(input) is Tensor
            and input.requires_grad
            and not queue.keeps_edges
            and weight.requires_grad
            and not weight._backward_hooks
            and not weight._post_accumulate_grad_hooks
            and weight.is_floating_point()
            and (bias is None or not (bias._backward_hooks or bias._post_accumulate_grad_hooks))
            and is_grad_enabled()
            and not any_autocast_enabled()
            and not functorch_active()
            and not foreign_hooks()
            and input.layout is torch.strided
            and not input.is_nested
        ):
            return _linear_node(input, None, None, (queue, _LINEAR, weight, bias, weight, bias, True, ()))
        return plain(module, input) if weight is None else linear(queue, input, weight, bias)

    return forward


def _deferring_product(plain: Callable[..., Tensor], second: str) -> _DeferringFunction:
    """A deferring ``matmul`` or ``mm``; ``second`` is the keyword of its second argument."""

    def product(queue: WeightGradQueue, input: Tensor, *others: Tensor, **options: Any) -> Tensor:
        other = options.pop(second) if not others and second in options else others[0]
        if not options and defers(input, other) and other.dim() == 2 and (input.dim() == 2 or plain is not _mm):
            return _apply(queue, _MATMUL, input, other)
        return plain(input, other, **options)

    return product


def _deferring_addmm(queue: WeightGradQueue, input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Tensor:
    if not options and defers(mat1, mat2, input) and mat1.dim() == mat2.dim() == 2 and input.shape == mat2.shape[1:]:
        return _apply(queue, _MATMUL, mat1, mat2, input)
    return _addmm(input, mat1, mat2, **options)


def _product_work(entry: _Entry) -> None:
    """Add ``g.T @ x`` (linear) or ``x.T @ g`` to the weight's gradient, and the sum of ``g`` to the bias's."""
    rule, x, x_version, g, g_version, weight, bias, _, _, recorder = entry
    if x._version != x_version or g._version != g_version:
        raise modified_error(weight)
    if g.dim() != 2:
        x, g = (x.flatten(0, -2), g.flatten(0, -2)) if g.dim() > 1 else (x.unsqueeze(0), g.unsqueeze(0))
    left, right = (g.t(), x) if rule is _LINEAR else (x.t(), g)
    grad, shared = weight.grad, recorder.shared
    if grad is None or grad.dtype is not x.dtype or grad.is_sparse or (shared and id(weight) in shared):
        accumulate(weight, _mm(left, right), shared)
    else:
        grad.addmm_(left, right)
    if bias is None or not bias.requires_grad:
        return
    grad = bias.grad
    if (
        grad is None
        or grad.dtype is not g.dtype
        or (shared and id(bias) in shared)
        or (g.is_cpu and (g.numel() > _SMALL or g.dtype.itemsize < 4))
    ):
        accumulate(bias, g.sum(0), shared)
    else:
        grad.addmv_(left if rule is _LINEAR else g.t(), _ones(g, recorder))  # sum and add in one call


def _ones(g: Tensor, recorder: WeightGradRecorder) -> Tensor:
    """A vector of ones, one per row of ``g``. The recorder caches it, because its stage works on one stream."""
    key = g.shape[0], g.dtype, g.device
    ones = recorder.ones.get(key)
    if ones is None:
        ones = torch.ones(key[0], dtype=key[1], device=key[2])
        if not (g.is_cuda and torch.cuda.is_current_stream_capturing()):  # a captured tensor has no values yet
            if len(recorder.ones) > 64:
                recorder.ones.clear()
            recorder.ones[key] = ones
    return ones


_LINEAR = _Rule(_linear, lambda g, x, w, bias, statistics, options: _matmul(g, w), _product_work, True)
_MATMUL = _Rule(
    lambda x, weight, bias: _matmul(x, weight) if bias is None else _addmm(bias, x, weight),
    lambda g, x, w, bias, statistics, options: _matmul(g, w.t()),
    _product_work,
    True,
)


# ── ops with a backward kernel ───────────────────────────────────────────────────────────────────────────────────────


def _kernel_rule(forward: Callable[..., Any], backward: Callable[..., Any], *, autocast: bool = False) -> _Rule:
    """The rule of an op whose ``backward(g, x, weight, bias, statistics, options, mask)`` returns the gradients of x,
    weight and bias for which ``mask`` is set.
    """

    def input_grad(g: Tensor, *arguments: Any) -> Tensor:
        grads: Sequence[Tensor] = backward(g, *arguments, [True, False, False])
        return grads[0]

    def work(entry: _Entry) -> None:
        _, x, x_version, g, g_version, weight, bias, statistics, options, recorder = entry
        if x._version != x_version or g._version != g_version:
            raise modified_error(weight)
        both = bias is not None and bias.requires_grad
        grads = backward(g, x, weight.to(g.dtype), bias, statistics, options, [False, True, both])
        accumulate(weight, grads[1], recorder.shared)
        if bias is not None and both:
            accumulate(bias, grads[2], recorder.shared)

    return _Rule(forward, input_grad, work, autocast)


_CONV = _kernel_rule(
    _convolution,
    lambda g, x, w, b, statistics, options, mask: _aten.convolution_backward.default(
        g, x, w, list(b.shape) if mask[2] else None, *options, mask
    ),
    autocast=True,
)
_LAYER_NORM = _kernel_rule(
    lambda x, w, b, shape, eps: torch.native_layer_norm(x, shape, w, b, eps),
    lambda g, x, w, b, statistics, options, mask: _aten.native_layer_norm_backward.default(
        g, x, options[0], *statistics, w, b, mask
    ),
)
_GROUP_NORM = _kernel_rule(
    torch.native_group_norm,
    lambda g, x, w, b, statistics, options, mask: _aten.native_group_norm_backward.default(
        g.contiguous(), x, *statistics, w, *options[:4], mask
    ),
)
_RMS_NORM = _kernel_rule(
    lambda x, w, b, shape, eps: fused_rms_norm(x, shape, w, eps),
    lambda g, x, w, b, statistics, options, mask: fused_rms_norm_backward(g, x, options[0], *statistics, w, mask[:2]),
)
_SCALE = _kernel_rule(
    lambda x, w, b: x * w,
    lambda g, x, w, b, statistics, options, mask: (
        g * w if mask[0] else None,
        (g * x).sum_to_size(w.shape) if mask[1] else None,
    ),
)


_Ints = int | Sequence[int]


def _conv_options(stride: _Ints = 1, padding: _Ints | str = 0, dilation: _Ints = 1, groups: int = 1) -> _Options:
    return stride, padding, dilation, 0, groups


def _transposed_options(
    stride: _Ints = 1, padding: _Ints = 0, output_padding: _Ints = 0, groups: int = 1, dilation: _Ints = 1
) -> _Options:
    return stride, padding, dilation, output_padding, groups


def _deferring_conv(plain: Callable[..., Tensor], dims: int, options_of: Callable[..., _Options]) -> _DeferringFunction:
    def per_dim(value: _Ints) -> list[int]:
        if isinstance(value, int):
            return [value] * dims
        return list(value) * dims if len(value) == 1 else list(value)

    def conv(
        queue: WeightGradQueue, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        stride, padding, dilation, output_padding, groups = options_of(*args, **kwargs)
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(per_dim(dilation), weight.shape[2:], strict=False)]
            if per_dim(stride) == [1] * dims and not any(n % 2 for n in total):
                padding = [n // 2 for n in total]
        elif padding == "valid":
            padding = 0
        # If the shapes do not fit, the plain op raises the error. Only the plain op pads two sides differently.
        fits = weight.dim() == dims + 2 and dims < input.dim() <= dims + 2 and not isinstance(padding, str)
        if not fits or not defers(input, weight, bias):
            return plain(input, weight, bias, *args, **kwargs)
        transposed = options_of is _transposed_options
        options = *map(per_dim, (stride, padding, dilation)), transposed, per_dim(output_padding), groups
        if input.dim() == dims + 1:
            return _apply(queue, _CONV, input.unsqueeze(0), weight, bias, options).squeeze(0)
        return _apply(queue, _CONV, input, weight, bias, options)

    return conv


def layer_norm(
    queue: WeightGradQueue,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if weight is not None and worth_deferring(input, weight) and defers(input, weight, bias):
        return _apply(queue, _LAYER_NORM, input, weight, bias, (normalized_shape, eps))
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def _group_norm(
    queue: WeightGradQueue,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if weight is not None and worth_deferring(input, weight) and defers(input, weight, bias):
        shape = input.shape
        # The plain op keeps the layout of channels-last inputs, and raises an error for too few values.
        if len(shape) > 1 and input.is_contiguous() and shape.numel() != num_groups:
            options = shape[0], shape[1], prod(shape[2:]), num_groups, eps
            return _apply(queue, _GROUP_NORM, input, weight, bias, options)
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
        return _apply(queue, _RMS_NORM, input, weight, None, (normalized_shape, eps))
    # On other devices the op is composite, in at least float32. Do the same, and defer the product with the weight.
    dtype = input.dtype
    wide = input.float() if dtype.itemsize < 4 else input
    normal = F.rms_norm(wide, normalized_shape, None, eps)
    return _apply(queue, _SCALE, normal, weight).to(dtype)


def worth_deferring(x: Tensor, weight: Tensor) -> bool:
    """Whether the weight gradient of a norm takes longer than the overhead of its node.

    Mixed dtypes, and dtypes that autocast may change, use the plain op.
    """
    large = x.numel() >= (_LARGE_ON_CUDA if x.is_cuda else _LARGE)
    return large and x.dtype is weight.dtype and (x.dtype.itemsize >= 4 or _autocast_dtype(x) is None)


# ── embedding ────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    """The input has no gradient, so the whole backward is W."""
    rows = weight.shape[0]
    in_range = padding_idx is None or -rows <= padding_idx < rows
    if max_norm is None and not sparse and in_range and defers(input, weight):  # max_norm changes the weight
        padding = -1 if padding_idx is None else padding_idx % rows
        return _apply(queue, _EMBEDDING, input, weight, None, (padding, scale_grad_by_freq))
    return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


def _embedding_work(entry: _Entry) -> None:
    _, indices, indices_version, g, g_version, weight, _, _, (padding, scale), recorder = entry
    if indices._version != indices_version or g._version != g_version:
        raise modified_error(weight)
    grad, shared = weight.grad, recorder.shared
    in_use = shared and id(weight) in shared
    if grad is None or in_use or scale or not g.is_cpu or grad.is_sparse or grad.dtype is not g.dtype:
        # On CUDA: the plain backward, which sums in the order of sorted rows. index_add_ is not deterministic there.
        value = _aten.embedding_dense_backward.default(g, indices, weight.shape[0], padding, scale)
        accumulate(weight, value, shared)
        return
    indices, g = indices.flatten(), g.reshape(-1, g.shape[-1])
    if padding >= 0:
        kept = indices != padding
        indices, g = indices[kept], g[kept]
    grad.index_add_(0, indices, g)  # changes only the rows in use


_EMBEDDING = _Rule(
    lambda indices, w, b, padding, scale: torch.embedding(w, indices, padding, scale),
    None,  # indices have no gradient
    _embedding_work,
    False,
)

OPS: dict[Any, _DeferringFunction] = {
    _linear: linear,
    _addmm: _deferring_addmm,
    torch.matmul: _deferring_product(_matmul, "other"),
    Tensor.matmul: _deferring_product(_matmul, "other"),
    torch.mm: _deferring_product(_mm, "mat2"),
    Tensor.mm: _deferring_product(_mm, "mat2"),
    F.conv1d: _deferring_conv(F.conv1d, 1, _conv_options),
    F.conv2d: _deferring_conv(F.conv2d, 2, _conv_options),
    F.conv3d: _deferring_conv(F.conv3d, 3, _conv_options),
    F.conv_transpose1d: _deferring_conv(F.conv_transpose1d, 1, _transposed_options),
    F.conv_transpose2d: _deferring_conv(F.conv_transpose2d, 2, _transposed_options),
    F.conv_transpose3d: _deferring_conv(F.conv_transpose3d, 3, _transposed_options),
    F.layer_norm: layer_norm,
    F.group_norm: _group_norm,
    F.rms_norm: rms_norm,
    F.embedding: embedding,
}
