"""DTensors by their local parts: each process of a ``DeviceMesh`` has one.

Gradients are summed over replicas, scaled and clipped by their local parts. A plain tensor is its own local part, so
that callers need not distinguish the two.
"""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock._torch import is_async_collective, unsafe_view
from penstock.engine.message import flatten, unflatten
from penstock.engine.replicas.fp32_accumulate import set_grad
from penstock.errors import PlanError


def is_dtensor(tensor: Any) -> TypeGuard[Any]:
    """Whether this is a DTensor. Does not import their module, which is slow: without the import there are none."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def to_local(tensor: Tensor) -> Tensor:
    """This process's local part of a tensor, to be read or changed in place."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return _wait_collective(tensor.to_local())


def to_full(tensor: Tensor) -> Tensor:
    """The full tensor. All processes of the mesh must call this."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return _wait_collective(tensor.full_tensor())


def distribute_like(value: Tensor, like: Tensor) -> Tensor:
    """``value`` with the mesh and placements of ``like``. A plain tensor must be equal on all processes of the mesh."""
    if not is_dtensor(like):
        return to_full(value)
    if is_dtensor(value) and value.device_mesh == like.device_mesh and value.placements == like.placements:
        return value  # type: ignore[no-any-return]
    from torch.distributed.tensor import distribute_tensor

    plain = to_full(value).to(like.device)
    found: Tensor = distribute_tensor(plain, like.device_mesh, like.placements, src_data_rank=None)
    return found


def shard_groups(tensor: Tensor) -> list[dist.ProcessGroup]:
    """The process groups along the mesh dimensions over which a tensor is sharded."""
    if not is_dtensor(tensor):
        return []
    return [tensor.device_mesh.get_group(i) for i, how in enumerate(tensor.placements) if not how.is_replicate()]


def set_local_grad(parameter: nn.Parameter, grad: Tensor) -> None:
    """Make ``grad`` the local part of the parameter's gradient."""
    if not is_dtensor(parameter):
        set_grad(parameter, grad)
        return
    from torch.distributed.tensor import DTensor

    mesh, layout = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    parameter.grad = DTensor.from_local(grad, mesh, layout, run_check=False, shape=shape, stride=stride)


def keep_edges_plain(module: nn.Module, stage: int) -> None:
    """Register hooks on a stage that check that it returns plain tensors.

    The hooks also wait for functional collectives, because channels read the memory of outputs and gradients directly.
    """

    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        for leaf in flatten(args)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(_wait_collective)  # type: ignore[no-untyped-call]

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        leaves, spec = flatten(output)
        for leaf in leaves:
            if is_dtensor(leaf):
                raise PlanError(
                    f"stage {stage} returns a DTensor with the layout {leaf.placements}, but stages exchange plain "
                    "tensors, and so does the loss: let its last layer return one (output_layouts=Replicate(), "
                    "use_local_output=True)"
                )
        waited = [_wait_collective(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return output if all(a is b for a, b in zip(waited, leaves, strict=True)) else unflatten(waited, spec)

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after)


def _wait_collective(tensor: Tensor) -> Tensor:
    """The result of a functional collective as a plain tensor, in the same graph."""
    return unsafe_view(tensor, tensor.shape) if is_async_collective(tensor) else tensor
