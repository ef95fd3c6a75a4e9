"""Stages sharded over their replicas by FSDP2's ``fully_shard``.

    unshard     all parameters of the stage are gathered from the replicas, once for all micro-batches of the run
    F B F B …   no collective: replicas may run different numbers of micro-batches, or none
    reduce      the gradients are reduce-scattered over the replicas, and the parameters resharded

By default FSDP unshards and reduces around each forward and backward. Here both are disabled, and called at the two
points that all replicas reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from penstock._torch import composable_registry, fsdp_param_groups, fsdp_state
from penstock.engine.replicas import channel_errors
from penstock.errors import PlanError


def fsdp_stage(module: nn.Module, stage: int, ranks: Sequence[int]) -> FsdpStage | None:
    """The FSDP2 modules in a stage, or None; ``ranks`` are the world ranks of the stage's replicas."""
    for name, part in module.named_modules():
        if isinstance(part, FullyShardedDataParallel):
            raise PlanError(f"stage {stage}: {name or 'it'} is in FullyShardedDataParallel: use fully_shard (FSDP2)")
        if "replicate" in composable_registry(part):
            raise PlanError(
                f"stage {stage}: replicate(…) was called on {name or 'it'}: leave that out, a pipeline sums the "
                'gradients over mesh["data"] by itself'
            )
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if not parts:
        return None
    nested = {id(inner) for part in parts for inner in part.modules() if inner is not part}
    found = FsdpStage(parts, [part for part in parts if id(part) not in nested])
    for group in found.groups:
        mesh_ranks = group.mesh_info.mesh.mesh.flatten().tolist()
        if sorted(mesh_ranks) != sorted(ranks):
            raise PlanError(
                f"stage {stage}: fully_shard is over ranks {sorted(mesh_ranks)}, but the stage's replicas are ranks "
                f'{sorted(ranks)}: pass mesh=mesh["data"]'
            )
    return found


class FsdpStage:
    """The ``parts`` of a stage on which ``fully_shard`` was called; ``roots`` are in no other part.

    ``torch.distributed.pipelining`` uses the same FSDP internals.
    """

    def __init__(self, parts: Sequence[Any], roots: Sequence[Any]) -> None:
        self.parts = parts
        self.roots = roots
        self._states: list[Any] = [fsdp_state(root) for root in roots]
        for state in self._states:
            state._lazy_init()
        self.device: torch.device = self._states[0]._device
        all_states = [each for state in self._states for each in state._state_ctx.all_states]
        self.groups = [group for state in all_states for group in fsdp_param_groups(state)]
        self.parameters: dict[int, Any] = {
            id(parameter.sharded_param): parameter for group in self.groups for parameter in group.fsdp_params
        }
        self._unshard_handles: list[Any] = []
        for part in self.parts:
            part.set_gradient_divide_factor(1.0)  # losses are weighted by the whole mini-batch
            part.set_force_sum_reduction_for_comms(True)
        for root in roots:
            root.set_reshard_after_forward(False)
        self._set_reduction(False)

    @property
    def converts_grads(self) -> bool:
        """Whether gradients are accumulated over micro-batches in a dtype other than that of their computation."""
        dtypes = ((p.param_dtype or p.orig_dtype, p.reduce_dtype) for p in self.parameters.values())
        return any(reduced not in (None, computed) for computed, reduced in dtypes)

    def unshard(self) -> None:
        """Start to gather the parameters. The forward of each part waits for its parameters."""
        with channel_errors():
            self._unshard_handles = [part.unshard(async_op=True) for part in self.parts]

    def wait_unshard(self) -> None:
        with channel_errors():
            for handle in self._unshard_handles:
                handle.wait()
        self._unshard_handles = []

    def params_with_grad(self) -> set[int]:
        """The identities of the sharded parameters that got a gradient in this run."""
        self.wait_unshard()
        for parameter in self.parameters.values():
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
        return {key for key, parameter in self.parameters.items() if _has_gradient(parameter)}

    def reduce_grads(self) -> None:
        """Reduce-scatter the gradients over the replicas, and reshard the parameters.

        All replicas contribute to all gradients, with zeros for missing ones. On a GPU ``finish_reduction`` waits.
        """
        self.wait_unshard()
        for parameter in self.parameters.values():
            if parameter.sharded_param.requires_grad and not _has_gradient(parameter):
                parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
                parameter.to_accumulated_grad_if_needed()
        self._set_reduction(True)
        with channel_errors():
            for group in self.groups:
                group.post_backward()
        self._set_reduction(False)

    def finish_reduction(self) -> None:
        """Wait until the sharded parameters have their gradients."""
        for root, state in zip(self.roots, self._states, strict=True):
            root.set_is_last_backward(True)
            state._root_post_backward_final_callback()
            root.set_is_last_backward(False)

    def reshard(self) -> None:
        """Free the gathered parameters, after a run without gradients."""
        self.wait_unshard()
        for part in self.parts:
            part.reshard()

    def reset(self) -> None:
        """After a failed run: reshard the parameters without waiting for collectives."""
        self._unshard_handles = []
        for group in self.groups:
            group._all_gather_result = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter.unsharded_param.grad = None
            group._to_sharded()

    def _set_reduction(self, enabled: bool) -> None:
        for root in self.roots:
            root.set_requires_gradient_sync(enabled)
            root.set_reshard_after_backward(enabled)
            root.set_is_last_backward(False)


def _has_gradient(parameter: Any) -> bool:
    return parameter.unsharded_accumulated_grad is not None or parameter.unsharded_param.grad is not None
