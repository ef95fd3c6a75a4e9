"""Stages wrapped in ``DistributedDataParallel``: run without the wrapper, and reduced with its settings.

DDP reduces the gradients during one backward, and all replicas must run the same number of backwards. A pipeline stage
runs many backwards, replicas may have different numbers of micro-batches, and weight gradients may be computed after
the backward. So the wrapper is removed, and ``GradReducer`` calls its communication hooks with the stage's buckets.
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


@dataclass(eq=False)
class DdpSettings:
    """The settings of a wrapper for the reduction of gradients."""

    hooks: list[tuple[Callable[..., Any], object]]  # the wrapper's own list, because hooks may be registered later
    bucket_bytes: int


class HookBucket:
    """Has the methods of ``torch.distributed.GradBucket``, which only torch can create."""

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
    """The module without its DDP wrappers, and the settings of each wrapped parameter, by identity.

    ``ranks`` are the world ranks of the stage's replicas.
    """
    settings: dict[int, DdpSettings] = {}
    holder = nn.ModuleList([module])
    for part in list(holder.modules()):
        for name, wrapper in part._modules.items():
            while isinstance(wrapper, DistributedDataParallel):
                group_ranks = dist.get_process_group_ranks(wrapper.process_group)
                if sorted(group_ranks) != sorted(ranks):
                    raise PlanError(
                        f"stage {stage}: DistributedDataParallel is over ranks {sorted(group_ranks)}, but the stage's "
                        f'replicas are ranks {sorted(ranks)}: pass process_group=mesh["data"].get_group()'
                    )
                unsupported = _unsupported(wrapper)
                if unsupported is not None:
                    raise PlanError(f"stage {stage}: a pipeline does not support {unsupported}")
                own = DdpSettings(ddp_comm_hooks(wrapper), wrapper.bucket_bytes_cap)
                settings.update((id(parameter), own) for parameter in wrapper.module.parameters())
                wrapper = part._modules[name] = wrapper.module
    return holder[0], settings


def _unsupported(wrapper: DistributedDataParallel) -> str | None:
    """The first feature of a wrapper that would be lost without it, besides the reduction of gradients."""
    if type(wrapper) is not DistributedDataParallel:
        return f"{type(wrapper).__name__}, a subclass of DistributedDataParallel"
    if wrapper.mixed_precision is not None:
        return "mixed_precision of DistributedDataParallel: run steps under torch.autocast"
    if wrapper.parameters_to_ignore:
        ignored = ", ".join(sorted(wrapper.parameters_to_ignore))
        return f"parameters that DistributedDataParallel ignores ({ignored}): replicas would diverge"
    if wrapper._forward_hooks or wrapper._forward_pre_hooks or wrapper._backward_hooks:
        return "hooks on DistributedDataParallel itself: put them on the module in it"
    builtin = ddp_builtin_hook(wrapper)
    if builtin and not ddp_comm_hooks(wrapper):
        return f"the built-in communication hook {builtin}: register torch.distributed.algorithms.ddp_comm_hooks'"
    return None
