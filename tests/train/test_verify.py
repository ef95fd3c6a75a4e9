"""The stages of a traced model are compared with the whole model when they first run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import penstock as ps


class WithLengths(nn.Module):
    """Returns a pair whose second value is None, which a trace without values takes for a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.linear(x), None


class BranchOnNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = WithLengths(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, lengths = self.first(x)
        x = self.second(x) if lengths is None else x * 2
        return self.third(x)


class Plain(nn.Module):
    """Counts its calls, and the rows that it was given last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        x = self.drop(self.norm(x))
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_a_wrong_trace_is_an_error_before_the_first_step() -> None:
    """The forward took the branch of lengths that are there: a loss of 0.067 instead of 0.118, without a word."""
    model = BranchOnNone()
    with ps.Pipeline(ps.split(model, stages=2), nn.MSELoss(), microbatches=2) as pipe:
        with pytest.raises(ps.PlanError, match=r"do not compute what the whole model computes.*verify=False"):
            pipe.step(torch.randn(4, 4), torch.randn(4, 4))
        assert all(parameter.grad is None for parameter in model.parameters())
        with pytest.raises(ps.PlanError, match="do not compute"), torch.no_grad():
            pipe(torch.randn(4, 1, 4))


def test_verify_can_be_left_out() -> None:
    plan = ps.split(BranchOnNone(), stages=2, verify=False)
    with ps.Pipeline(plan, nn.MSELoss(), microbatches=2) as pipe:
        assert pipe.step(torch.randn(4, 4), torch.randn(4, 4)).loss > 0


def test_the_comparison_leaves_the_model_and_the_generators_as_they_were() -> None:
    model, x, y = Plain(), torch.randn(8, 4), torch.randn(8, 4)
    expected = copy.deepcopy(model)
    results = []
    for verify in (True, False):
        model.load_state_dict(expected.state_dict())
        torch.manual_seed(1)
        with ps.Pipeline(
            ps.split(model, stages=2, blocks="layers", verify=verify), nn.MSELoss(), microbatches=2, schedule="sharded"
        ) as pipe:
            loss = pipe.step(x, y).loss
        results.append((loss, torch.get_rng_state(), model.norm.running_mean.clone(), model.norm.num_batches_tracked))
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_each_kind_of_call_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("penstock.train.pipeline.compare_outputs", lambda *args: compared.append(args[3][0].shape))
    with ps.Pipeline(ps.split(Plain(), stages=2, blocks="layers"), nn.MSELoss(), microbatches=2) as pipe:
        for size in (8, 8, 6):
            pipe.step(torch.randn(size, 4), torch.randn(size, 4))
        pipe.eval()
        with torch.no_grad():
            pipe(torch.randn(2, 4))
    assert compared == [(4, 4), (1, 4)]


def test_an_nn_sequential_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.train.pipeline.compare_outputs", lambda *args: pytest.fail("compared"))
    with ps.Pipeline(ps.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), stages=2), nn.MSELoss()) as pipe:
        assert pipe.step(torch.randn(4, 4), torch.randn(4, 4)).loss > 0


def test_hidden_states_that_a_model_collects_by_hooks_are_not_lost() -> None:
    """Blocks that a stage skips add nothing: a backbone gave 2 feature maps instead of 4."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, image_size=8, patch_size=4, out_indices=[1, 2, 3, 4]
    )
    model = transformers.Dinov2Backbone(config).eval()
    x = torch.randn(2, 3, 8, 8)
    try:
        plan = ps.split(model, stages=2)
    except ps.PlanError:
        return
    with ps.Pipeline(plan, microbatches=1) as pipe, pytest.raises(ps.PlanError), torch.no_grad():
        pipe(x)
