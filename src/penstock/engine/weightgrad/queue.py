"""What ``I`` leaves for ``W``: the queue of one micro-batch, and how its work reaches ``param.grad``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from penstock.engine.accumulate import sums
from penstock.engine.weightgrad.rules import deferrable

if TYPE_CHECKING:
    from penstock.engine.weightgrad.record import Recorder

__all__ = ["WeightGradQueue", "accumulate", "changed", "defer_weight_grad", "here"]

_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled  # no_grad() costs six times as much
_graph_task: Callable[[], int] = torch._C._current_graph_task_id

# The backward calls that are an I, by the number that autograd gives them: its threads for devices know no other.
_tasks: dict[int, WeightGradQueue] = {}


class _Here(threading.local):
    """The queues that this thread records for, and takes for. Two threads may run one module at a time."""

    queue: WeightGradQueue | None = None
    taking: WeightGradQueue | None = None


here = _Here()


class WeightGradQueue:
    """The weight-gradient work of one micro-batch of one stage. Empty after ``W``, and ready for the next one.

    Tensors in the queue (inputs of the stage's ops and gradients that came back to them) must not be changed
    between ``I`` and ``W``: ``run`` raises if one was.
    """

    __slots__ = ("_recording", "_taking", "casts", "cautious", "entries", "open", "recorder", "shared")

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.shared = recorder.shared
        self.cautious = True  # as the recorder was when F began
        self.entries: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.open = False  # I is running: the nodes of this micro-batch may queue their work
        self.casts: dict[int, tuple[Tensor, int, Tensor]] = {}  # weights in autocast's type, during F
        self._recording = recorder.recording(self)
        self._taking = _Taking(self)

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
        _set_grad_enabled(False)
        try:
            while entries:
                work, arguments = entries.pop()
                work(*arguments)
        finally:
            _set_grad_enabled(before)
            entries.clear()

    def clear(self) -> None:
        """Drop the work: after a failed step."""
        self.entries.clear()

    def __len__(self) -> int:
        return len(self.entries)


class _Taking(AbstractContextManager[None]):
    """Made once per queue, entered once per micro-batch."""

    __slots__ = ("handles", "queue", "roots", "task")

    def __init__(self, queue: WeightGradQueue) -> None:
        self.queue = queue
        self.roots: Sequence[GradientEdge] = ()
        self.handles: list[RemovableHandle] = []
        self.task: int | None = None

    def __enter__(self) -> None:
        self.queue.open = True
        here.taking = self.queue
        if self.roots:
            self.handles = [root.node.register_prehook(self._begin) for root in self.roots]
            self.roots = ()

    def _begin(self, _: object) -> None:
        self.task = _graph_task()
        _tasks[self.task] = self.queue

    def __exit__(self, *_: object) -> None:
        self.queue.open = False
        here.taking = None
        if self.handles:
            for handle in self.handles:
                handle.remove()
            self.handles = []
            _tasks.pop(self.task, None)  # type: ignore[arg-type]


def accumulate(parameter: Tensor, value: Tensor, shared: frozenset[int]) -> None:
    """Add a fresh tensor to ``parameter.grad``; it may become ``parameter.grad``."""
    if value.dtype is not parameter.dtype:
        value = value.to(parameter.dtype)
    if sums and id(parameter) in sums and sums[id(parameter)](value):
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


def changed(parameter: Tensor) -> RuntimeError:
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
    queue = here.taking
    if queue is None:
        queue = _tasks.get(_graph_task())
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
