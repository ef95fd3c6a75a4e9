"""``ps.plan``: the model is measured, and what comes back trains it as the plain model trains."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.profile import links
from penstock.profile.costs import LayerCosts, ModelCosts
from penstock.profile.measure import measure_costs
from tests.support.ranks import run_ranks

QUICK: dict[str, Any] = {"seconds": 0.3, "measure_seconds": 0.1}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) if i % 2 == 0 else nn.Tanh() for i in range(9)))


def batch(n: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(n, 8), torch.randn(n, 8)


def expected(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    plain = copy.deepcopy(model)
    loss = F.mse_loss(plain(x), y)
    loss.backward()
    return loss.detach(), [p.grad for p in plain.parameters() if p.grad is not None]


def check(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss, grads = expected(model, x, y)
    torch.testing.assert_close(pipe.step(x, y).loss, loss)
    for parameter, grad in zip(pipe.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_is_measured_planned_and_trained(recompute: bool) -> None:
    model, (x, y) = net(), batch()
    before = copy.deepcopy(model.state_dict())
    planned = ps.plan(model, x, devices=2, microbatches=3, recompute=recompute, **QUICK)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert planned.microbatches == 3
    assert planned.configuration.pipe <= 2
    assert planned.seconds > 0
    with planned.pipeline(F.mse_loss) as pipe:
        check(pipe, model, x, y)


def test_it_is_saved_and_read_again(tmp_path: Path) -> None:
    model, (x, y) = net(), batch()
    planned = ps.plan(model, x, devices=2, microbatches=2, **QUICK)
    planned.save(tmp_path / "plan.json")
    again = ps.PlanResult.load(tmp_path / "plan.json", model)
    assert again.best == planned.best
    assert again.others == planned.others
    assert again.plan == planned.plan
    with again.pipeline(F.mse_loss) as pipe:
        check(pipe, model, x, y)
    alone = ps.PlanResult.load(tmp_path / "plan.json")
    with pytest.raises(ps.PlanError, match="this plan was loaded without its model"):
        alone.pipeline(F.mse_loss)
    (tmp_path / "other.json").write_text('{"plan": 1}')
    with pytest.raises(ps.PlanError, match="is not a saved PlanResult"):
        ps.PlanResult.load(tmp_path / "other.json")


def test_costs_that_are_there_are_not_measured_again(tmp_path: Path) -> None:
    model, (x, _) = net(), batch()
    profile = measure_costs(model, x, seconds=0.05)
    profile.save(tmp_path / "costs.json")
    planned = ps.plan(model, costs=tmp_path / "costs.json", devices=2, batch=24, **QUICK)
    assert planned.configuration.samples * planned.microbatches >= 24
    other = ModelCosts(tuple(LayerCosts(f"x{i}", 1, 1, 1, 1, 0, 0, 0, 0) for i in range(2)), ())
    with pytest.raises(ps.PlanError, match="costs are of another model"):
        ps.plan(model, costs=other, devices=2, batch=4)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"devices": 0}, "devices=0 must be at least 1"),
        ({"devices": []}, r"devices=\[\] must be a number of ranks"),
        ({"sample": None, "devices": 2}, "give sample=, the input of the model"),
        ({"devices": 2, "memory": "16 bananas"}, "is not a size"),
        ({"devices": 2, "memory": 40}, "nothing fits the memory of 40 bytes"),
    ],
)
def test_wrong_use_says_what_is_wrong(how: dict[str, Any], message: str) -> None:
    arguments = {"sample": batch()[0], **QUICK, **how}
    with pytest.raises(ps.PlanError, match=message):
        ps.plan(net(), **arguments)


def plan_together(rank: int) -> tuple[str, float]:
    model, (x, y) = net(), batch()
    mesh = ps.Mesh(pipe=2)
    mock.patch.object(links, "ROUNDS", 8).start()  # not as exact as by default
    planned = ps.plan(model, x, mesh=mesh, microbatches=3, **QUICK)
    with planned.pipeline(F.mse_loss, mesh=mesh) as pipe:
        loss = float(pipe.step(x, y).loss)
    with pytest.raises(ps.PlanError, match="nothing fits the memory"):
        ps.plan(model, x, mesh=mesh, memory=40, **QUICK)
    return str(planned.schedule), loss


def test_under_a_mesh_all_ranks_have_one_plan() -> None:
    first, second = run_ranks(plan_together, 2)
    assert first == second
    assert first[1] == pytest.approx(float(expected(net(), *batch())[0]))
