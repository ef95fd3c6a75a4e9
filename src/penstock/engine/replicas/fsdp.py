"""Stages in shards: FSDP2's ``fully_shard`` over a stage's replicas.

    gather      all parameters of the stage are gathered from the replicas, once for all micro-batches of the run
    F B F B …   no collective: replicas may run different numbers of micro-batches, or none
    reduce      the sums of the gradients are scattered over the replicas, and the parameters' shards put back

FSDP gathers and reduces by itself, around each forward and backward, as it is used without a pipeline. Here it is told
not to, and called at the two moments at which all replicas meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from penstock._torch import composable_registry, fsdp_param_groups, fsdp_state
from penstock.engine.channel.base import ChannelError
from penstock.errors import PlanError

__all__ = ["FsdpStage", "fsdp_stage"]


def fsdp_stage(module: nn.Module, stage: int, ranks: Sequence[int]) -> FsdpStage | None:
    """What ``fully_shard`` did to a stage, if anything; ``ranks`` are those of the stage's replicas, in the world."""
    for name, part in module.named_modules():
        if isinstance(part, FullyShardedDataParallel):
            raise PlanError(f"stage {stage}: {name or 'it'} is in FullyShardedDataParallel: use fully_shard (FSDP2)")
        if "replicate" in composable_registry(part):
            raise PlanError(
                f"stage {stage}: replicate(…) was called on {name or 'it'}: leave that out, a pipeline sums the "
                'gradients over mesh["data"] by itself'
            )
    roots = list(_roots(module))
    if not roots:
        return None
    found = FsdpStage(roots)
    for group in found.groups:
        there = group.mesh_info.mesh.mesh.flatten().tolist()
        if sorted(there) != sorted(ranks):
            raise PlanError(
                f"stage {stage}: fully_shard is over ranks {sorted(there)}, but the stage's replicas are ranks "
                f'{sorted(ranks)}: pass mesh=mesh["data"]'
            )
    return found


class FsdpStage:
    """The parts of a stage that ``fully_shard`` was called on; ``roots`` are those that are in no other.

    What is needed of FSDP beyond its public methods is what ``torch.distributed.pipelining`` uses of it, too.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self.roots = roots
        self.parts: list[Any] = [part for root in roots for part in root.modules() if isinstance(part, FSDPModule)]
        self._states: list[Any] = [fsdp_state(root) for root in roots]
        for state in self._states:
            state._lazy_init()
        self.groups = [
            group for state in self._states for one in state._state_ctx.all_states for group in fsdp_param_groups(one)
        ]
        self.parameters: dict[int, Any] = {
            id(parameter.sharded_param): parameter for group in self.groups for parameter in group.fsdp_params
        }
        self._gathering: list[Any] = []
        for part in self.parts:
            part.set_gradient_divide_factor(1.0)  # losses are weighted by what all replicas have
            part.set_force_sum_reduction_for_comms(True)
        for root in roots:
            root.set_reshard_after_forward(False)
        self._reduce(False)

    @property
    def device(self) -> torch.device:
        """Where the stage computes."""
        device: torch.device = self._states[0]._device
        return device

    @property
    def rounds(self) -> bool:
        """Whether gradients are summed over micro-batches in another type than they are computed in."""
        kinds = ((p.param_dtype or p.orig_dtype, p.reduce_dtype) for p in self.parameters.values())
        return any(reduced not in (None, computed) for computed, reduced in kinds)

    def gather(self) -> None:
        """Start to gather the parameters. A part's forward waits for its own."""
        with _channel_errors():
            self._gathering = [part.unshard(async_op=True) for part in self.parts]

    def got_gradient(self) -> set[int]:
        """Which parameters the run gave a gradient to, by the identity of what is in the optimizer."""
        self.arrive()
        for parameter in self.parameters.values():
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
        return {key for key, parameter in self.parameters.items() if _has_gradient(parameter)}

    def reduce(self) -> None:
        """Sum the gradients over the replicas, each of which keeps its shard, and let go of what was gathered.

        All replicas bring all gradients, zeros for those they have not. On a GPU nothing is waited for before
        ``finish``.
        """
        self.arrive()
        for parameter in self.parameters.values():
            if parameter.sharded_param.requires_grad and not _has_gradient(parameter):
                parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
                parameter.to_accumulated_grad_if_needed()
        self._reduce(True)
        with _channel_errors():
            for group in self.groups:
                group.post_backward()
        self._reduce(False)

    def finish(self) -> None:
        """Gradients are in the parameters of the optimizer from here on."""
        for root, state in zip(self.roots, self._states, strict=True):
            root.set_is_last_backward(True)
            state._root_post_backward_final_callback()
            root.set_is_last_backward(False)

    def release(self) -> None:
        """Let go of what was gathered, after a run without gradients."""
        self.arrive()
        for part in self.parts:
            part.reshard()

    def abandon(self) -> None:
        """After a run that failed: the parameters are the shards again, and nothing is waited for."""
        self._gathering = []
        for group in self.groups:
            group._all_gather_result = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter.unsharded_param.grad = None
            group._to_sharded()

    def arrive(self) -> None:
        """The parameters are there from here on."""
        with _channel_errors():
            for handle in self._gathering:
                handle.wait()
        self._gathering = []

    def _reduce(self, now: bool) -> None:
        for root in self.roots:
            root.set_requires_gradient_sync(now)
            root.set_reshard_after_backward(now)
            root.set_is_last_backward(False)


def _roots(module: nn.Module) -> Iterator[Any]:
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _roots(child)


def _has_gradient(parameter: Any) -> bool:
    return parameter.unsharded_accumulated_grad is not None or parameter.unsharded_param.grad is not None


@contextmanager
def _channel_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ChannelError(None, str(error)) from None
