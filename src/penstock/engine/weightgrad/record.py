"""Puts deferring ops in the place of a module's own while a stage's forward runs.

Modules of the common types run a deferring ``forward`` that stands in their instance dictionary during F; that
costs nothing anywhere else. Modules that use parameters of their own in other ways (attention, convolutions,
yours) run under a torch-function mode, which sees every op in them. A mode over the whole forward would be simpler, and
costs a microsecond for each op and each ``x.shape``: a third of the host time of a small forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock._torch import is_compiled
from penstock.engine.weightgrad.conv import CONVOLUTIONS
from penstock.engine.weightgrad.embedding import embedding
from penstock.engine.weightgrad.matmul import PRODUCTS, linear_forward
from penstock.engine.weightgrad.norm import group_norm, layer_norm, rms_norm, worth_deferring
from penstock.engine.weightgrad.queue import WeightGradQueue, active, is_compiling, is_grad_enabled

__all__ = ["WeightGradRecorder"]

_Forward = Callable[..., Any]


class WeightGradRecorder:
    """A stage's module, ready to have its forward recorded.

    ``shared`` are parameters that stages in other threads use too. A stage runs in one thread at a time. With
    ``whole`` nothing is put off: each backward brings all gradients.
    """

    def __init__(self, module: nn.Module, shared: Iterable[Tensor] = (), *, whole: bool = False) -> None:
        self.shared = frozenset(map(id, shared))
        # Until one forward has been seen not to call autograd itself, nodes keep their edges to the parameters,
        # so that such a call is right. Edges cost a sixth of I.
        self.cautious = True
        self.autograd_in_forward = False
        self.ones: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}  # for sums over rows
        self._bindings = [] if whole else _bind(module)

    def recording(self, queue: WeightGradQueue) -> AbstractContextManager[None]:
        return _RecordingContext(self, queue)

    def _enter(self, queue: WeightGradQueue) -> None:
        active.queue = queue
        queue.cautious = self.cautious
        for dictionary, forward in self._bindings:
            dictionary.setdefault("forward", forward)  # somebody's own, or that of a thread with the same module, stays

    def _exit(self, queue: WeightGradQueue, completed: bool) -> None:
        active.queue = None
        for dictionary, forward in self._bindings:
            if dictionary.get("forward") is forward:
                del dictionary["forward"]
        queue.casts.clear()
        if self.autograd_in_forward:
            self._bindings = []
        elif completed:
            self.cautious = False


class _RecordingContext(AbstractContextManager[None]):
    """Made once per queue, entered once per micro-batch."""

    __slots__ = ("active", "queue", "recorder")

    def __init__(self, recorder: WeightGradRecorder, queue: WeightGradQueue) -> None:
        self.recorder = recorder
        self.queue = queue
        self.active = False

    def __enter__(self) -> None:
        self.active = is_grad_enabled()
        if self.active:
            self.recorder._enter(self.queue)

    def __exit__(self, kind: object, *_: object) -> None:
        if self.active:
            self.recorder._exit(self.queue, kind is None)


def _bind(module: nn.Module) -> list[tuple[dict[str, Any], _Forward]]:
    """What to put in the place of ``forward``, for each module that runs parameters of its own."""
    if _manages_gradients(module):
        return []
    bindings = []
    for part in _eager_modules(module):
        make = _DIRECT.get(type(part), _by_mode if _may_use(part) else None)
        if make is not None:
            bindings.append((part.__dict__, make(part)))
    return bindings


def _manages_gradients(module: nn.Module) -> bool:
    """DDP and FSDP take each gradient at the moment that autograd accumulates it: nothing can be put off.

    In a stage that was parallelized they do not: DDP's wrapper is gone, and while a step runs, FSDP's parameters are
    gathered, and their gradients taken when all are there.
    """
    tensor = sys.modules.get("torch.distributed.tensor")
    return any(isinstance(part, nn.parallel.DistributedDataParallel) for part in module.modules()) or (
        tensor is not None and any(isinstance(p, tensor.DTensor) for p in module.parameters())
    )


def _eager_modules(module: nn.Module, seen: set[int] | None = None) -> Iterable[nn.Module]:
    """The modules in ``module`` that Python runs: a compiled or scripted one has its backward compiled, too."""
    seen = set() if seen is None else seen
    if id(module) in seen or isinstance(module, torch.jit.ScriptModule):
        return
    seen.add(id(module))
    if is_compiled(module):
        return
    yield module
    for child in module.children():
        yield from _eager_modules(child, seen)


def _may_use(module: nn.Module) -> bool:
    """Whether a module of no type we know may call an op that is worth deferring."""
    return isinstance(module, nn.GroupNorm) or any(
        p is not None and type(p) is nn.Parameter and p.dim() > 1 for p in module._parameters.values()
    )


def _layer_norm(module: nn.LayerNorm) -> _Forward:
    parameters, plain = module._parameters, nn.LayerNorm.forward

    def forward(input: Tensor) -> Tensor:
        queue, weight = None if is_compiling() else active.queue, parameters.get("weight")
        if queue is None or weight is None or not worth_deferring(input, weight):
            return plain(module, input)
        return layer_norm(queue, input, module.normalized_shape, weight, parameters.get("bias"), module.eps)

    return forward


def _rms_norm(module: nn.RMSNorm) -> _Forward:
    parameters, plain = module._parameters, nn.RMSNorm.forward

    def forward(x: Tensor) -> Tensor:
        queue, weight = None if is_compiling() else active.queue, parameters.get("weight")
        if queue is None or weight is None or not worth_deferring(x, weight):
            return plain(module, x)
        return rms_norm(queue, x, module.normalized_shape, weight, module.eps)

    return forward


def _embedding(module: nn.Embedding) -> _Forward:
    parameters, plain = module._parameters, nn.Embedding.forward

    def forward(input: Tensor) -> Tensor:
        queue, weight = None if is_compiling() else active.queue, parameters.get("weight")
        if queue is None or weight is None:
            return plain(module, input)
        m = module
        return embedding(queue, input, weight, m.padding_idx, m.max_norm, m.norm_type, m.scale_grad_by_freq, m.sparse)

    return forward


_DIRECT: dict[type[nn.Module], Callable[[Any], _Forward]] = {
    nn.Linear: linear_forward,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.Embedding: _embedding,
}


def _by_mode(module: nn.Module) -> _Forward:
    plain = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or (queue := active.queue) is None:
            return plain(module, *args, **kwargs)
        active.queue = None  # modules in this one need not defer: the mode sees their ops
        try:
            with _DeferMode(queue):
                return plain(module, *args, **kwargs)
        finally:
            active.queue = queue

    return forward


class _DeferMode(TorchFunctionMode):
    def __init__(self, queue: WeightGradQueue) -> None:
        super().__init__()
        self.queue = queue

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        deferring = _OPS.get(func)
        if deferring is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return deferring(self.queue, *args, **(kwargs or {}))


# A torch function written in Python calls the mode for itself, then runs with the mode off. This one hides linears:
# it is run with the mode on, from a copy that does not ask for modes again.
_attention = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.__dict__, "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
_attention.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__


def _multi_head_attention(queue: WeightGradQueue, *args: Any, **kwargs: Any) -> Any:
    with _DeferMode(queue):
        return _attention(*args, **kwargs)


_OPS: dict[Any, _Forward] = {
    F.embedding: embedding,
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.group_norm: group_norm,
    F.multi_head_attention_forward: _multi_head_attention,
    **PRODUCTS,
    **CONVOLUTIONS,
}
