"""Stages that the user's ``parallelize`` has made parallel, on four processes: each step ends as the plain model's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from tests.support.ranks import Ranks

CLASSES = 4
EVEN, UNEVEN, ONE_EMPTY = (6, 6), (7, 2), (5, 0)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    crew = Ranks(4)
    yield crew
    crew.stop()


# ── models, and what is made of their stages ─────────────────────────────────────────────────────────────────────


class Block(nn.Module):
    """A norm and two linears, as in a transformer: what is tensor-parallel is the pair of linears."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + out


class SometimesUsed(nn.Module):
    """Two layers, of which the second is used by some samples; a third is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.second, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x)
        return out + self.second(x) if bool((x[:, 0] > 2).any()) else out


class Tied(nn.Module):
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


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), *(Block() for _ in range(4)), nn.Linear(6, CLASSES))


def frozen() -> nn.Module:
    model = blocks()
    for parameter in [*model[0].parameters(), *model[3].up.parameters(), *model[5].parameters()]:
        parameter.requires_grad_(False)
    return model


def sometimes() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), SometimesUsed(), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, CLASSES))


def normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), Block(), Block(), nn.Dropout(0.5), nn.Linear(6, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": blocks,
    "frozen": frozen,
    "sometimes": sometimes,
    "tied": Tied,
    "normed": normed,
    "dropped": dropped,
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
    """What is not in a block is not sharded."""
    from torch.distributed.fsdp import fully_shard

    for part in stage:
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh["data"], reshard_after_forward=True)


def fsdp_nested(stage: nn.Module, mesh: ps.Mesh) -> None:
    fsdp_blocks(stage, mesh)
    fsdp(stage, mesh)


def tensor_parallel(stage: nn.Module, mesh: ps.Mesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for part in stage:
        if isinstance(part, Block):
            parallelize_module(part, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sequence_parallel(stage: nn.Module, mesh: ps.Mesh) -> None:
    """Norms too are distributed: their gradients are sums of what each process has of the samples."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInputOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for part in stage:
        if isinstance(part, Block):
            edges = {"use_local_input": False, "use_local_output": True}
            how = {
                "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
            }
            parallelize_module(part, mesh["tensor"], how)
            shape: dict[str, Any] = {
                "input_layouts": (Replicate(),),
                "desired_input_layouts": (Shard(0),),
                "output_layouts": (Shard(0),),
                "desired_output_layouts": (Replicate(),),
            }
            parallelize_module(part, mesh["tensor"], PrepareModuleInputOutput(**shape, **edges))


def both(stage: nn.Module, mesh: ps.Mesh) -> None:
    tensor_parallel(stage, mesh)
    fsdp_nested(stage, mesh)


def unchanged(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
    return stage


def checkpointed(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
    """Names with wrappers' parts in them, at the root and within."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for name, part in stage.named_children():
        if isinstance(part, Block):
            setattr(stage, name, checkpoint_wrapper(part))
    return torch.compile(stage, backend="eager") if mesh.pipe_rank == 0 else stage  # type: ignore[return-value]


# ── the one equality ─────────────────────────────────────────────────────────────────────────────────────────────


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 6, generator=generator), torch.randint(0, CLASSES, (size,), generator=generator)


def part(mesh: ps.Mesh, shards: Sequence[int], *tensors: Tensor) -> list[Tensor]:
    """This replica's samples; processes along ``tensor`` have the same."""
    start = sum(shards[: mesh.data_rank])
    return [tensor[start : start + shards[mesh.data_rank]] for tensor in tensors]


def full(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_equal(ours: Tensor | None, theirs: Tensor | None, what: str) -> None:
    assert (ours is None) == (theirs is None), f"{what}: {'missing' if ours is None else 'not expected'}"
    torch.testing.assert_close(full(ours), theirs, msg=lambda text: f"{what}: {text}")


def check_gradients(pipe: ps.Pipeline, plain: nn.Module) -> None:
    expected = dict(plain.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        check_equal(parameter.grad, expected[name].grad, f"gradient of {name}")
        if parameter.grad is not None and hasattr(parameter, "placements"):
            assert parameter.grad.placements == parameter.placements, name


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=0)


def train(
    rank: int,
    how: Callable[..., Any],
    sizes: dict[str, int],
    options: dict[str, Any] | None = None,
    *,
    name: str = "blocks",
    shards: Sequence[int] = UNEVEN,
    stages: int | None = None,
    norm: float = 2.0,
) -> None:
    """Steps, accumulation, clipping, an optimizer, evaluation, state: all as with the plain model."""
    mesh = ps.Mesh(**sizes)
    shards = shards if mesh.data > 1 else (sum(shards),)
    torch.manual_seed(rank)  # processes begin with different weights, and take the first one's
    model = MODELS[name]()
    torch.manual_seed(0)
    plain = MODELS[name]()
    if mesh.data_rank == mesh.tensor_rank == 0:
        model.load_state_dict(plain.state_dict())
    plan = ps.split(model, stages=mesh.pipe if stages is None else stages)
    options = {"microbatches": 3, "mesh": mesh, "parallelize": how, **(options or {})}
    with ps.Pipeline(plan, ignoring if False else nn.CrossEntropyLoss(ignore_index=0), **options) as pipe:
        trainable = [p for p in pipe.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=0.01) if trainable else None
        reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)
        for step in range(3):
            x, y = batch(step, sum(shards))
            result = pipe.step(*part(mesh, shards, x, y))
            expected = ignoring(plain(x), y)
            expected.backward()
            check_equal(result.loss, expected.detach(), "loss")
            check_gradients(pipe, plain)
            if step == 1:  # its gradients are added to by the next
                continue
            clipped = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm)
            check_equal(pipe.clip_grad_norm_(0.5, norm), clipped, "norm")
            check_gradients(pipe, plain)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            reference.step()
            reference.zero_grad()
        check_state(pipe, plain)
        check_loading(pipe, plain)
        pipe.eval()
        plain.eval()
        with torch.no_grad():
            x, y = batch(9, sum(shards))
            mine, wanted = part(mesh, shards, x, y)
            found = pipe.evaluate(mine, wanted)
            check_equal(found.loss, ignoring(plain(x), y), "loss of an evaluation")
            outputs = pipe(mine) if min(shards) else found.outputs
            if pipe.has_last_stage and len(mine):
                check_equal(found.outputs, plain(mine), "outputs")
                check_equal(outputs, plain(mine), "outputs of a call")
        check_state(pipe, plain)


def check_state(pipe: ps.Pipeline, plain: nn.Module) -> None:
    expected = plain.state_dict()
    found = pipe.state_dict(full=True)
    assert list(found) == list(expected)
    for name, tensor in found.items():
        check_equal(tensor, expected[name], name)
    for name, tensor in pipe.state_dict().items():
        check_equal(tensor, expected[name], name)
    assert {name for name, _ in pipe.named_parameters()} <= {name for name, _ in plain.named_parameters()}


def check_loading(pipe: ps.Pipeline, plain: nn.Module) -> None:
    """A state dict of the plain model, and one of the pipeline's own, in parts where parameters are."""
    own = {name: tensor.detach().clone() for name, tensor in pipe.state_dict().items()}
    before = copy.deepcopy(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        tensor.add_(len(name))
    pipe.load_state_dict(plain.state_dict())
    check_state(pipe, plain)
    pipe.load_state_dict(own)
    plain.load_state_dict(before)
    check_state(pipe, plain)


DATA, TENSOR, DATA_TENSOR = {"data": 2, "pipe": 2}, {"pipe": 2, "tensor": 2}, {"data": 2, "tensor": 2, "pipe": 1}


@pytest.mark.parametrize("shards", [EVEN, UNEVEN, ONE_EMPTY, (0, 3)], ids=str)
@pytest.mark.parametrize("how", [ddp, ddp_inside, fsdp, fsdp_blocks, fsdp_nested, unchanged, checkpointed])
def test_replicas(four: Ranks, how: Callable[..., Any], shards: tuple[int, int]) -> None:
    four.check(case, how, DATA, {"shards": shards})


def case(rank: int, how: Callable[..., Any], sizes: dict[str, int], more: dict[str, Any]) -> None:
    train(rank, how, sizes, **more)


@pytest.mark.parametrize("sizes", [TENSOR, DATA_TENSOR], ids=str)
@pytest.mark.parametrize("how", [tensor_parallel, sequence_parallel, both, unchanged])
def test_tensor_parallel(four: Ranks, how: Callable[..., Any], sizes: dict[str, int]) -> None:
    four.check(case, how, sizes, {"shards": EVEN if how is sequence_parallel else UNEVEN})
