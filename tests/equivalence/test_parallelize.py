"""Stages that the user's ``parallelize`` has made parallel, on four processes: each step ends as the plain model's."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
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
    """Two layers, of which the second is used where ``rarely`` says so; a third is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.rarely = False
        self.always, self.second, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x)
        return out + self.second(x) if self.rarely else out


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


class Skips(nn.Module):
    """Stages with several edges in and out."""

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


def hollow() -> nn.Module:
    """Cut in four, with a stage that has no parameters."""
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, CLASSES))


def frozen() -> nn.Module:
    model = blocks()
    for parameter in [*model[0].parameters(), *model[3].up.parameters(), *model[5].parameters()]:
        parameter.requires_grad_(False)
    return model


Model = Callable[[], nn.Module]
MODELS: dict[str, Model] = {"blocks": blocks, "hollow": hollow, "frozen": frozen, "tied": Tied, "skips": Skips}


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

    for part in stage.children():
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh["data"], reshard_after_forward=True)


def fsdp_nested(stage: nn.Module, mesh: ps.Mesh) -> None:
    fsdp_blocks(stage, mesh)
    fsdp(stage, mesh)


def tensor_parallel(stage: nn.Module, mesh: ps.Mesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for part in stage.children():
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

    for part in stage.children():
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


def ties_alike(stage: nn.Module, mesh: ps.Mesh) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    how = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("first", "last") if hasattr(stage, name)}
    parallelize_module(stage, mesh["tensor"], how)


def ties_differently(stage: nn.Module, mesh: ps.Mesh) -> None:
    if mesh.is_first:
        ties_alike(stage, mesh)


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


_meshes: dict[str, ps.Mesh] = {}


def mesh_of(sizes: dict[str, int]) -> ps.Mesh:
    """One mesh for all cases of a process: its groups take longer to make than most cases."""
    if str(sizes) not in _meshes:
        _meshes[str(sizes)] = ps.Mesh(**sizes)
    return _meshes[str(sizes)]


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
    mesh = mesh_of(sizes)
    shards = shards if mesh.data > 1 else (sum(shards),)
    torch.manual_seed(rank)  # processes begin with different weights, and take the first one's
    model = MODELS[name]()
    torch.manual_seed(0)
    plain = MODELS[name]()
    if mesh.data_rank == mesh.tensor_rank == 0:
        model.load_state_dict(plain.state_dict())
    plan = ps.split(model, stages=mesh.pipe if stages is None else stages)
    options = {"microbatches": 3, "mesh": mesh, "parallelize": how, **(options or {})}
    with ps.Pipeline(plan, nn.CrossEntropyLoss(ignore_index=0), **options) as pipe:
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
    names = {name for name, _ in plain.named_parameters(remove_duplicate=False)}
    assert {name for name, _ in pipe.named_parameters()} <= names


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
@pytest.mark.parametrize("how", [ddp, fsdp_nested])
def test_replicas(four: Ranks, how: Callable[..., Any], shards: tuple[int, int]) -> None:
    four.check(case, how, DATA, {"shards": shards})


@pytest.mark.parametrize("shards", [UNEVEN, ONE_EMPTY], ids=str)
@pytest.mark.parametrize("how", [ddp_inside, fsdp, fsdp_blocks, unchanged, checkpointed])
def test_other_ways(four: Ranks, how: Callable[..., Any], shards: tuple[int, int]) -> None:
    four.check(case, how, DATA, {"shards": shards})


def case(rank: int, how: Callable[..., Any], sizes: dict[str, int], more: dict[str, Any]) -> None:
    train(rank, how, sizes, **more)


@pytest.mark.parametrize("sizes", [TENSOR, DATA_TENSOR], ids=str)
@pytest.mark.parametrize("how", [tensor_parallel, sequence_parallel, both, unchanged])
def test_tensor_parallel(four: Ranks, how: Callable[..., Any], sizes: dict[str, int]) -> None:
    four.check(case, how, sizes, {"shards": EVEN if how is sequence_parallel else UNEVEN})


RUNS = [("gpipe", "always"), ("zb_h1", "never"), ("interleaved", "never"), ("zbv", "never"), ("zbv", "always")]


@pytest.mark.parametrize(("schedule", "recompute"), RUNS)
@pytest.mark.parametrize("how", [ddp, fsdp_nested, tensor_parallel])
def test_schedules(four: Ranks, how: Callable[..., Any], schedule: str, recompute: str) -> None:
    stages = 2 if schedule in ("gpipe", "zb_h1") else 4
    options = {"schedule": schedule, "recompute": recompute}
    sizes = TENSOR if how is tensor_parallel else DATA
    four.check(case, how, sizes, {"options": options, "stages": stages, "shards": (13, 2)})


@pytest.mark.parametrize("name", ["frozen", "tied", "hollow"])
@pytest.mark.parametrize("how", [ddp, fsdp])
def test_models(four: Ranks, how: Callable[..., Any], name: str) -> None:
    more = {"stages": 4, "options": {"schedule": "interleaved"}} if name == "hollow" else {}
    four.check(case, how, DATA, {"name": name, **more})


@pytest.mark.parametrize("how", [ddp, fsdp_nested, unchanged])
def test_a_mesh_without_replicas(four: Ranks, how: Callable[..., Any]) -> None:
    four.check(case, how, {"pipe": 4}, {})


def test_ties_in_parts(four: Ranks) -> None:
    four.check(case, ties_alike, TENSOR, {"name": "tied"})


@pytest.mark.parametrize(("how", "sizes"), [(ddp, DATA), (fsdp_nested, DATA), (tensor_parallel, TENSOR)])
def test_several_edges(four: Ranks, how: Callable[..., Any], sizes: dict[str, int]) -> None:
    options = {"schedule": "zbv", "recompute": "except_last"}
    four.check(case, how, sizes, {"name": "skips", "stages": 4, "options": options})


# ── single matters ───────────────────────────────────────────────────────────────────────────────────────────────


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output.sum(1) - target).square().sum()


def some_unused(rank: int, how: Callable[..., Any]) -> None:
    """What no replica uses has no gradient, and what one uses has one everywhere, as in one process."""
    mesh = mesh_of(DATA)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), SometimesUsed(), nn.Linear(6, CLASSES))
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"reduction": "sum", "microbatches": 2, "mesh": mesh, "parallelize": how}
    with ps.Pipeline(ps.split(model, balance=[2, 2]), squares, **options) as pipe:
        x, y = batch(0, 12)
        model[2].rarely = mesh.data_rank == 1
        pipe.step(*part(mesh, EVEN, x, y))
        for replica, rows in enumerate((slice(0, 6), slice(6, 12))):
            plain[2].rarely = replica == 1
            squares(plain(x[rows]), y[rows]).backward()
        check_gradients(pipe, plain)
        if pipe.has_last_stage:
            gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
            assert gradients["2.never.weight"] is None
            assert gradients["2.second.weight"] is not None


@pytest.mark.parametrize("how", [ddp, fsdp])
def test_parameters_that_only_some_replicas_use(four: Ranks, how: Callable[..., Any]) -> None:
    four.check(some_unused, how)


def batchnorm(rank: int, how: Callable[..., Any]) -> None:
    """As in one process that runs the micro-batches of the first replica, then those of the second."""
    mesh = mesh_of(DATA)
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)).double()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"microbatches": 3, "mesh": mesh, "parallelize": how}
    with ps.Pipeline(ps.split(model, stages=2), F.cross_entropy, **options) as pipe:
        for step in range(2):
            x, y = batch(step, 15)
            x = x.double()
            pipe.step(*part(mesh, (9, 6), x, y))
            for i, j in zip(x.split([3] * 3 + [2] * 3), y.split([3] * 3 + [2] * 3), strict=True):
                (F.cross_entropy(plain(i), j) * len(i) / len(x)).backward()
            check_gradients(pipe, plain)
            check_state(pipe, plain)


@pytest.mark.parametrize("how", [ddp, fsdp])
def test_batchnorm(four: Ranks, how: Callable[..., Any]) -> None:
    four.check(batchnorm, how)


def dropout(rank: int, how: Callable[..., Any], sizes: dict[str, int]) -> None:
    """With a seed, a layer draws what it draws in one pipeline of one process."""
    mesh = mesh_of(sizes)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), Block(), Block(), nn.Dropout(0.5), nn.Linear(6, CLASSES))
    plain = copy.deepcopy(model)
    x, y = batch(0, 12)
    count, shards = 4 // mesh.data, (12 // mesh.data,) * mesh.data
    alone = ps.Pipeline(ps.split(plain, stages=1), F.cross_entropy, microbatches=4, seed=7)
    options: dict[str, Any] = {"microbatches": count, "mesh": mesh, "seed": 7, "recompute": "always"}
    pipe = ps.Pipeline(ps.split(model, stages=mesh.pipe), F.cross_entropy, parallelize=how, **options)
    with pipe, alone:
        for _ in range(2):
            check_equal(pipe.step(*part(mesh, shards, x, y)).loss, alone.step(x, y).loss, "loss")
            check_gradients(pipe, plain)


@pytest.mark.parametrize(
    ("how", "sizes"), [(ddp, DATA), (fsdp, DATA), (checkpointed, DATA), (tensor_parallel, TENSOR), (both, DATA_TENSOR)]
)
def test_seeded_dropout(four: Ranks, how: Callable[..., Any], sizes: dict[str, int]) -> None:
    four.check(dropout, how, sizes)


def scaled(rank: int, how: Callable[..., Any], sizes: dict[str, int]) -> None:
    """An overflow in one process's part keeps every rank from stepping."""
    mesh = mesh_of(sizes)
    torch.manual_seed(0)
    model = blocks()
    plain = copy.deepcopy(model)
    shards = UNEVEN if mesh.data > 1 else (9,)
    options: dict[str, Any] = {"microbatches": 2, "mesh": mesh, "parallelize": how}
    with ps.Pipeline(ps.split(model, stages=mesh.pipe), F.cross_entropy, **options) as pipe:
        scaler = ps.GradScaler(pipe, init_scale=1024.0, growth_interval=2)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(4):
            x, y = batch(step, 9)
            if step == 2:
                x[0] = torch.inf
            pipe.step(*part(mesh, shards, x, y))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step != 2:
                F.cross_entropy(plain(x), y).backward()
                reference.step()
                reference.zero_grad()
            assert scaler.get_scale() == (1024.0, 2048.0, 1024.0, 1024.0)[step]
        check_state(pipe, plain)


@pytest.mark.parametrize(("how", "sizes"), [(ddp, DATA), (fsdp, DATA), (tensor_parallel, TENSOR), (both, DATA_TENSOR)])
def test_scaler(four: Ranks, how: Callable[..., Any], sizes: dict[str, int]) -> None:
    four.check(scaled, how, sizes)


@pytest.mark.parametrize(("how", "sizes", "norm"), [(fsdp, DATA, float("inf")), (both, DATA_TENSOR, 1.0)])
def test_other_norms(four: Ranks, how: Callable[..., Any], sizes: dict[str, int], norm: float) -> None:
    four.check(case, how, sizes, {"norm": norm})


# ── DDP's hooks, FSDP's types ────────────────────────────────────────────────────────────────────────────────────


def hooked(rank: int, shards: Sequence[int]) -> None:
    """A hook of DDP's is called with the stage's gradients, once per step, and what it gives is what they become."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    mesh = mesh_of(DATA)
    group = mesh["data"].get_group()
    torch.manual_seed(0)
    model = blocks()
    plain = copy.deepcopy(model)
    seen: list[tuple[int, bool, int]] = []

    def compress(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations, which are strings here
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        seen.append((bucket.index(), bucket.is_last(), bucket.buffer().numel()))
        return bf16_compress_hook(state, bucket)

    def how(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
        wrapper = DistributedDataParallel(stage, process_group=group, bucket_cap_mb=0.0005)
        wrapper.register_comm_hook(group, compress)
        return wrapper

    options: dict[str, Any] = {"microbatches": 3, "mesh": mesh, "schedule": "zb_h1"}
    with ps.Pipeline(ps.split(model, stages=2), F.cross_entropy, parallelize=how, **options) as pipe:
        x, y = batch(0, sum(shards))
        pipe.step(*part(mesh, shards, x, y))
        F.cross_entropy(plain(x), y).backward()
        expected = dict(plain.named_parameters())
        exact = []
        for name, parameter in pipe.named_parameters():
            there = expected[name].grad
            assert parameter.grad is not None
            assert there is not None
            torch.testing.assert_close(parameter.grad, there, rtol=0.02, atol=1e-3)
            exact.append(torch.allclose(parameter.grad, there, rtol=1e-5, atol=1e-7))
        assert not all(exact), "nothing was compressed"
        assert sum(size for _, _, size in seen) == sum(p.numel() for p in pipe.parameters())
        assert [index for index, _, _ in seen] == list(range(len(seen)))
        assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
        assert len(seen) > 2


@pytest.mark.parametrize("shards", [UNEVEN, ONE_EMPTY], ids=str)
def test_ddp_hooks_are_called(four: Ranks, shards: tuple[int, int]) -> None:
    four.check(hooked, shards)


def mixed(rank: int, schedule: str) -> None:
    """FSDP's own mixed precision: bfloat16 in stages and on edges, gradients summed in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def how(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in stage.children():
            fully_shard(block, mesh=mesh["data"], mp_policy=policy)
        return fully_shard(stage, mesh=mesh["data"], mp_policy=policy)

    mesh = mesh_of(DATA)
    torch.manual_seed(0)
    model = blocks()
    plain = copy.deepcopy(model).bfloat16()
    x, y = batch(0, 10)
    options: dict[str, Any] = {"microbatches": 3, "mesh": mesh, "reduction": "sum", "schedule": schedule}
    with ps.Pipeline(ps.split(model, stages=2), squares, parallelize=how, **options) as pipe:
        for _ in range(2):
            result = pipe.step(*part(mesh, (6, 4), x, y))
            total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in plain.named_parameters()}
            for i, j in zip(x.split([2, 2, 2, 2, 1, 1]), y.split([2, 2, 2, 2, 1, 1]), strict=True):
                squares(plain(i.bfloat16()), j).backward()
                for name, parameter in plain.named_parameters():
                    assert parameter.grad is not None
                    total[name] += parameter.grad.float()
                    parameter.grad = None
            for name, parameter in pipe.named_parameters():
                assert parameter.dtype is torch.float32
                check_equal(parameter.grad, total[name], name)
            pipe.zero_grad()
            if result.outputs is not None:
                assert result.outputs.dtype is torch.bfloat16


def wide(rank: int) -> None:
    """Gradients of bfloat16 parameters are summed in float32 over micro-batches and replicas, and rounded once."""
    mesh = mesh_of(DATA)
    torch.manual_seed(0)
    model = blocks().bfloat16()
    plain = copy.deepcopy(model)
    x, y = batch(0, 12)
    options: dict[str, Any] = {"microbatches": 3, "mesh": mesh, "accumulate": "fp32", "reduction": "sum"}
    with ps.Pipeline(ps.split(model, stages=2), squares, parallelize=ddp, **options) as pipe:
        pipe.step(*part(mesh, EVEN, x.bfloat16(), y))
        total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in plain.named_parameters()}
        for i, j in zip(x.bfloat16().split(2), y.split(2), strict=True):
            squares(plain(i), j).backward()
            for name, parameter in plain.named_parameters():
                assert parameter.grad is not None
                total[name] += parameter.grad.float()
                parameter.grad = None
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, total[name].bfloat16(), rtol=0.008, atol=0)


def test_sums_in_float32_with_ddp(four: Ranks) -> None:
    four.check(wide)


def thawed(rank: int, how: Callable[..., Any]) -> None:
    """What is frozen, and what is in training mode, may change between steps."""
    mesh = mesh_of(DATA)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES))
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"microbatches": 2, "mesh": mesh, "parallelize": how, "schedule": "zb_h1"}
    with ps.Pipeline(ps.split(model, stages=2), F.cross_entropy, **options) as pipe:
        for step, free in enumerate([{0, 1, 2, 3}, {2}, {0, 3}, {3}, {1, 2}]):
            for number in range(4):
                model[number].requires_grad_(number in free)
                plain[number].requires_grad_(number in free)
            x, y = batch(step, 9)
            pipe.step(*part(mesh, UNEVEN, x, y))
            F.cross_entropy(plain(x), y).backward()
            check_gradients(pipe, plain)
            pipe.zero_grad()
            plain.zero_grad()


@pytest.mark.parametrize("how", [ddp, fsdp])
def test_freezing_between_steps(four: Ranks, how: Callable[..., Any]) -> None:
    four.check(thawed, how)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_mixed_precision_of_fsdp(four: Ranks, schedule: str) -> None:
    four.check(mixed, schedule)


def put_off(rank: int, how: Callable[..., Any], sizes: dict[str, int], expected: bool) -> None:
    mesh = mesh_of(sizes)
    options: dict[str, Any] = {"microbatches": 2, "mesh": mesh, "schedule": "zb_h1", "parallelize": how}
    with ps.Pipeline(ps.split(blocks(), stages=2), F.cross_entropy, **options) as pipe:
        pipe.step(*batch(0, 4))
        (stage,) = pipe._crew.stages.values()
        assert stage._recorder is not None
        assert bool(stage._recorder._bindings) is expected


@pytest.mark.parametrize(
    ("how", "sizes", "expected"), [(ddp, DATA, True), (fsdp_nested, DATA, True), (tensor_parallel, TENSOR, False)]
)
def test_weight_gradients_wait_for_w(
    four: Ranks, how: Callable[..., Any], sizes: dict[str, int], expected: bool
) -> None:
    four.check(put_off, how, sizes, expected)


# ── what cannot be ───────────────────────────────────────────────────────────────────────────────────────────────


def ddp_over_the_world(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
    return DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))


def ddp_ignoring(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, ["0.weight", "3.norm.bias"])
    return ddp(stage, mesh)


def fsdp_over_the_world(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(stage)


def fsdp_over_tensor(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(stage, mesh=mesh["tensor"])


def tensor_over_data(stage: nn.Module, mesh: ps.Mesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    name = next(name for name, part in stage.named_children() if isinstance(part, nn.Linear))
    parallelize_module(stage, mesh["data"], {name: ColwiseParallel()})


def sharded_output(stage: nn.Module, mesh: ps.Mesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    if mesh.is_first:
        last = ColwiseParallel(use_local_output=False)
        parallelize_module(stage, mesh["tensor"], {[name for name, _ in stage.named_children()][-1]: last})


class Renamed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def renamed(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
    return Renamed(stage)


def nonsense(stage: nn.Module, mesh: ps.Mesh) -> Any:
    return "stage"


def failing(stage: nn.Module, mesh: ps.Mesh) -> Any:
    if mesh.rank == 1:
        raise KeyError("no such layer")
    return stage


def replicated(stage: nn.Module, mesh: ps.Mesh) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(stage, mesh=mesh["data"])


REFUSED: list[tuple[Any, dict[str, int], dict[str, Any], str]] = [
    (ddp_over_the_world, DATA, {}, r"over ranks \[0, 1, 2, 3\], but the stage's replicas are ranks \[.*mesh\["),
    (ddp_ignoring, DATA, {}, "does not support parameters that DistributedDataParallel ignores"),
    (fsdp_over_the_world, DATA, {}, r"fully_shard is over ranks \[0, 1, 2, 3\], but the stage's replicas"),
    (fsdp_over_tensor, TENSOR, {}, r'fully_shard is over ranks.*pass mesh=mesh\["data"\]'),
    (tensor_over_data, DATA, {}, r'is distributed over ranks.*use mesh\["tensor"\]'),
    (renamed, DATA, {}, r"it has inner\..* in the place of .*weight.*stay those of the model"),
    (nonsense, DATA, {}, "parallelize gave a str for stage"),
    (failing, DATA, {}, "no such layer"),
    (replicated, DATA, {}, "replicate.* leave that out"),
    (fsdp, DATA, {"accumulate": "fp32"}, "accumulate='fp32' cannot be had for parameters in parts"),
    (tensor_parallel, TENSOR, {"accumulate": "fp32"}, "accumulate='fp32' cannot be had for parameters in parts"),
    (fsdp, DATA, {"offload": ps.Offload()}, "offload does not know parameters in parts"),
]


def refuse(rank: int, how: Callable[..., Any], sizes: dict[str, int], options: dict[str, Any]) -> str:
    with pytest.raises((ps.PlanError, ps.PipelineError, KeyError)) as caught:
        ps.Pipeline(ps.split(blocks(), stages=2), F.cross_entropy, mesh=mesh_of(sizes), parallelize=how, **options)
    return str(caught.value)


@pytest.mark.parametrize(("how", "sizes", "options", "message"), REFUSED)
def test_refused(
    four: Ranks, how: Callable[..., Any], sizes: dict[str, int], options: dict[str, Any], message: str
) -> None:
    for found in four.check(refuse, how, sizes, options):
        assert re.search(message, found), found


def tied_in_one_process(rank: int, how: Callable[..., Any]) -> str:
    """Stages 0 and 3 are both on the first rank: two calls of fully_shard make two parameters of their one."""
    mesh = mesh_of(DATA)
    options: dict[str, Any] = {"mesh": mesh, "schedule": "zbv", "microbatches": 4, "parallelize": how}
    plan = ps.split(Tied(), stages=4)
    assert plan.ties[0].stages in ((0, 2), (0, 3))
    with pytest.raises((ps.PlanError, ps.PipelineError)) as caught:
        ps.Pipeline(plan, F.cross_entropy, **options)
    return str(caught.value)


def tied_apart(rank: int) -> str:
    with pytest.raises((ps.PlanError, ps.PipelineError)) as caught:
        ps.Pipeline(ps.split(Tied(), stages=2), F.cross_entropy, mesh=mesh_of(TENSOR), parallelize=ties_differently)
    return str(caught.value)


def test_ties_are_laid_out_alike(four: Ranks) -> None:
    for found in four.check(tied_apart):
        assert "is one parameter of several stages, but parallelize has laid it out in different ways" in found


def test_ties_within_a_process_cannot_be_sharded(four: Ranks) -> None:
    for found in four.check(tied_in_one_process, fsdp):
        assert "were one parameter, and parallelize has made several of it" in found


def output_in_parts(rank: int) -> str:
    mesh = mesh_of(TENSOR)
    options: dict[str, Any] = {"mesh": mesh, "microbatches": 2, "parallelize": sharded_output}
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES))
    pipe = ps.Pipeline(ps.split(model, balance=[2, 1]), F.cross_entropy, **options)
    with pytest.raises((ps.PlanError, ps.PipelineError)) as caught:
        pipe.step(*batch(0, 4))
    return str(caught.value)


def test_a_distributed_output_is_refused(four: Ranks) -> None:
    for found in four.check(output_in_parts):
        assert "gives a DTensor with the layout" in found


def already(rank: int) -> str:
    mesh = mesh_of(DATA)
    model = blocks()
    ps.Pipeline(ps.split(model, stages=2), F.cross_entropy, mesh=mesh, parallelize=fsdp).close()
    with pytest.raises((ps.PlanError, ps.PipelineError)) as caught:
        ps.Pipeline(ps.split(model, stages=2), F.cross_entropy, mesh=mesh, parallelize=fsdp)
    return str(caught.value)


def test_a_model_is_sharded_once(four: Ranks) -> None:
    for found in four.check(already):
        assert "is a DTensor already" in found


def only_some(rank: int) -> str:
    mesh, plan = mesh_of(DATA), ps.split(blocks(), stages=2)
    with pytest.raises(ps.PlanError) as caught:
        ps.Pipeline(plan, F.cross_entropy, mesh=mesh, parallelize=fsdp if rank else None)
    return str(caught.value)


def test_all_ranks_parallelize_or_none(four: Ranks) -> None:
    for found in four.check(only_some):
        assert "parallelize is False on rank 0, but True on rank 1" in found


def test_parallelize_needs_a_mesh() -> None:
    plan = ps.split(blocks(), stages=2)
    with pytest.raises(ps.PlanError, match=r"pass mesh=ps\.Mesh"):
        ps.Pipeline(plan, F.cross_entropy, parallelize=unchanged)
    with pytest.raises(ps.PlanError, match=r"parallelize must be a function of \(stage, mesh\), got str"):
        ps.Pipeline(plan, F.cross_entropy, parallelize="ddp")  # type: ignore[arg-type]


# ── failing ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Fragile(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and bool((x > 1e6).any()):
            raise ValueError("too much")
        return x


def broken(rank: int, how: Callable[..., Any]) -> tuple[str, bool]:
    """One replica fails in the middle of a step: all learn of it, and parameters are what they were."""
    mesh = mesh_of(DATA)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Sequential(Fragile(), nn.Linear(6, CLASSES)))
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"mesh": mesh, "microbatches": 2, "parallelize": how}
    pipe = ps.Pipeline(ps.split(model, stages=2), F.cross_entropy, **options)
    x, y = batch(0, 12)
    pipe.step(*part(mesh, EVEN, x, y))
    pipe.zero_grad()
    x[10] = 1e9
    with pytest.raises(ps.PipelineError) as caught:
        pipe.step(*part(mesh, EVEN, x, y))
    expected = dict(plain.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is None
        if not hasattr(parameter, "full_tensor"):
            check_equal(parameter.detach(), expected[name].detach(), name)
    return str(caught.value), all(hasattr(p, "full_tensor") for p in pipe.parameters())


@pytest.mark.parametrize(("how", "in_parts"), [(ddp, False), (fsdp, True)])
def test_a_failure_reaches_all_replicas(four: Ranks, how: Callable[..., Any], in_parts: bool) -> None:
    for message, found in four.check(broken, how):
        assert "too much" in message
        assert found is in_parts
