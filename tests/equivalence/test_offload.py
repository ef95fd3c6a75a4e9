"""Offloading does not change results: losses, gradients and updates are bitwise equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.engine.offload.activations import ActivationOffload
from penstock.engine.offload.copies import HostBufferPool
from penstock.train.optimizer_offload import OffloadedOptimizer
from tests.equivalence.models import Case, stages_for
from tests.support.copies import LateCopies
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow

STEPS = 5
LAYERS = ("relu_", "tuple_edge", "twice", "dict_edge", "scale", "convs", "layer_norm", "lookup", "tanh")
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb_h1", "zbv"]
Record = list[tuple[str, Tensor]]
Prepare = Callable[[ps.Pipeline, torch.optim.Optimizer], torch.optim.Optimizer]


def case_for(schedule: str, ranks: int, microbatches: int = 6, batch: int = 13) -> Case:
    # No layer is shared: two threads would add to its gradient in no fixed order.
    return Case(LAYERS, False, 3, schedule, stages_for(schedule, ranks), microbatches, batch, "mean")


def plain_optimizer(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


def offload_optimizer(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return pipe.offload_optimizer(optimizer)


def train(case: Case, prepare: Prepare, **options: Any) -> Record:
    """Losses and gradients of five AdamW steps, and the final parameters and optimizer state."""
    found: Record = []
    model = case.build()
    x, y = case.data()
    options = {"microbatches": case.microbatches, "schedule": case.schedule, **options}
    if "mesh" not in options:
        options.setdefault("devices", ["cpu"] * (case.stages // stages_for(case.schedule, 1)))
    with ps.Pipeline(case.plan(model), F.cross_entropy, **options) as pipe:
        optimizer = prepare(pipe, torch.optim.AdamW(pipe.parameters(), lr=0.1))
        for step in range(STEPS):
            found.append((f"loss of step {step}", pipe.step(x + step, y).loss))
            for name, p in pipe.named_parameters():
                if p.grad is not None:
                    found.append((f"gradient of {name} in step {step}", p.grad.clone()))
            optimizer.step()
            optimizer.zero_grad()
        found += [(name, p.detach().clone()) for name, p in pipe.named_parameters()]
        for p, state in optimizer.state_dict()["state"].items():
            found += [(f"{name} of {p}", value.clone()) for name, value in state.items()]
    return found


def check_same(ours: Record, plain: Record) -> None:
    assert [name for name, _ in ours] == [name for name, _ in plain]
    for (name, mine), (_, theirs) in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs), name


# ── public API on the CPU: nothing is copied ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_offload_in_threads(schedule: str) -> None:
    case = case_for(schedule, 2)
    check_same(train(case, offload_optimizer, offload=ps.Offload(budget="2GiB")), train(case, plain_optimizer))


def train_on_rank(rank: int, schedule: str) -> None:
    case = case_for(schedule, 2)
    mesh = ps.Mesh(pipe=2)
    ours = train(case, offload_optimizer, mesh=mesh, offload=ps.Offload(bucket=1))
    check_same(ours, train(case, plain_optimizer, mesh=mesh))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_offload_over_processes(two: Ranks, schedule: str) -> None:
    two.check(train_on_rank, schedule)


def test_activations_or_optimizer_only() -> None:
    case = case_for("1f1b", 2)
    plain = train(case, plain_optimizer)
    check_same(train(case, plain_optimizer, offload=ps.Offload(optimizer=False)), plain)
    check_same(train(case, offload_optimizer, offload=ps.Offload(activations=False)), plain)


# ── with LateCopies on the CPU: everything is copied ───────────────────────────────────────────────────────────────


class UseLateCopies:
    """Installs LateCopies in the stages and in the optimizer."""

    def __init__(self, budget: int | None = None) -> None:
        self.pool = HostBufferPool(budget)
        self.copies: list[LateCopies] = []

    def __call__(self, pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for stage in pipe._executor.stages.values():
            copies, module = LateCopies(), stage.module
            resident = [*module.parameters(), *module.buffers()]
            stage.offload = ActivationOffload(torch.device("cpu"), copies, self.pool, resident, smallest=1, window=500)
            self.copies.append(copies)
        of_state = LateCopies()
        OffloadedOptimizer(optimizer, 3000, lambda tensor: of_state if tensor.dim() else None, smallest=1)
        return optimizer


@pytest.mark.parametrize(
    ("schedule", "budget", "recompute"),
    [
        (schedule, (None, 4000)[with_budget], ("never", "except_last")[(number + with_budget) % 2])
        for number, schedule in enumerate(SCHEDULES)
        for with_budget in (0, 1)
    ],
)
def test_late_copies_in_threads(schedule: str, budget: int | None, recompute: str) -> None:
    case, stand_in = case_for(schedule, 2), UseLateCopies(budget)
    ours = train(case, stand_in, recompute=recompute)
    check_same(ours, train(case, plain_optimizer, recompute=recompute))
    out = sum(copies.bytes_to_host for copies in stand_in.copies)
    assert 0 < sum(copies.bytes_to_device for copies in stand_in.copies) <= out
    assert budget is None or stand_in.pool.bytes <= budget


def test_device_holds_two_waiting_microbatches() -> None:
    """Of eight micro-batches that wait for their backward, only the next two are on the device."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())))
    stand_in = UseLateCopies()
    plan = ps.split(model, balance=[4, 4])
    loss = nn.MSELoss()
    with ps.Pipeline(plan, loss, microbatches=8, schedule="gpipe", devices=["cpu", "cpu"]) as pipe:
        stand_in(pipe, torch.optim.SGD(pipe.parameters()))
        pipe.step(torch.randn(64, 32), torch.randn(64, 32))
    one = 2 * 8 * 32 * 4  # a stage's two saved activations of eight rows
    for copies in stand_in.copies:
        assert copies.bytes_to_host >= 6 * one
        assert copies.most_on_device <= 3 * one


# ── errors ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_invalid_offload_options_are_refused() -> None:
    plan = ps.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), balance=[1, 1])
    with pytest.raises(ps.PlanError, match="offload"):
        ps.Pipeline(plan, F.mse_loss, offload=True)  # type: ignore[arg-type]
    with ps.Pipeline(plan, F.mse_loss, offload=ps.Offload(optimizer=False)) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        with pytest.raises(ps.PlanError, match=r"offload=Offload\(optimizer=True\)"):
            pipe.offload_optimizer(optimizer)
        optimizer.step()
    with ps.Pipeline(plan, F.mse_loss, offload=ps.Offload()) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        with pytest.raises(ps.PlanError, match="is not offloaded"):
            optimizer.step()
    optimizer.step()  # after close the parameters are the model's own again
