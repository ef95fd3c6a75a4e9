"""The queue of deferred weight gradients of one micro-batch, and the conditions under which an op may defer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from penstock._torch import current_graph_task, functorch_active, set_grad_enabled, top_saved_tensors_hooks
from penstock.engine.offload.activations import PackHook
from penstock.engine.replicas.fp32_accumulate import fp32_sums

is_compiling = torch.compiler.is_compiling
is_grad_enabled = torch.is_grad_enabled
_TENSORS = frozenset({Tensor, Parameter})

# The queue of each backward that is an I, by autograd's id of the backward, which is available in its device threads.
_graph_tasks: dict[int, WeightGradQueue] = {}


class _ActiveQueues(threading.local):
    """The queues of the F and the I that this thread runs. Two threads may run one module at the same time."""

    recording: WeightGradQueue | None = None
    deferring: WeightGradQueue | None = None


active = _ActiveQueues()


class WeightGradRecorder:
    """Installs the deferring ``forward`` methods of a stage's modules. A stage runs in one thread at a time.

    ``forwards`` are pairs of a module's dictionary and the deferring ``forward`` that is set there during F.
    ``shared`` are parameters that stages in other threads use too.
    """

    def __init__(
        self, forwards: Sequence[tuple[dict[str, Any], Callable[..., Any]]], shared: Iterable[Tensor] = ()
    ) -> None:
        self.shared = frozenset(map(id, shared))
        # Until one forward has not called autograd itself, nodes keep their edges to the parameters, so that such a
        # call is correct. The edges take a sixth of the time of I.
        self.keeps_edges = True
        self.autograd_in_forward = False
        self.ones: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}  # vectors for sums over rows
        self.forwards = forwards


class WeightGradQueue:
    """The weight-gradient work of one micro-batch of one stage. After ``W`` it is empty and can be reused.

    Tensors in the queue (inputs of ops, and gradients of their outputs) must not be changed between ``I`` and ``W``:
    ``run`` raises an error if one was.
    """

    __slots__ = ("_deferring", "_recording", "casts", "entries", "keeps_edges", "open", "recorder")

    def __init__(self, recorder: WeightGradRecorder) -> None:
        self.recorder = recorder
        self.keeps_edges = True  # the recorder's value at the start of F
        self.entries: list[tuple[Callable[[Any], None], tuple[Any, ...]]] = []  # functions, each with its argument
        self.open = False  # I is running: the nodes of this micro-batch may queue their work
        self.casts: dict[int, tuple[Tensor, int, Tensor]] = {}  # parameters cast by autocast, during F
        self._recording = _RecordingContext(self)
        self._deferring = _DeferringContext(self)

    def recording(self) -> AbstractContextManager[None]:
        """A context for F: the ops of the stage's module defer to this queue. No effect without grad mode."""
        return self._recording

    def deferring(self, roots: Sequence[GradientEdge] = ()) -> AbstractContextManager[None]:
        """A context for I: a backward inside it queues weight gradients.

        On a device other than the CPU, pass the ``roots`` of the backward: ``defer_weight_grad`` is then called in a
        thread of autograd, and finds the queue by the id of the backward.
        """
        self._deferring.roots = roots
        return self._deferring

    def run(self) -> None:
        """W: run the queued work in order, add the gradients to ``param.grad``, and free the tensors."""
        entries = self.entries
        if not entries:
            return
        entries.reverse()
        before = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            while entries:
                work, entry = entries.pop()
                work(entry)
        finally:
            set_grad_enabled(before)
            entries.clear()

    def clear(self) -> None:
        """Drop the work of a failed step."""
        self.entries.clear()

    def __len__(self) -> int:
        return len(self.entries)


@dataclass(slots=True, eq=False)
class _RecordingContext(AbstractContextManager[None]):
    """Created once per queue, entered once per micro-batch."""

    queue: WeightGradQueue
    entered: bool = False

    def __enter__(self) -> None:
        self.entered = is_grad_enabled()
        if not self.entered:
            return
        active.recording = self.queue
        self.queue.keeps_edges = self.queue.recorder.keeps_edges
        for dictionary, forward in self.queue.recorder.forwards:
            # Keep an existing forward: the user's, or that of another thread that runs the module.
            dictionary.setdefault("forward", forward)

    def __exit__(self, kind: object, *_: object) -> None:
        if not self.entered:
            return
        active.recording = None
        recorder = self.queue.recorder
        for dictionary, forward in recorder.forwards:
            if dictionary.get("forward") is forward:
                del dictionary["forward"]
        self.queue.casts.clear()
        if recorder.autograd_in_forward:
            recorder.forwards = []
        elif kind is None:
            recorder.keeps_edges = False


@dataclass(slots=True, eq=False)
class _DeferringContext(AbstractContextManager[None]):
    """Created once per queue, entered once per micro-batch."""

    queue: WeightGradQueue
    roots: Sequence[GradientEdge] = ()
    handles: Sequence[RemovableHandle] = ()
    graph_task: int | None = None

    def __enter__(self) -> None:
        self.queue.open = True
        active.deferring = self.queue
        if self.roots:
            self.handles = [root.node.register_prehook(self._register) for root in self.roots]
            self.roots = ()

    def _register(self, _: object) -> None:
        self.graph_task = current_graph_task()
        _graph_tasks[self.graph_task] = self.queue

    def __exit__(self, *_: object) -> None:
        self.queue.open = False
        active.deferring = None
        if self.handles:
            for handle in self.handles:
                handle.remove()
            self.handles = ()
            _graph_tasks.pop(self.graph_task, None)  # type: ignore[arg-type]


# ── conditions ───────────────────────────────────────────────────────────────────────────────────────────────────────


def defers(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> bool:
    """Whether the gradients of ``weight`` and ``bias`` of an op on ``x`` can be deferred to ``W``.

    One flat expression, because it is evaluated for each op of every forward. A frozen bias is allowed.
    """
    return (
        not is_compiling()  # torch.compile traces this code, and compiles the backward
        and type(weight) is Parameter
        and weight.requires_grad
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        and weight.is_floating_point()  # complex gradients are conjugated
        and (
            bias is None
            or not bias.requires_grad
            or (type(bias) is Parameter and not bias._backward_hooks and not bias._post_accumulate_grad_hooks)
        )
        and is_grad_enabled()
        and type(x) in _TENSORS
        and x.layout is torch.strided
        and not x.is_nested
        and not functorch_active()
        and not foreign_hooks()
    )


def foreign_hooks() -> bool:
    """Whether saved-tensor hooks other than the offload's are active, such as those of a checkpoint."""
    top = top_saved_tensors_hooks(True)
    return top is not None and type(top[0]) is not PackHook


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────


def accumulate(parameter: Tensor, value: Tensor, shared: frozenset[int]) -> None:
    """Add a new tensor to ``parameter.grad``. The tensor may become ``parameter.grad``."""
    if value.dtype is not parameter.dtype:
        value = value.to(parameter.dtype)
    if fp32_sums and id(parameter) in fp32_sums and fp32_sums[id(parameter)](value):
        return
    grad = parameter.grad
    if shared and id(parameter) in shared:
        # Another thread may accumulate at the same time, in W or by autograd in I. Both take the lock of this node.
        node: Any = get_gradient_edge(parameter).node
        node(value)
    elif grad is None:
        if value.stride() != parameter.stride():  # like autograd, use the parameter's layout
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
        "outputs must not change until its W has run: clone the tensor, or modify it out of place."
    )


def defer_weight_grad(parameter: Tensor, compute: Callable[[], Tensor | None]) -> Tensor | None:
    """Defer a weight gradient in the ``backward`` of an ``autograd.Function``.

    In a stage whose backward is split, ``compute`` is called later, in ``W``. Otherwise it is called at once:

        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w, defer_weight_grad(w, lambda: g.t() @ x)
    """
    queue = active.deferring
    if queue is None:
        queue = _graph_tasks.get(current_graph_task())
    deferrable = (
        type(parameter) is Parameter
        and parameter.requires_grad
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
        and parameter.is_floating_point()
    )
    # In grad mode, the caller wants a graph of the gradient.
    if queue is None or not deferrable or torch.is_grad_enabled():
        return compute()
    queue.entries.append((_compute_and_accumulate, (parameter, compute, queue.recorder.shared)))
    return None


def _compute_and_accumulate(entry: tuple[Tensor, Callable[[], Tensor | None], frozenset[int]]) -> None:
    parameter, compute, shared = entry
    value = compute()
    if value is None:
        return
    if value.shape != parameter.shape:
        value = value.sum_to_size(parameter.shape)
    if parameter.grad is None:
        value = value.clone()  # it may be a view of another tensor
    accumulate(parameter, value, shared)
