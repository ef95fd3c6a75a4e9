"""TorchDistPackage beside a pipeline: replicas, norms over model ranks, and a loss scale that all share."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.compat.torchdistpackage import (
    NaiveDDP,
    NativeScalerPP,
    clip_grad_norm_,
    forward_backward,
    partition_uniform,
    test_comm,
    tpc,
)
from tests.compat.torchdistpackage_lines import own_inputs, summed
from tests.support.models import assert_same, batch, gradients, mlp
from tests.support.ranks import Ranks

# ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────


def replicas(rank: int, kind: str) -> None:
    tpc.setup_process_groups([("data", 2), ("pipe", 2)])
    test_comm()
    torch.manual_seed(rank)
    model = mlp(5)
    plain = copy.deepcopy(model)
    stage = nn.Sequential(*partition_uniform(model))
    if kind.startswith("DDP"):
        wrapped: Any = DistributedDataParallel(stage, process_group=tpc.get_group("data"))
        if kind == "DDP with a hook":
            wrapped.register_comm_hook(tpc.get_group("data"), fp16_compress_hook)
    else:
        for parameter in stage.parameters():  # made equal by the wrapper
            parameter.data.mul_(1 + tpc.get_dp_rank())
        wrapped = NaiveDDP(stage, reduce_op="avg" if kind == "avg" else "sum", num_grad_acc_iter=8)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

    def fwd_fn(values: Any) -> Any:
        return wrapped(values) if tpc.is_first_in_pipeline_group() else F.mse_loss(wrapped(values[0]), values[1])

    tolerance = {"rtol": 1e-2, "atol": 1e-3} if kind == "DDP with a hook" else {}
    for samples in ((8, 8), (10, 3)):  # replicas may have other numbers of samples, and of micro-batches
        plain.zero_grad()
        halves = [(batch(n, seed=n + r), batch(n, seed=n + 7 + r)) for r, n in enumerate(samples)]
        for x, y in halves:
            summed(plain, x, y, 4)
        expected = [p.grad if kind == "sum" else p.grad / 2 for p in partition_uniform(plain).parameters()]
        inputs = own_inputs(*halves[tpc.get_dp_rank()])
        if kind.startswith("DDP"):
            forward_backward(optimizer, fwd_fn, None, inputs, 4)
        else:  # two mini-batches, half each, are to make one step
            optimizer.zero_grad()
            forward_backward(None, fwd_fn, None, inputs, 4)
            local = [p.grad.clone() for p in stage.parameters() if p.grad is not None]
            theirs: list[Any] = [None] * 2
            dist.all_gather_object(theirs, local, tpc.get_group("data"))
            assert not theirs[0][0].equal(theirs[1][0])  # nothing is reduced before the eighth backward
            forward_backward(None, fwd_fn, None, inputs, 4)
            expected = [2 * grad for grad in expected]
        assert_same([p.grad for p in stage.parameters()], expected, **tolerance)


@pytest.mark.parametrize("kind", ["DDP", "DDP with a hook", "avg", "sum"])
def test_gradients_are_reduced_once_after_all_micro_batches(four: Ranks, kind: str) -> None:
    four.check(replicas, kind)


class Sided(nn.Module):
    """Layers of which one is used by the second replica alone, and one by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.second, self.never = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, replica: int) -> Tensor:
        x = self.always(x)
        return self.second(x) if replica else x  # type: ignore[no-any-return]


def one_sided(rank: int) -> None:
    tpc.setup_process_groups([("data", 2), ("pipe", 2)])
    stage, plain = Sided(), [Sided(), Sided()]
    wrapped = DistributedDataParallel(stage, process_group=tpc.get_group("data"), find_unused_parameters=True)
    first, replica = tpc.is_first_in_pipeline_group(), tpc.get_dp_rank()

    def fwd_fn(x: Tensor) -> Any:
        return wrapped(x, replica) if first else wrapped(x, replica).sum()

    forward_backward(None, fwd_fn, None, [batch(4)] if first else [], 2)
    for r in range(2):
        (plain[1](plain[0](batch(4), r), r).sum() / 2).backward()
    assert_same(gradients(stage), gradients(plain[tpc.get_pp_rank()]))
    assert stage.never.weight.grad is None


def test_parameters_that_some_replicas_do_not_use(four: Ranks) -> None:
    four.check(one_sided)


def naive(rank: int) -> None:
    """Without a pipeline, too."""
    tpc.setup_process_groups([("data", 4)])
    model = mlp(2)
    plain, wrapped = copy.deepcopy(model), NaiveDDP(model, num_grad_acc_iter=2)
    for first in range(2):
        x = batch(4, seed=rank + 4 * first)
        wrapped(x).sum().backward()
        for r in range(4):
            (plain(batch(4, seed=r + 4 * first)).sum() / 4).backward()
        wrapped.reduce_gradients()
    assert_same(gradients(model), gradients(plain))
    before = gradients(model)
    with wrapped.no_sync():
        (rank * wrapped(x).sum()).backward()
    assert (gradients(model)["0.weight"].equal(before["0.weight"])) == (rank == 0)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="reduce_op must be 'avg' or 'sum', got 'max'"):
        NaiveDDP(model, reduce_op="max")


def test_naive_ddp_alone(four: Ranks) -> None:
    four.check(naive)


# ── norms ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Halves(nn.Module):
    """A layer whose weight is in two parts, on two tensor ranks, and whose bias both have."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)


def norms(rank: int, norm_type: float) -> None:
    tpc.setup_process_groups([("pipe", 2), ("tensor", 2)])
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 4) for _ in range(2)], [torch.randn(4) for _ in range(2)]
    stage, half = tpc.get_pp_rank(), tpc.get_tp_rank()
    layer = Halves(torch.zeros(2, 4), torch.zeros(4))
    layer.weight.grad, layer.bias.grad = whole[0][stage][0].chunk(2)[half].clone(), whole[1][stage].clone()
    plain = [nn.Parameter(torch.zeros_like(t)) for t in (whole[0][0][0], whole[0][1][0], *whole[1])]
    for parameter, grad in zip(plain, (whole[0][0][0], whole[0][1][0], *whole[1]), strict=True):
        parameter.grad = grad.clone()
    expected = nn.utils.clip_grad_norm_(plain, 1.0, norm_type)
    found = clip_grad_norm_(layer.parameters(), 1.0, norm_type)
    assert_same(found, expected)
    assert_same(layer.weight.grad, plain[stage].grad.chunk(2)[half])  # type: ignore[union-attr]
    assert_same(layer.bias.grad, plain[2 + stage].grad)
    if stage == 0:  # a rank without gradients takes part
        layer.zero_grad()
    assert_same(clip_grad_norm_(iter(layer.parameters()), 100.0, norm_type), _norm(plain[1::2], norm_type))
    if stage == 1 and half == 0:
        layer.weight.grad[0, 0] = math.inf  # type: ignore[index]
    with pytest.raises(RuntimeError, match=r"of the gradients is inf, so they cannot be clipped"):
        clip_grad_norm_(layer.parameters(), 1.0, norm_type, error_if_nonfinite=True)


def _norm(parameters: list[nn.Parameter], norm_type: float) -> Tensor:
    flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    return torch.linalg.vector_norm(flat, norm_type)


@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
def test_the_norm_is_that_of_the_whole_model(four: Ranks, norm_type: float) -> None:
    """The original added up norms of ranks."""
    four.check(norms, norm_type)


def distributed_tensors(rank: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    tpc.setup_process_groups([("pipe", 2), ("tensor", 2)])
    stage = tpc.get_pp_rank()
    mesh = DeviceMesh.from_group(tpc.get_group("tensor"), "cpu", tpc.get_ranks_in_group("tensor"))
    grads = [torch.randn(4, 4, generator=torch.Generator().manual_seed(s)) for s in range(4)]
    plain = nn.Parameter(torch.zeros(4, 4))
    parameters = [plain]
    plain.grad = grads[stage].clone()
    for placement in (Shard(0), Replicate()):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [placement]))
        parameter.grad = distribute_tensor(grads[2 + stage].clone(), mesh, [placement])
        parameters.append(parameter)
    expected = torch.stack([*grads, *grads[2:]]).norm()
    assert_same(clip_grad_norm_(parameters, 1.0), expected)
    assert_same(parameters[1].grad.full_tensor(), grads[2 + stage] / expected)  # type: ignore[union-attr]


def test_the_norm_with_distributed_tensors(four: Ranks) -> None:
    four.check(distributed_tensors)


# ── the loss scale ───────────────────────────────────────────────────────────────────────────────────────────────


def scaled(rank: int) -> None:
    tpc.setup_process_groups([("data", 2), ("pipe", 2)])
    model = mlp(3)
    stage = nn.Sequential(*partition_uniform(model))
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (stage, plain)]
    scaler = NativeScalerPP(init_scale=1024.0)
    for step in range(3):
        x, y = batch(8), batch(8, seed=5)
        bad = step == 1 and rank == 0

        def fwd_fn(values: Any, bad: bool = bad) -> Any:
            if tpc.is_first_in_pipeline_group():
                return stage(values) * (math.inf if bad else 1.0), torch.ones(2)
            return F.mse_loss(stage(values[0]), values[2])

        loss = forward_backward(optimizers[0], fwd_fn, scaler.bwd_fn, own_inputs(x, y), 2)
        norm = scaler(loss, optimizers[0], clip_grad=0.5, parameters=stage.parameters())
        assert norm is not None
        if step != 1:
            plain.zero_grad()
            summed(plain, x, y, 2)
            assert_same(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
            optimizers[1].step()
        assert_same(list(stage.state_dict().values()), list(partition_uniform(plain).state_dict().values()))
        assert scaler.state_dict()["scale"] == (1024.0 if step == 0 else 512.0)
    other = NativeScalerPP()
    other.load_state_dict(scaler.state_dict())
    assert other.scale(torch.ones(())) == 512
    (other.scale(stage(batch()).sum()) * 0).backward()
    assert other(stage(batch()).sum(), optimizers[0], need_update=False) is None  # has a graph: its backward is run
    assert next(stage.parameters()).grad.abs().max() > 100  # type: ignore[union-attr]


def test_all_ranks_step_or_none(four: Ranks) -> None:
    """The original's ranks each had a scale of their own."""
    four.check(scaled)


def refuses(rank: int) -> None:
    tpc.setup_process_groups([("data", 2), ("pipe", 2)])
    wrapped = DistributedDataParallel(nn.Linear(4, 4), process_group=tpc.get_group("data"), static_graph=True)
    with pytest.raises((ps.PipelineError), match="does not support static_graph=True"):
        forward_backward(None, wrapped, None, [batch(8)] if tpc.is_first_in_pipeline_group() else [], 2)


def test_wrappers_that_cannot_wait(four: Ranks) -> None:
    four.check(refuses)
