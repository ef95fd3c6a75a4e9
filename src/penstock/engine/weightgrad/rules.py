"""When an op may be deferred, and what its node does in a backward that is not an ``I``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from penstock.engine.offload import Packer
from penstock.errors import PipelineError

if TYPE_CHECKING:
    from penstock.engine.weightgrad.queue import WeightGradQueue

__all__ = [
    "applier",
    "autocast_dtype",
    "autocast_enabled",
    "deferrable",
    "defers",
    "foreign_hooks",
    "is_compiling",
    "is_grad_enabled",
    "lower",
    "lowered",
    "replay",
    "transforms_active",
]

is_compiling = torch.compiler.is_compiling
is_grad_enabled = torch.is_grad_enabled
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
_strided = torch.strided
_TENSORS = frozenset({Tensor, Parameter})


def deferrable(parameter: Tensor | None) -> bool:
    """A trainable parameter whose gradient nobody watches."""
    return (
        type(parameter) is Parameter
        and parameter.requires_grad
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
        and parameter.is_floating_point()  # complex gradients are conjugated
    )


def defers(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> bool:
    """Whether the gradients of ``weight`` and ``bias`` in an op on ``x`` can wait for ``W``.

    Asked once per op in every forward, so it is one flat expression. A frozen bias is in nobody's way.
    """
    return (
        not is_compiling()  # the compiler reads this code: its graph has its own backward
        and type(weight) is Parameter
        and weight.requires_grad
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        and weight.is_floating_point()
        and (
            bias is None
            or not bias.requires_grad
            or (type(bias) is Parameter and not bias._backward_hooks and not bias._post_accumulate_grad_hooks)
        )
        and is_grad_enabled()
        and type(x) in _TENSORS
        and x.layout is _strided
        and not x.is_nested
        and not transforms_active()
        # Someone else keeps what is saved in here, such as a checkpoint that will run this code again without us.
        and not foreign_hooks()
    )


def foreign_hooks() -> bool:
    """Whether someone else keeps what is saved now. What our own hooks send to the host comes back as it was."""
    top = _top_hooks(True)
    return top is not None and type(top[0]) is not Packer


def applier(function: type[Function]) -> Callable[..., Tensor]:
    """``function.apply``, and ``backward``, without torch's checks in Python: for functorch, which ``defers`` has made,
    and for which of ``backward`` and ``vjp`` the function has."""
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    apply: Callable[..., Tensor] = super(Function, function).apply  # type: ignore[misc]
    return apply


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type that autocast runs matrix products in, if it is on for the device of ``x``."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def lower(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast casts the arguments of a matrix product."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor


def lowered(queue: WeightGradQueue, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter in autocast's type: cast once per forward, as autocast's own cache does."""
    found = queue.casts.get(id(parameter))
    if found is None or found[1] != parameter._version or found[2].dtype is not dtype:
        found = parameter, parameter._version, lower(parameter.detach(), dtype)
        queue.casts[id(parameter)] = found
    return found[2]


def replay(
    ctx: Any, queue: WeightGradQueue, g: Tensor, op: Callable[[], Tensor], inputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of all inputs, in a backward that is not an I: autograd called inside a stage's forward.

    ``inputs`` are the first ones of the node, in order. They have edges only while the recorder is cautious.
    """
    needs = ctx.needs_input_grad[: len(inputs)]
    if any(t is not None and t.requires_grad and not n for t, n in zip(inputs, needs, strict=True)):
        raise PipelineError(
            "autograd ran inside the forward of a stage whose backward is split into I and W, and did not on the "
            "stage's first micro-batch. Call it on every micro-batch, or use a schedule without W, such as '1f1b'."
        )
    queue.recorder.autograd_in_forward = True
    wanted = [t for t, n in zip(inputs, needs, strict=True) if n and t is not None]
    differentiable = is_grad_enabled()
    with torch.enable_grad():
        found = iter(torch.autograd.grad(op(), wanted, g, create_graph=differentiable))
    return [next(found) if n else None for n in needs]
