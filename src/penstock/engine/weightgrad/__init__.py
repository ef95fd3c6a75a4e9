"""Weight gradients deferred at the op: ``I`` computes input gradients and queues the weight gradients for ``W``.

    F   x ──linear──▶ y        the stage's modules run with deferring ops: same values, another autograd node
    I   gx ◀─ g @ weight ── g  the node computes the gradient of the input and queues (x, g)
    W   weight.grad += gᵀ @ x  the queue adds the weight gradients directly to ``.grad``, and frees x and g

A stage has one ``WeightGradRecorder``, and one ``WeightGradQueue`` per micro-batch in flight:

    recorder = make_recorder(module)
    queue = WeightGradQueue(recorder)
    with queue.recording():          # F
        output = module(x)
    with queue.deferring():          # I
        torch.autograd.backward(output, grad)
    queue.run()                      # W

Modules of the common types get a deferring ``forward`` in their instance dictionary during F, with no cost outside of
F. Other modules with parameters (attention, convolutions, user-defined ones) run under a torch-function mode that
intercepts every op in them. A mode over the whole forward would be simpler, but costs a microsecond for each op and
each ``x.shape``: a third of the host time of a small forward.

In all other cases (another op, a parameter with hooks, a checkpointed block) autograd computes the weight gradients in
``I``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock._torch import is_compiled
from penstock.engine.replicas.dtensor import is_dtensor
from penstock.engine.weightgrad.ops import OPS, linear_forward
from penstock.engine.weightgrad.queue import (
    WeightGradQueue,
    WeightGradRecorder,
    active,
    defer_weight_grad,
    is_compiling,
)

__all__ = ["WeightGradQueue", "WeightGradRecorder", "defer_weight_grad", "make_recorder"]


def make_recorder(module: nn.Module, shared: Iterable[Tensor] = (), *, defer: bool = True) -> WeightGradRecorder:
    """A recorder with a deferring ``forward`` for each module that has parameters.

    ``shared`` are parameters that stages in other threads use too. Without ``defer``, each backward computes all
    gradients.
    """
    # DDP and FSDP process each gradient when autograd accumulates it, so nothing can be deferred. This does not apply
    # to stages parallelized by Pipeline: DDP's wrapper is removed, and FSDP's parameters are plain tensors in a step.
    managed = any(isinstance(part, nn.parallel.DistributedDataParallel) for part in module.modules())
    if not defer or managed or any(is_dtensor(parameter) for parameter in module.parameters()):
        return WeightGradRecorder([], shared)
    forwards = []
    for part in _eager_modules(module):
        if type(part) is nn.Linear:
            forwards.append((part.__dict__, linear_forward(part)))
        elif type(part) in _ARGUMENTS:
            forwards.append((part.__dict__, _deferring_forward(part)))
        # A module of another type that may call an op that is worth deferring.
        elif isinstance(part, nn.GroupNorm) or any(
            type(p) is nn.Parameter and p.dim() > 1 for p in part._parameters.values()
        ):
            forwards.append((part.__dict__, _forward_under_mode(part)))
    return WeightGradRecorder(forwards, shared)


def _eager_modules(module: nn.Module, seen: set[int] | None = None) -> Iterable[nn.Module]:
    """The modules that are neither compiled nor scripted. The backward of others is compiled too."""
    seen = set() if seen is None else seen
    if id(module) in seen or isinstance(module, torch.jit.ScriptModule):
        return
    seen.add(id(module))
    if is_compiled(module):
        return
    yield module
    for child in module.children():
        yield from _eager_modules(child, seen)


# Other modules whose forward is one function: the function, and the attributes that are its arguments after x.
_ARGUMENTS: dict[type[nn.Module], tuple[Any, Callable[[nn.Module], tuple[Any, ...]]]] = {
    nn.LayerNorm: (F.layer_norm, attrgetter("normalized_shape", "weight", "bias", "eps")),
    nn.RMSNorm: (F.rms_norm, attrgetter("normalized_shape", "weight", "eps")),
    nn.Embedding: (
        F.embedding,
        attrgetter("weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    ),
}


def _deferring_forward(module: nn.Module) -> Callable[[Tensor], Tensor]:
    plain, (function, arguments) = type(module).forward, _ARGUMENTS[type(module)]
    op = OPS[function]

    def forward(input: Tensor) -> Tensor:
        if is_compiling() or (queue := active.recording) is None:
            return plain(module, input)  # type: ignore[no-any-return]
        return op(queue, input, *arguments(module))

    return forward


def _forward_under_mode(module: nn.Module) -> Callable[..., Any]:
    plain = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or (queue := active.recording) is None:
            return plain(module, *args, **kwargs)
        active.recording = None  # the mode intercepts the ops of submodules too
        try:
            with _DeferMode(queue):
                return plain(module, *args, **kwargs)
        finally:
            active.recording = queue

    return forward


class _DeferMode(TorchFunctionMode):
    def __init__(self, queue: WeightGradQueue) -> None:
        super().__init__()
        self.queue = queue

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        deferring = OPS.get(func)
        if deferring is not None:
            return deferring(self.queue, *args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            with self:
                return _attention(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)


# A torch function written in Python calls the mode for itself, and then runs without the mode, which would not
# intercept its linears. A copy whose ``has_torch_function`` returns False runs under the mode.
_attention = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.__dict__, "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
_attention.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__
