"""Gradients of half-precision parameters summed in float32 during a step, and rounded once at its end.

    before the step      .grad is None, or what earlier steps left (bf16): set aside
    micro-batch 0        .grad ── a float32 zero is made, the bf16 gradient is added to it
    micro-batch 1, …     .grad ── each is added, by autograd or by W, in float32
    ties, count factor   in float32
    after the step       .grad = bf16(what was there + the sum)

A step that fails leaves ``.grad`` as it was before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

__all__ = ["Fp32GradAccumulator", "fp32_sums", "set_grad"]

_HALF = (torch.bfloat16, torch.float16)

# What to call with a gradient before it is added to ``.grad``, for each parameter (by identity) that is summed in
# float32 right now: autograd's own additions are seen to, this is for code that adds by itself. True: it was added.
fp32_sums: dict[int, Callable[[Tensor], bool]] = {}


class Fp32GradAccumulator:
    """Entered around a step: the parameters' gradients are summed in float32 meanwhile.

    Autograd sums in the type of the gradient that is there, so it suffices that there is one, in float32, before the
    first is added: a hook on the node that adds sees to it. (``Tensor.grad_dtype`` would be shorter, but once set it
    cannot be unset: a model converted to float32 later would go on rounding its gradients.)
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._turn = threading.Lock()  # threads that share a pipeline take turns
        self._first = threading.Lock()  # threads that share a parameter may both bring its first gradient
        self._aside: dict[nn.Parameter, Tensor | None] = {}
        self._nodes: list[Node] = []  # held: a parameter itself does not hold the node that adds to its gradient
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        self._turn.acquire()
        try:
            for parameter in self.parameters:
                # Where somebody has chosen a type for the gradients, it is theirs.
                if parameter.requires_grad and parameter.dtype in _HALF and parameter.grad_dtype is parameter.dtype:
                    ready = partial(self._ready, parameter)
                    node = get_gradient_edge(parameter).node
                    self._nodes.append(node)
                    self._hooks.callback(node.register_prehook(partial(_accumulate_prehook, ready)).remove)
                    self._hooks.callback(fp32_sums.pop, id(parameter))
                    fp32_sums[id(parameter)] = ready
                    self._aside[parameter] = parameter.grad
                    parameter.grad = None
        except BaseException as error:
            self.__exit__(type(error))
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._hooks.close()
            self._nodes.clear()
            while self._aside:  # float32 sums are freed one by one
                parameter, before = self._aside.popitem()
                total, parameter.grad = parameter.grad, None
                parameter.grad = before if kind is not None else _round_total(total, before, parameter.dtype)
                del total
        finally:
            self._turn.release()

    def _ready(self, parameter: nn.Parameter, grad: Tensor) -> bool:
        """Make the float32 sum that ``grad`` can be added to. A sparse one is added here, to stay sparse."""
        with self._first, torch.no_grad():
            total = parameter.grad
            if grad.is_sparse:
                value = grad.float()
                set_grad(parameter, value if total is None else total + value)
            elif total is None:
                set_grad(parameter, torch.full_like(parameter, -0.0, dtype=torch.float32))  # -0.0 + x is x, always
            elif total.is_sparse:
                set_grad(parameter, total.to_dense())
        return grad.is_sparse


def set_grad(parameter: Tensor, grad: Tensor) -> None:
    """Make ``grad`` the gradient of the parameter, in its own type."""
    if grad.dtype is parameter.dtype:
        parameter.grad = grad
        return
    # Torch refuses to assign a gradient of another type, but lets the type of a gradient change, as ``model.float()``
    # does. What is assigned first is replaced at once, so any tensor of this shape and layout will do.
    parameter.grad = grad.to(parameter.dtype) if grad.is_sparse else parameter.data
    assert parameter.grad is not None
    parameter.grad.data = grad


def _accumulate_prehook(ready: Callable[[Tensor], bool], grads: tuple[Tensor | None, ...]) -> Any:
    """Called before autograd adds to ``.grad``. Nothing is left to add where the answer is a None for each."""
    (grad,) = grads
    return (None,) if grad is not None and ready(grad) else None


def _round_total(total: Tensor | None, before: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What earlier steps left plus this step's sum, rounded once; in the tensor that was there, as autograd would."""
    if total is None:
        return before
    with torch.no_grad():
        if before is not None and not before.is_sparse:
            return before.copy_(total.add_(before) if not total.is_sparse else before.float() + total)
        if before is not None:
            total = total + before.float()
        # A sparse sum may have a row several times, and is rounded when they have been added up.
        return total.coalesce().to(dtype) if total.is_sparse else total.to(dtype)
