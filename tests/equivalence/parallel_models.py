"""Models, and ``parallelize`` functions for their stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import penstock as ps

CLASSES = 4
EVEN, UNEVEN, ONE_EMPTY = (6, 6), (7, 2), (5, 0)
DATA, TENSOR, DATA_TENSOR = {"data": 2, "pipe": 2}, {"pipe": 2, "tensor": 2}, {"data": 2, "tensor": 2, "pipe": 1}


# ── models ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Block(nn.Module):
    """A norm and two linears, as in a transformer; the linears can be tensor-parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + out


class LinearPair(nn.Module):
    """Two linears and nothing else: collectives at the input and the output of a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class ConditionalLayer(nn.Module):
    """Three layers: the second is used if ``use_second``, the third never."""

    def __init__(self) -> None:
        super().__init__()
        self.use_second = False
        self.always, self.second, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x)
        return out + self.second(x) if self.use_second else out


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.middle = nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.last(self.middle(self.first(x))))
        return out


class SkipConnections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (Block() for _ in range(5))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a)
        d = self.d(self.c(b) + a) + b
        out: Tensor = self.head(self.e(d) + a)
        return out


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), *(Block() for _ in range(4)), nn.Linear(6, CLASSES))


def linear_pairs() -> nn.Module:
    return nn.Sequential(*(LinearPair() for _ in range(4)))


def model_with_empty_stage() -> nn.Module:
    """In four stages, one of them has no parameters."""
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, CLASSES))


def frozen() -> nn.Module:
    model = blocks()
    for parameter in [*model[0].parameters(), *model[3].up.parameters(), *model[5].parameters()]:
        parameter.requires_grad_(False)
    return model


Model = Callable[[], nn.Module]
MODELS: dict[str, Model] = {
    "blocks": blocks,
    "linear_pairs": linear_pairs,
    "model_with_empty_stage": model_with_empty_stage,
    "frozen": frozen,
    "tied": TiedModel,
    "skips": SkipConnections,
}


def ddp(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
    if not any(p.requires_grad for p in stage.parameters()):
        return stage
    return DistributedDataParallel(stage, process_group=mesh["data"].get_group())


def ddp_inside(stage: nn.Module, mesh: ps.Mesh) -> None:
    for name, part in stage.named_children():
        if isinstance(part, Block):
            setattr(stage, name, DistributedDataParallel(part, process_group=mesh["data"].get_group()))


def fsdp(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(stage, mesh=mesh["data"])


def fsdp_blocks(stage: nn.Module, mesh: ps.Mesh) -> None:
    """Shard the blocks only."""
    from torch.distributed.fsdp import fully_shard

    for part in stage.children():
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh["data"], reshard_after_forward=True)


def fsdp_nested(stage: nn.Module, mesh: ps.Mesh) -> None:
    fsdp_blocks(stage, mesh)
    fsdp(stage, mesh)


def tensor_parallel(stage: nn.Module, mesh: ps.Mesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for part in stage.children():
        if isinstance(part, Block | LinearPair):
            parallelize_module(part, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sequence_parallel(stage: nn.Module, mesh: ps.Mesh) -> None:
    """Distribute the norms, too: each rank has a part of the samples, and gradients are summed over ranks."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInputOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for part in stage.children():
        if isinstance(part, Block):
            edges = {"use_local_input": False, "use_local_output": True}
            styles = {
                "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
            }
            parallelize_module(part, mesh["tensor"], styles)
            shape: dict[str, Any] = {
                "input_layouts": (Replicate(),),
                "desired_input_layouts": (Shard(0),),
                "output_layouts": (Shard(0),),
                "desired_output_layouts": (Replicate(),),
            }
            parallelize_module(part, mesh["tensor"], PrepareModuleInputOutput(**shape, **edges))


def shard_ties_equally(stage: nn.Module, mesh: ps.Mesh) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    styles = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("first", "last") if hasattr(stage, name)}
    parallelize_module(stage, mesh["tensor"], styles)


def shard_first_tie_only(stage: nn.Module, mesh: ps.Mesh) -> None:
    if mesh.pipe_rank == 0:
        shard_ties_equally(stage, mesh)


def tensor_parallel_and_fsdp(stage: nn.Module, mesh: ps.Mesh) -> None:
    tensor_parallel(stage, mesh)
    fsdp_nested(stage, mesh)


def unchanged(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
    return stage


def checkpoint_blocks(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
    """Wrappers that add components to parameter names, at the root and inside."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for name, part in stage.named_children():
        if isinstance(part, Block):
            setattr(stage, name, checkpoint_wrapper(part))
    return torch.compile(stage, backend="eager") if mesh.pipe_rank == 0 else stage  # type: ignore[return-value]
