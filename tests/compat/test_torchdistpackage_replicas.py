"""TorchDistPackage beside a pipeline: replicas, and a loss scale that all share."""

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
from penstock.compat import torchdistpackage
from penstock.compat.torchdistpackage import (
    NaiveDDP,
    NativeScalerPP,
    forward_backward,
    partition_uniform,
    tpc,
)
from tests.compat.torchdistpackage_support import own_inputs, summed
from tests.support.models import assert_same, batch, gradients, mlp
from tests.support.ranks import Ranks

# ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────


def replicas(rank: int, kind: str) -> None:
    tpc.setup_process_groups([("data", 2), ("pipe", 2)])
    torchdistpackage.test_comm()
    torch.manual_seed(rank)
    model = mlp(5)
    plain = copy.deepcopy(model)
    stage = nn.Sequential(*partition_uniform(model))
    if kind == "DDP":
        wrapped: Any = DistributedDataParallel(stage, process_group=tpc.get_group("data"))
    else:
        for parameter in stage.parameters():  # made equal by the wrapper
            parameter.data.mul_(1 + tpc.get_dp_rank())
        wrapped = NaiveDDP(stage, reduce_op="avg" if kind == "avg" else "sum", num_grad_acc_iter=8)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

    def fwd_fn(values: Any) -> Any:
        return wrapped(values) if tpc.is_first_in_pipeline_group() else F.mse_loss(wrapped(values[0]), values[1])

    for samples in ((8, 8), (10, 3)):  # replicas may have other numbers of samples, and of micro-batches
        plain.zero_grad()
        halves = [(batch(n, seed=n + r), batch(n, seed=n + 7 + r)) for r, n in enumerate(samples)]
        for x, y in halves:
            summed(plain, x, y, 4)
        expected = [p.grad if kind == "sum" else p.grad / 2 for p in partition_uniform(plain).parameters()]
        inputs = own_inputs(*halves[tpc.get_dp_rank()])
        if kind == "DDP":
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
        assert_same([p.grad for p in stage.parameters()], expected)


@pytest.mark.parametrize("kind", ["DDP", "avg", "sum"])
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


def buffers(rank: int) -> None:
    """DDP makes buffers equal in the first forward after a reduction, in every call."""
    tpc.setup_process_groups([("data", 2), ("pipe", 2)])
    norm = nn.BatchNorm1d(4, momentum=0.0)  # its statistics stay as they are set
    wrapped = DistributedDataParallel(norm, process_group=tpc.get_group("data"))
    first = tpc.is_first_in_pipeline_group()
    for call in range(2):
        norm.running_mean.fill_(10 * call + rank)  # type: ignore[union-attr, operator]
        forward_backward(
            None, lambda x: wrapped(x) if first else wrapped(x).sum(), None, [batch(8)] if first else [], 2
        )
        assert_same(norm.running_mean, torch.full((4,), 10.0 * call + tpc.get_pp_rank()))


def test_buffers_of_wrapped_stages(four: Ranks) -> None:
    four.check(buffers)


def buffers_alone(rank: int) -> None:
    """Saved tensors are not overwritten while other micro-batches are in flight."""
    tpc.setup_process_groups([("data", 1), ("pipe", 4)])
    wrapped = DistributedDataParallel(nn.BatchNorm1d(4), process_group=tpc.get_group("data"))
    broadcasts = []
    wrapped._sync_buffers = lambda: broadcasts.append(rank)  # type: ignore[attr-defined, method-assign]
    first, last = tpc.is_first_in_pipeline_group(), tpc.is_last_in_pipeline_group()
    for call in range(2):
        forward_backward(None, lambda x: wrapped(x).sum() if last else wrapped(x), None, [batch(8)] if first else [], 4)
        assert len(broadcasts) == call + 1


def test_buffers_of_wrapped_stages_without_replicas(four: Ranks) -> None:
    four.check(buffers_alone)


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
    with pytest.raises(ValueError, match="reduce_op must be 'avg' or 'sum', got 'max'"):
        NaiveDDP(model, reduce_op="max")


def test_naive_ddp_alone(four: Ranks) -> None:
    four.check(naive)


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
    group = tpc.get_group("data")
    for static in (True, False):
        wrapped = DistributedDataParallel(nn.Linear(4, 4), process_group=group, static_graph=static)
        if not static:
            wrapped.register_comm_hook(group, fp16_compress_hook)
        with pytest.raises((ps.PipelineError), match="does not support static_graph=True and communication hooks"):
            forward_backward(None, wrapped, None, [batch(8)] if tpc.is_first_in_pipeline_group() else [], 2)


def test_static_graph_and_communication_hooks_are_refused(four: Ranks) -> None:
    four.check(refuses)
