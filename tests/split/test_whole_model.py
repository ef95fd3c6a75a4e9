"""A model whose forward cannot be recorded is one stage."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.split.plan import WholeModelChain


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, *others: Tensor, sign: float = 1.0) -> Any:
        self.calls = self.calls + 1
        x = self.norm(x if x.sum() > 0 else -x)
        return sign * self.linear(x) * self.scale + sum(others)


X = torch.linspace(-1, 2, 24).reshape(6, 4)


@pytest.mark.parametrize("kind", [{}, {"sign": -1.0}], ids=["positional", "named"])
def test_it_runs_as_it_is(kind: dict[str, Any]) -> None:
    model = Choosing()
    plain = copy.deepcopy(model)
    plan = ps.split(model, stages=1)
    assert isinstance(plan.chain, WholeModelChain)
    assert plan.groups == [("model",)]
    assert plan.check((X, X) if not kind else {"x": X, **kind})
    with ps.Pipeline(plan, lambda out: out.square().mean(), microbatches=2, devices="cpu") as pipe:
        assert list(pipe.state_dict()) == list(plain.state_dict())
        pipe.step((X, X) if not kind else {"x": X, **kind})
        for part in X.split(3):
            (plain(part, *[part] * (not kind), **kind).square().mean() / 2).backward()
        torch.testing.assert_close(model.scale.grad, plain.scale.grad)
        torch.testing.assert_close(pipe.state_dict(), plain.state_dict())
        pipe.eval()
        assert not model.training
        assert not model.norm.training


def test_more_stages_need_a_forward_that_can_be_recorded() -> None:
    with pytest.raises(ps.PlanError, match="Choosing sets calls while it runs"):
        ps.split(Choosing(), stages=2, sample=X)


def test_marks_in_it_are_not_passed_over() -> None:
    class Marked(Choosing):
        def forward(self, x: Tensor) -> Any:
            x = self.linear(x)
            return ps.cut(x) if x.sum() > 0 else -x

    with pytest.raises(ps.PlanError, match="cannot be traced here"):
        ps.split(Marked(), stages=1)


def test_its_plan_can_be_saved(tmp_path: Path) -> None:
    plan = ps.split(Choosing(), stages=1)
    plan.save(tmp_path / "plan.json")
    assert ps.Plan.load(tmp_path / "plan.json", Choosing()) == plan
