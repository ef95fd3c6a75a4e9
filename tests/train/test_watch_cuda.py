"""Over NCCL a rank that fails, dies or hangs is named as over gloo, and nothing waits on the GPU for ever."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from tests.support.rank_programs import run_processes

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class Fault(nn.Module):
    """An identity that goes wrong in the second micro-batch of the third step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += type(x) is Tensor
        if self.calls == 10:
            if self.how == "raise":
                raise ValueError("on purpose")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(120)
        return x


def train(rank: int, how: str, at: int) -> None:
    # NCCL refuses two ranks on one GPU of one host: let it take every rank for a host of its own.
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(64, 64), nn.Linear(64, 64)]
    layers[at] = nn.Sequential(layers[at], Fault(how))
    mesh = ps.Mesh(pipe=2, device="cuda:0")
    plan = ps.split(nn.Sequential(*layers), stages=2)
    pipe = ps.Pipeline(plan, F.mse_loss, microbatches=4, mesh=mesh, timeout=20.0 if how == "hang" else 100.0)
    for _ in range(5):
        pipe.step(torch.randn(16, 64), torch.randn(16, 64))


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("how", ["raise", "kill", "hang"])
def test_a_rank_that_goes_wrong_is_named_over_nccl(how: str, at: int) -> None:
    ended = run_processes(train, 2, how, at, timeout=120)
    own, other = ended[at], ended[1 - at]
    assert own.code == (-signal.SIGKILL if how == "kill" else 1)
    assert other.code == 1
    says = {
        "raise": f"rank {at}, stage {at}, micro-batch 1, action {at}F1: ValueError: on purpose",
        "kill": f"rank {at}: its process",  # with the first rank goes the store, and all that it could say
        "hang": f"rank {at}, stage {at}, micro-batch 1, action {at}F1: timed out",
    }
    assert f"PipelineError: {says[how]}" in other.text


class Shared(nn.Module):
    """A layer whose processes along ``tensor`` add up what they have; one of them fails before that, in the end."""

    def __init__(self, fails: bool, reads: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.fails, self.reads, self.calls = fails, reads, 0
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += type(x) is Tensor
        if self.fails and self.calls == 10:
            raise ValueError("on purpose")
        if self.group is not None:
            total = (x * self.weight).detach()
            dist.all_reduce(total, group=self.group)
            if self.reads:
                total.sum().item()
        return x * self.weight


def train_shared(rank: int, reads: bool) -> None:
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    dist.init_process_group("nccl")
    mesh = ps.Mesh(pipe=2, tensor=2, device="cuda:0")
    model = nn.Sequential(nn.Linear(64, 64), Shared(rank == 1, reads), nn.Linear(64, 64), Shared(False, reads))
    group = mesh["tensor"].get_group()

    def parallelize(stage: nn.Module, mesh: ps.Mesh) -> None:
        for part in stage.modules():
            if isinstance(part, Shared):
                part.group = group

    plan = ps.split(model, stages=2)
    pipe = ps.Pipeline(plan, F.mse_loss, microbatches=4, mesh=mesh, timeout=100.0, parallelize=parallelize)
    try:
        for _ in range(5):
            pipe.step(torch.randn(16, 64), torch.randn(16, 64))
    finally:
        time.sleep(40 if reads else 5)  # the failed process lives on


@pytest.mark.parametrize("reads", [False, True])
def test_a_failure_reaches_who_waits_in_a_collective_of_torchs(reads: bool) -> None:
    for ended in run_processes(train_shared, 4, reads, timeout=150):
        assert ended.code == 1
        assert "PipelineError: rank 1, stage 0, micro-batch 1, action 0F1: ValueError: on purpose" in ended.text
