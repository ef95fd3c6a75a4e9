"""Gradients of half-precision parameters summed in float32 during a step, and rounded once at its end.

    before the step      .grad is None, or the gradient of earlier steps (bf16): stashed
    micro-batch 0        .grad becomes a float32 zero, and the bf16 gradient is added to it
    micro-batch 1, …     each gradient is added in float32, by autograd or by W
    ties, loss factor    in float32
    after the step       .grad = bf16(stashed gradient + sum)

A failed step restores the earlier ``.grad``.
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

_HALF = (torch.bfloat16, torch.float16)

# By identity of the parameters that are summed in float32. Code that adds to ``.grad`` without autograd must first call
# this function with the gradient. It returns True if it has added the gradient itself.
fp32_sums: dict[int, Callable[[Tensor], bool]] = {}


class Fp32GradAccumulator:
    """A context for a step: gradients of half-precision parameters are summed in float32.

    Autograd adds in the dtype of the existing gradient, so a hook on the accumulating node creates a float32 zero
    before the first addition. (``Tensor.grad_dtype`` would be shorter, but once set it cannot be unset: a model that is
    converted to float32 later would still round its gradients.)
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._lock = threading.Lock()  # one thread at a time runs a shared pipeline
        self._first_lock = threading.Lock()  # two threads may add the first gradient of one parameter
        self._stash: dict[nn.Parameter, Tensor | None] = {}
        self._nodes: list[Node] = []  # the accumulating nodes, which parameters do not keep alive
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            for parameter in self.parameters:
                # A grad_dtype that the user has set is kept.
                if parameter.requires_grad and parameter.dtype in _HALF and parameter.grad_dtype is parameter.dtype:
                    node = get_gradient_edge(parameter).node
                    self._nodes.append(node)
                    self._hooks.callback(node.register_prehook(partial(self._before_accumulation, parameter)).remove)
                    self._hooks.callback(fp32_sums.pop, id(parameter))
                    fp32_sums[id(parameter)] = partial(self._prepare, parameter)
                    self._stash[parameter] = parameter.grad
                    parameter.grad = None
        except BaseException as error:
            self.__exit__(type(error))
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._hooks.close()
            self._nodes.clear()
            while self._stash:  # frees the float32 sums one by one
                parameter, before = self._stash.popitem()
                total, parameter.grad = parameter.grad, None
                parameter.grad = before if kind is not None else _round_total(total, before, parameter.dtype)
                del total
        finally:
            self._lock.release()

    def _before_accumulation(self, parameter: nn.Parameter, grads: tuple[Tensor | None]) -> Any:
        """Runs before autograd adds to ``.grad``. If it returns ``(None,)``, autograd adds nothing."""
        return (None,) if grads[0] is not None and self._prepare(parameter, grads[0]) else None

    def _prepare(self, parameter: nn.Parameter, grad: Tensor) -> bool:
        """Create the float32 sum to which ``grad`` is added. A sparse gradient is added here, and stays sparse."""
        with self._first_lock, torch.no_grad():
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
    """Make ``grad`` the gradient of the parameter, in the dtype of ``grad``."""
    if grad.dtype is parameter.dtype:
        parameter.grad = grad
        return
    # torch does not accept a gradient of another dtype, but ``.data`` of a gradient may change its dtype, as in
    # ``model.float()``. The first assignment can be any tensor of this shape and layout.
    parameter.grad = grad.to(parameter.dtype) if grad.is_sparse else parameter.data
    assert parameter.grad is not None
    parameter.grad.data = grad


def _round_total(total: Tensor | None, before: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The stashed gradient plus the step's sum, rounded once. Like autograd, it is written to the stashed tensor."""
    if total is None:
        return before
    with torch.no_grad():
        if before is not None and not before.is_sparse:
            return before.copy_(total.add_(before) if not total.is_sparse else before.float() + total)
        if before is not None:
            total = total + before.float()
        # A sparse sum may contain a row several times: coalesce before rounding.
        return total.coalesce().to(dtype) if total.is_sparse else total.to(dtype)
