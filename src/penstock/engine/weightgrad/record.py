"""Puts deferring ops in the place of a module's own while a stage's forward runs.

Modules of the common types get a deferring ``forward`` in their instance dictionary during F, which costs nothing
elsewhere. Other modules with parameters of their own (attention, convolutions, the user's) run under a torch-function
mode that sees every op in them. A mode over the whole forward would be simpler, but costs a microsecond for each op
and each ``x.shape``: a third of the host time of a small forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock._torch import is_compiled
from penstock.engine.replicas.dtensor import is_dtensor
from penstock.engine.weightgrad.conv import CONVOLUTIONS
from penstock.engine.weightgrad.embedding import embedding
from penstock.engine.weightgrad.matmul import PRODUCTS, linear_forward
from penstock.engine.weightgrad.norm import group_norm, layer_norm, rms_norm, worth_deferring
from penstock.engine.weightgrad.queue import WeightGradQueue, WeightGradRecorder, active, is_compiling

_Forward = Callable[..., Any]


def make_recorder(module: nn.Module, shared: Iterable[Tensor] = (), *, defer: bool = True) -> WeightGradRecorder:
    """A recorder with a deferring ``forward`` for each module that uses parameters of its own.

    ``shared`` are parameters that stages in other threads use, too. Without ``defer`` each backward computes all
    gradients.
    """
    # DDP and FSDP take each gradient when autograd accumulates it: nothing can be deferred. In a stage that Pipeline
    # parallelized they do not: DDP's wrapper is removed, and during a step FSDP's parameters are plain tensors.
    managed = any(isinstance(part, nn.parallel.DistributedDataParallel) for part in module.modules())
    if not defer or managed or any(is_dtensor(parameter) for parameter in module.parameters()):
        return WeightGradRecorder([], shared)
    forwards = []
    for part in _eager_modules(module):
        make = _FORWARDS.get(type(part), _forward_under_mode if _has_weights(part) else None)
        if make is not None:
            forwards.append((part.__dict__, make(part)))
    return WeightGradRecorder(forwards, shared)


def _eager_modules(module: nn.Module, seen: set[int] | None = None) -> Iterable[nn.Module]:
    """The modules that Python runs: a compiled or scripted one has a compiled backward, too."""
    seen = set() if seen is None else seen
    if id(module) in seen or isinstance(module, torch.jit.ScriptModule):
        return
    seen.add(id(module))
    if is_compiled(module):
        return
    yield module
    for child in module.children():
        yield from _eager_modules(child, seen)


def _has_weights(module: nn.Module) -> bool:
    """Whether a module of an unknown type may call an op that is worth deferring."""
    return isinstance(module, nn.GroupNorm) or any(
        p is not None and type(p) is nn.Parameter and p.dim() > 1 for p in module._parameters.values()
    )


def _layer_norm(module: nn.LayerNorm) -> _Forward:
    parameters, plain = module._parameters, nn.LayerNorm.forward

    def forward(input: Tensor) -> Tensor:
        queue, weight = None if is_compiling() else active.recording, parameters.get("weight")
        if queue is None or weight is None or not worth_deferring(input, weight):
            return plain(module, input)
        return layer_norm(queue, input, module.normalized_shape, weight, parameters.get("bias"), module.eps)

    return forward


def _rms_norm(module: nn.RMSNorm) -> _Forward:
    parameters, plain = module._parameters, nn.RMSNorm.forward

    def forward(x: Tensor) -> Tensor:
        queue, weight = None if is_compiling() else active.recording, parameters.get("weight")
        if queue is None or weight is None or not worth_deferring(x, weight):
            return plain(module, x)
        return rms_norm(queue, x, module.normalized_shape, weight, module.eps)

    return forward


def _embedding(module: nn.Embedding) -> _Forward:
    parameters, plain = module._parameters, nn.Embedding.forward

    def forward(input: Tensor) -> Tensor:
        queue, weight = None if is_compiling() else active.recording, parameters.get("weight")
        if queue is None or weight is None:
            return plain(module, input)
        m = module
        return embedding(queue, input, weight, m.padding_idx, m.max_norm, m.norm_type, m.scale_grad_by_freq, m.sparse)

    return forward


_FORWARDS: dict[type[nn.Module], Callable[[Any], _Forward]] = {
    nn.Linear: linear_forward,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.Embedding: _embedding,
}


def _forward_under_mode(module: nn.Module) -> _Forward:
    plain = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or (queue := active.recording) is None:
            return plain(module, *args, **kwargs)
        active.recording = None  # the mode sees the ops of modules inside this one
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
        deferring = _OPS.get(func)
        if deferring is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return deferring(self.queue, *args, **(kwargs or {}))


# A torch function written in Python calls the mode for itself and then runs with the mode off, which would hide the
# linears in this one. A copy that does not look for modes runs with the mode on.
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
