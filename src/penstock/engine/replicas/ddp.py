"""Stages that were wrapped in ``DistributedDataParallel``: run without the wrapper, and reduced as it was told to.

DDP reduces in one backward, of which all replicas must have the same number. A pipeline's stage has many, replicas may
have different numbers of micro-batches or none at all, and weight gradients may come after the backward. So the
wrapper is taken off, and its hook, if it has one, is called by our ``Reducer`` with the stage's buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock._torch import ddp_builtin_hook, ddp_comm_hooks
from penstock.errors import PlanError

__all__ = ["DdpSettings", "HookBucket", "unwrap_ddp"]


@dataclass(eq=False)
class DdpSettings:
    """What a wrapper was told about the reduction of its parameters."""

    hooks: list[tuple[Callable[..., Any], object]]  # the wrapper's own list: one may be registered later
    bucket: int  # bytes

    def start(self, bucket: HookBucket) -> Any:
        """Call the hook: it gives a future of the bucket's mean over the replicas."""
        hook, state = self.hooks[-1]
        return hook(state, bucket)


class HookBucket:
    """Gradients in one flat tensor: what a hook asks of a ``torch.distributed.GradBucket``, which only torch makes."""

    def __init__(self, index: int, flat: Tensor, parameters: Sequence[Tensor], last: bool) -> None:
        self._index = index
        self._flat = flat
        self._parameters = list(parameters)
        self._last = last

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._flat

    def set_buffer(self, tensor: Tensor) -> None:
        self._flat = tensor

    def gradients(self) -> list[Tensor]:
        parts = torch.split(self._flat, [p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def is_last(self) -> bool:
        return self._last


def unwrap_ddp(module: nn.Module, stage: int, ranks: Sequence[int]) -> tuple[nn.Module, dict[int, DdpSettings]]:
    """The module without its wrappers, and the wrapping of each parameter that was in one, by identity.

    ``ranks`` are those that gradients are summed over, in the world.
    """
    found: dict[int, DdpSettings] = {}
    while isinstance(module, DistributedDataParallel):
        module = _unwrap_one(module, stage, ranks, found)
    for part in list(module.modules()):
        for name, child in part._modules.items():
            while isinstance(child, DistributedDataParallel):
                child = part._modules[name] = _unwrap_one(child, stage, ranks, found)
    return module, found


def _unwrap_one(
    wrapper: DistributedDataParallel, stage: int, ranks: Sequence[int], found: dict[int, DdpSettings]
) -> nn.Module:
    there = dist.get_process_group_ranks(wrapper.process_group)
    if sorted(there) != sorted(ranks):
        raise PlanError(
            f"stage {stage}: DistributedDataParallel is over ranks {sorted(there)}, but the stage's replicas are ranks "
            f'{sorted(ranks)}: pass process_group=mesh["data"].get_group()'
        )
    what = _unsupported(wrapper)
    if what is not None:
        raise PlanError(f"stage {stage}: a pipeline does not support {what}")
    wrapping = DdpSettings(ddp_comm_hooks(wrapper), wrapper.bucket_bytes_cap)
    module: nn.Module = wrapper.module
    found.update((id(parameter), wrapping) for parameter in module.parameters())
    return module


def _unsupported(wrapper: DistributedDataParallel) -> str | None:
    """What a wrapper does beyond the reduction of gradients, and would not be done without it."""
    if type(wrapper) is not DistributedDataParallel:
        return f"{type(wrapper).__name__}, a DistributedDataParallel with code of its own"
    if wrapper.mixed_precision is not None:
        return "mixed_precision of DistributedDataParallel: run steps under torch.autocast"
    if wrapper.parameters_to_ignore:
        ignored = ", ".join(sorted(wrapper.parameters_to_ignore))
        return f"parameters that DistributedDataParallel ignores ({ignored}): replicas would drift apart"
    if wrapper._forward_hooks or wrapper._forward_pre_hooks or wrapper._backward_hooks:
        return "hooks on DistributedDataParallel itself: put them on the module in it"
    kind = ddp_builtin_hook(wrapper)
    if kind and not ddp_comm_hooks(wrapper):
        return f"the built-in communication hook {kind}: register torch.distributed.algorithms.ddp_comm_hooks'"
    return None
