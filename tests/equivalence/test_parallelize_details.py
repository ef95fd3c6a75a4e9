"""DDP, FSDP2 and tensor-parallel stages: BatchNorm, dropout, scaler, hooks, mixed precision, failures."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from tests.equivalence.parallel import (
    batch,
    check_equal,
    check_gradients,
    check_state,
    mesh_of,
    replica_samples,
    sum_of_squares,
    train_case,
)
from tests.equivalence.parallel_models import (
    CLASSES,
    DATA,
    DATA_TENSOR,
    EVEN,
    ONE_EMPTY,
    TENSOR,
    UNEVEN,
    Block,
    ConditionalLayer,
    blocks,
    checkpoint_blocks,
    ddp,
    fsdp,
    fsdp_nested,
    tensor_parallel,
    tensor_parallel_and_fsdp,
)
from tests.support.ranks import RankExited, Ranks, run_ranks


def train_with_unused_parameters(rank: int, parallelize: Callable[..., Any]) -> None:
    """A parameter used by no replica has no gradient; one used by any replica has a gradient on all."""
    mesh = mesh_of(DATA)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), ConditionalLayer(), nn.Linear(6, CLASSES))
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"reduction": "sum", "microbatches": 2, "mesh": mesh, "parallelize": parallelize}
    with ps.Pipeline(ps.split(model, balance=[2, 2]), sum_of_squares, **options) as pipe:
        x, y = batch(0, 12)
        model[2].use_second = mesh.data_rank == 1
        pipe.step(*replica_samples(mesh, EVEN, x, y))
        for replica, rows in enumerate((slice(0, 6), slice(6, 12))):
            plain[2].use_second = replica == 1
            sum_of_squares(plain(x[rows]), y[rows]).backward()
        check_gradients(pipe, plain)
        if pipe.has_last_stage:
            gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
            assert gradients["2.never.weight"] is None
            assert gradients["2.second.weight"] is not None


@pytest.mark.parametrize("parallelize", [ddp, fsdp])
def test_parameters_unused_on_some_replicas(four: Ranks, parallelize: Callable[..., Any]) -> None:
    four.check(train_with_unused_parameters, parallelize)


def train_batchnorm(rank: int, parallelize: Callable[..., Any]) -> None:
    """Equal to one process that runs the micro-batches of the first replica, then those of the second."""
    mesh = mesh_of(DATA)
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)).double()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"microbatches": 3, "mesh": mesh, "parallelize": parallelize}
    with ps.Pipeline(ps.split(model, stages=2), F.cross_entropy, **options) as pipe:
        for step in range(2):
            x, y = batch(step, 15)
            x = x.double()
            pipe.step(*replica_samples(mesh, (9, 6), x, y))
            for i, j in zip(x.split([3] * 3 + [2] * 3), y.split([3] * 3 + [2] * 3), strict=True):
                (F.cross_entropy(plain(i), j) * len(i) / len(x)).backward()
            check_gradients(pipe, plain)
            check_state(pipe, plain)


@pytest.mark.parametrize("parallelize", [ddp, fsdp])
def test_batchnorm(four: Ranks, parallelize: Callable[..., Any]) -> None:
    four.check(train_batchnorm, parallelize)


def train_dropout(rank: int, parallelize: Callable[..., Any], sizes: dict[str, int]) -> None:
    """With a seed, layers use the same random numbers as in a pipeline in one process."""
    mesh = mesh_of(sizes)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), Block(), Block(), nn.Dropout(0.5), nn.Linear(6, CLASSES))
    plain = copy.deepcopy(model)
    x, y = batch(0, 12)
    count, shards = 4 // mesh.data, (12 // mesh.data,) * mesh.data
    alone = ps.Pipeline(ps.split(plain, stages=1), F.cross_entropy, microbatches=4, seed=7)
    options: dict[str, Any] = {"microbatches": count, "mesh": mesh, "seed": 7, "recompute": "always"}
    pipe = ps.Pipeline(ps.split(model, stages=mesh.pipe), F.cross_entropy, parallelize=parallelize, **options)
    with pipe, alone:
        for _ in range(2):
            check_equal(pipe.step(*replica_samples(mesh, shards, x, y)).loss, alone.step(x, y).loss, "loss")
            check_gradients(pipe, plain)


@pytest.mark.parametrize(
    ("parallelize", "sizes"),
    [
        (ddp, DATA),
        (checkpoint_blocks, DATA),
        (tensor_parallel, TENSOR),
        (tensor_parallel_and_fsdp, DATA_TENSOR),
    ],
)
def test_seeded_dropout(four: Ranks, parallelize: Callable[..., Any], sizes: dict[str, int]) -> None:
    four.check(train_dropout, parallelize, sizes)


def train_with_scaler(rank: int, parallelize: Callable[..., Any], sizes: dict[str, int]) -> None:
    """An overflow on one rank skips the step on every rank."""
    mesh = mesh_of(sizes)
    torch.manual_seed(0)
    model = blocks()
    plain = copy.deepcopy(model)
    shards = UNEVEN if mesh.data > 1 else (9,)
    options: dict[str, Any] = {"microbatches": 2, "mesh": mesh, "parallelize": parallelize}
    with ps.Pipeline(ps.split(model, stages=mesh.pipe), F.cross_entropy, **options) as pipe:
        scaler = ps.GradScaler(pipe, init_scale=1024.0, growth_interval=2)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(4):
            x, y = batch(step, 9)
            if step == 2:
                x[0] = torch.inf
            pipe.step(*replica_samples(mesh, shards, x, y))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step != 2:
                F.cross_entropy(plain(x), y).backward()
                reference.step()
                reference.zero_grad()
            assert scaler.get_scale() == (1024.0, 2048.0, 1024.0, 1024.0)[step]
        check_state(pipe, plain)


@pytest.mark.parametrize(
    ("parallelize", "sizes"),
    [(ddp, DATA), (tensor_parallel, TENSOR), (tensor_parallel_and_fsdp, DATA_TENSOR)],
)
def test_grad_scaler(four: Ranks, parallelize: Callable[..., Any], sizes: dict[str, int]) -> None:
    four.check(train_with_scaler, parallelize, sizes)


@pytest.mark.parametrize(
    ("parallelize", "sizes", "norm"), [(fsdp, DATA, float("inf")), (tensor_parallel_and_fsdp, DATA_TENSOR, 1.0)]
)
def test_clip_grad_norm_types(four: Ranks, parallelize: Callable[..., Any], sizes: dict[str, int], norm: float) -> None:
    four.check(train_case, parallelize, sizes, {"norm": norm})


# ── DDP hooks, FSDP mixed precision, frozen parameters ─────────────────────────────────────────────────────────────


def train_with_comm_hook(rank: int, shards: Sequence[int]) -> None:
    """DDP calls its communication hook once per bucket and step; the gradients become the hook's results."""
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

    def parallelize(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
        wrapper = DistributedDataParallel(stage, process_group=group, bucket_cap_mb=0.0005)
        wrapper.register_comm_hook(group, compress)
        return wrapper

    options: dict[str, Any] = {"microbatches": 3, "mesh": mesh, "schedule": "zb_h1"}
    with ps.Pipeline(ps.split(model, stages=2), F.cross_entropy, parallelize=parallelize, **options) as pipe:
        x, y = batch(0, sum(shards))
        pipe.step(*replica_samples(mesh, shards, x, y))
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
def test_ddp_comm_hooks_are_called(four: Ranks, shards: tuple[int, int]) -> None:
    four.check(train_with_comm_hook, shards)


def train_in_mixed_precision(rank: int, schedule: str) -> None:
    """FSDP's mixed precision: bfloat16 in stages and messages, gradients summed in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def parallelize(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
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
    with ps.Pipeline(ps.split(model, stages=2), sum_of_squares, parallelize=parallelize, **options) as pipe:
        for _ in range(2):
            result = pipe.step(*replica_samples(mesh, (6, 4), x, y))
            total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in plain.named_parameters()}
            for i, j in zip(x.split([2, 2, 2, 2, 1, 1]), y.split([2, 2, 2, 2, 1, 1]), strict=True):
                sum_of_squares(plain(i.bfloat16()), j).backward()
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


def accumulate_in_float32(rank: int) -> None:
    """Gradients of bfloat16 parameters are summed in float32 over micro-batches and replicas, and rounded once."""
    mesh = mesh_of(DATA)
    torch.manual_seed(0)
    model = blocks().bfloat16()
    plain = copy.deepcopy(model)
    x, y = batch(0, 12)
    options: dict[str, Any] = {"microbatches": 3, "mesh": mesh, "accumulate": "fp32", "reduction": "sum"}
    with ps.Pipeline(ps.split(model, stages=2), sum_of_squares, parallelize=ddp, **options) as pipe:
        pipe.step(*replica_samples(mesh, EVEN, x.bfloat16(), y))
        total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in plain.named_parameters()}
        for i, j in zip(x.bfloat16().split(2), y.split(2), strict=True):
            sum_of_squares(plain(i), j).backward()
            for name, parameter in plain.named_parameters():
                assert parameter.grad is not None
                total[name] += parameter.grad.float()
                parameter.grad = None
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, total[name].bfloat16(), rtol=0.008, atol=0)


def test_fp32_accumulation_with_ddp(four: Ranks) -> None:
    four.check(accumulate_in_float32)


def freeze_between_steps(rank: int, parallelize: Callable[..., Any]) -> None:
    """``requires_grad`` may change between steps."""
    mesh = mesh_of(DATA)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES))
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"microbatches": 2, "mesh": mesh, "parallelize": parallelize, "schedule": "zb_h1"}
    with ps.Pipeline(ps.split(model, stages=2), F.cross_entropy, **options) as pipe:
        for step, free in enumerate([{0, 1, 2, 3}, {2}, {0, 3}, {3}, {1, 2}]):
            for number in range(4):
                model[number].requires_grad_(number in free)
                plain[number].requires_grad_(number in free)
            x, y = batch(step, 9)
            pipe.step(*replica_samples(mesh, UNEVEN, x, y))
            F.cross_entropy(plain(x), y).backward()
            check_gradients(pipe, plain)
            pipe.zero_grad()
            plain.zero_grad()


@pytest.mark.parametrize("parallelize", [ddp, fsdp])
def test_freezing_between_steps(four: Ranks, parallelize: Callable[..., Any]) -> None:
    four.check(freeze_between_steps, parallelize)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_fsdp_mixed_precision(four: Ranks, schedule: str) -> None:
    four.check(train_in_mixed_precision, schedule)


def check_deferred_weight_grads(
    rank: int, parallelize: Callable[..., Any], sizes: dict[str, int], expected: bool
) -> None:
    mesh = mesh_of(sizes)
    options: dict[str, Any] = {"microbatches": 2, "mesh": mesh, "schedule": "zb_h1", "parallelize": parallelize}
    with ps.Pipeline(ps.split(blocks(), stages=2), F.cross_entropy, **options) as pipe:
        pipe.step(*batch(0, 4))
        (stage,) = pipe._executor.stages.values()
        assert stage._recorder is not None
        assert bool(stage._recorder.forwards) is expected


@pytest.mark.parametrize(
    ("parallelize", "sizes", "expected"),
    [(ddp, DATA, True), (fsdp_nested, DATA, True), (tensor_parallel, TENSOR, False)],
)
def test_weight_gradients_are_deferred_to_w(
    four: Ranks, parallelize: Callable[..., Any], sizes: dict[str, int], expected: bool
) -> None:
    four.check(check_deferred_weight_grads, parallelize, sizes, expected)


# ── failures ───────────────────────────────────────────────────────────────────────────────────────────────────────


class FailsOnLargeInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and bool((x > 1e6).any()):
            raise ValueError("too much")
        return x


def fail_on_one_replica(rank: int, parallelize: Callable[..., Any]) -> tuple[str, bool]:
    """One replica fails in a step: all ranks raise, and parameters are unchanged."""
    mesh = mesh_of(DATA)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Sequential(FailsOnLargeInput(), nn.Linear(6, CLASSES)))
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"mesh": mesh, "microbatches": 2, "parallelize": parallelize}
    pipe = ps.Pipeline(ps.split(model, stages=2), F.cross_entropy, **options)
    x, y = batch(0, 12)
    pipe.step(*replica_samples(mesh, EVEN, x, y))
    pipe.zero_grad()
    x[10] = 1e9
    with pytest.raises(ps.PipelineError) as caught:
        pipe.step(*replica_samples(mesh, EVEN, x, y))
    expected = dict(plain.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is None
        if not hasattr(parameter, "full_tensor"):
            check_equal(parameter.detach(), expected[name].detach(), name)
    return str(caught.value), all(hasattr(p, "full_tensor") for p in pipe.parameters())


def exit_between_steps(rank: int) -> str:
    """The last process exits between steps while its peer waits in a torch collective."""
    options: dict[str, Any] = {"mesh": ps.Mesh(**TENSOR), "microbatches": 2, "parallelize": tensor_parallel}
    pipe = ps.Pipeline(ps.split(blocks(), stages=2), F.cross_entropy, **options)
    pipe.step(*batch(0, 8))
    if rank == 3:
        os._exit(0)
    with pytest.raises(ps.PipelineError) as caught:
        pipe.step(*batch(0, 8))
    return str(caught.value)


def test_error_names_the_killed_process() -> None:
    *others, last = run_ranks(exit_between_steps, 4, timeout=120.0)
    assert isinstance(last, RankExited)
    for message in others:
        assert "rank 3: its process is gone" in message, message


def fail_beside_a_collective(rank: int) -> str:
    """One of two ranks that share a stage fails while the other waits in a torch collective."""
    model = blocks()
    plan = ps.split(model, stages=2)
    options: dict[str, Any] = {"mesh": ps.Mesh(**TENSOR), "microbatches": 2, "parallelize": tensor_parallel}
    pipe = ps.Pipeline(plan, F.cross_entropy, **options)
    pipe.step(*batch(0, 8))
    if rank == 1:
        model[0].register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ps.PipelineError) as caught:
        pipe.step(*batch(0, 8))
    return str(caught.value)


def test_failure_ends_collectives_of_other_ranks() -> None:
    """The failed process stays alive."""
    for message in run_ranks(fail_beside_a_collective, 4, timeout=60.0):
        assert message.startswith("rank 1, stage 0, micro-batch 0, action 0F0: ZeroDivisionError"), message


@pytest.mark.parametrize(("parallelize", "is_sharded"), [(ddp, False), (fsdp, True)])
def test_failure_is_raised_on_all_replicas(four: Ranks, parallelize: Callable[..., Any], is_sharded: bool) -> None:
    for message, found in four.check(fail_on_one_replica, parallelize):
        assert "too much" in message
        assert found is is_sharded
