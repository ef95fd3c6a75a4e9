"""When an op may be deferred, and what its node does in a backward that is not an ``I``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from penstock._torch import (
    current_graph_task,
    functorch_active,
    set_grad_enabled,
    top_saved_tensors_hooks,
)
from penstock.engine.offload.activations import PackHook
from penstock.engine.replicas.fp32_accumulate import fp32_sums
from penstock.errors import PipelineError

if TYPE_CHECKING:
    from penstock.engine.weightgrad.record import WeightGradRecorder

__all__ = [
    "WeightGradQueue",
    "accumulate",
    "active",
    "autocast",
    "autocast_cached",
    "autocast_dtype",
    "backward_in_forward",
    "defer_weight_grad",
    "deferrable",
    "defers",
    "foreign_hooks",
    "is_compiling",
    "is_grad_enabled",
    "modified_error",
]

is_compiling = torch.compiler.is_compiling
is_grad_enabled = torch.is_grad_enabled
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
        and not functorch_active()
        # Someone else keeps what is saved in here, such as a checkpoint that will run this code again without us.
        and not foreign_hooks()
    )


def foreign_hooks() -> bool:
    """Whether someone else keeps what is saved now. What our own hooks send to the host comes back as it was."""
    top = top_saved_tensors_hooks(True)
    return top is not None and type(top[0]) is not PackHook


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type that autocast runs matrix products in, if it is on for the device of ``x``."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast casts the arguments of a matrix product."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor


def autocast_cached(queue: WeightGradQueue, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter in autocast's type: cast once per forward, as autocast's own cache does."""
    found = queue.casts.get(id(parameter))
    if found is None or found[1] != parameter._version or found[2].dtype is not dtype:
        found = parameter, parameter._version, autocast(parameter.detach(), dtype)
        queue.casts[id(parameter)] = found
    return found[2]


def backward_in_forward(
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


# What ``I`` leaves for ``W``: the queue of one micro-batch, and how its work reaches ``param.grad``.


# The backward calls that are an I, by the number that autograd gives them: its threads for devices know no other.
_tasks: dict[int, WeightGradQueue] = {}


class _ActiveQueues(threading.local):
    """The queues that this thread records for, and takes for. Two threads may run one module at a time."""

    queue: WeightGradQueue | None = None
    taking: WeightGradQueue | None = None


active = _ActiveQueues()


class WeightGradQueue:
    """The weight-gradient work of one micro-batch of one stage. Empty after ``W``, and ready for the next one.

    Tensors in the queue (inputs of the stage's ops and gradients that came back to them) must not be changed
    between ``I`` and ``W``: ``run`` raises if one was.
    """

    __slots__ = ("_recording", "_taking", "casts", "cautious", "entries", "open", "recorder", "shared")

    def __init__(self, recorder: WeightGradRecorder) -> None:
        self.recorder = recorder
        self.shared = recorder.shared
        self.cautious = True  # as the recorder was when F began
        self.entries: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.open = False  # I is running: the nodes of this micro-batch may queue their work
        self.casts: dict[int, tuple[Tensor, int, Tensor]] = {}  # weights in autocast's type, during F
        self._recording = recorder.recording(self)
        self._taking = _DeferringContext(self)

    def recording(self) -> AbstractContextManager[None]:
        """Around F: the ops of the stage's module defer to this queue. Does nothing where grad mode is off."""
        return self._recording

    def taking(self, roots: Sequence[GradientEdge] = ()) -> AbstractContextManager[None]:
        """Around I: a backward in here queues weight gradients.

        On a device other than the CPU pass the ``roots`` of the backward: ``defer_weight_grad`` is called in a
        thread of autograd's own there, and finds the queue by them.
        """
        self._taking.roots = roots
        return self._taking

    def run(self) -> None:
        """W: do the queued work in order, into ``param.grad``, and let go of what it held."""
        entries = self.entries
        if not entries:
            return
        entries.reverse()
        before = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            while entries:
                work, arguments = entries.pop()
                work(*arguments)
        finally:
            set_grad_enabled(before)
            entries.clear()

    def clear(self) -> None:
        """Drop the work: after a failed step."""
        self.entries.clear()

    def __len__(self) -> int:
        return len(self.entries)


class _DeferringContext(AbstractContextManager[None]):
    """Made once per queue, entered once per micro-batch."""

    __slots__ = ("handles", "queue", "roots", "task")

    def __init__(self, queue: WeightGradQueue) -> None:
        self.queue = queue
        self.roots: Sequence[GradientEdge] = ()
        self.handles: list[RemovableHandle] = []
        self.task: int | None = None

    def __enter__(self) -> None:
        self.queue.open = True
        active.taking = self.queue
        if self.roots:
            self.handles = [root.node.register_prehook(self._begin) for root in self.roots]
            self.roots = ()

    def _begin(self, _: object) -> None:
        self.task = current_graph_task()
        _tasks[self.task] = self.queue

    def __exit__(self, *_: object) -> None:
        self.queue.open = False
        active.taking = None
        if self.handles:
            for handle in self.handles:
                handle.remove()
            self.handles = []
            _tasks.pop(self.task, None)  # type: ignore[arg-type]


def accumulate(parameter: Tensor, value: Tensor, shared: frozenset[int]) -> None:
    """Add a fresh tensor to ``parameter.grad``; it may become ``parameter.grad``."""
    if value.dtype is not parameter.dtype:
        value = value.to(parameter.dtype)
    if fp32_sums and id(parameter) in fp32_sums and fp32_sums[id(parameter)](value):
        return
    grad = parameter.grad
    if shared and id(parameter) in shared:
        # Another thread may accumulate at the same time, in its W or by autograd in its I: this node's lock is
        # the one that autograd takes.
        node: Any = get_gradient_edge(parameter).node
        node(value)
    elif grad is None:
        if value.stride() != parameter.stride():  # a gradient has its parameter's layout, as autograd's would
            value = torch.empty_like(parameter).copy_(value)
        parameter.grad = value
    elif grad.is_sparse and not value.is_sparse:
        parameter.grad = value + grad
    else:
        grad.add_(value)


def modified_error(parameter: Tensor) -> RuntimeError:
    return RuntimeError(
        "a tensor needed for the gradient of a parameter of shape "
        f"{tuple(parameter.shape)} was modified in place between I and W. Inputs of a stage and gradients of its "
        "outputs must be left alone until its W has run: clone the tensor, or modify it out of place."
    )


def defer_weight_grad(parameter: Tensor, compute: Callable[[], Tensor | None]) -> Tensor | None:
    """Hand over a weight gradient from the ``backward`` of your own ``autograd.Function``.

    In a stage whose backward is split, ``compute`` is called later, in ``W``; anywhere else, now:

        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w, defer_weight_grad(w, lambda: g.t() @ x)
    """
    queue = active.taking
    if queue is None:
        queue = _tasks.get(current_graph_task())
    # A graph of the gradient is wanted where grad mode is on: that cannot be put off.
    if queue is None or not deferrable(parameter) or torch.is_grad_enabled():
        return compute()
    queue.entries.append((_call, (parameter, compute, queue.shared)))
    return None


def _call(parameter: Tensor, compute: Callable[[], Tensor | None], shared: frozenset[int]) -> None:
    value = compute()
    if value is None:
        return
    if value.shape != parameter.shape:
        value = value.sum_to_size(parameter.shape)
    if parameter.grad is None:
        value = value.clone()  # it may be part of something else
    accumulate(parameter, value, shared)
