"""The stages of a traced model are compared with the whole model when they first run."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from tests.support.ranks import Ranks


class WithLengths(nn.Module):
    """Returns a pair whose second value is None."""

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


class FallsBack(nn.Module):
    """Calls a layer in another way where the first one is a TypeError."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.first(x, mask=None)
        except TypeError:
            x = self.first(x)
        return self.second(x)


STATE: Any = threading.local()


class ReadsThreadState(nn.Module):
    """Its forward depends on a value that is no part of the model, which a recording keeps as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * getattr(STATE, "scale", 1.0))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(x))
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_a_wrong_recording_is_an_error_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = ReadsThreadState(), torch.randn(4, 4), torch.randn(4, 4)
    plan = ps.split(model, stages=2, sample=x[:2])
    monkeypatch.setattr(STATE, "scale", 2.0, raising=False)
    with ps.Pipeline(plan, nn.MSELoss(), microbatches=2) as pipe:
        for _ in range(2):
            with pytest.raises(ps.PlanError, match=r"do not compute what the whole model computes.*verify=False"):
                pipe.step(x, y)
        assert all(parameter.grad is None for parameter in model.parameters())


def wrong_on_rank(rank: int) -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    plan = ps.split(ReadsThreadState(), stages=2, sample=x[:2], balance="parameters")
    STATE.scale = 2.0
    try:
        with (
            ps.Pipeline(plan, nn.MSELoss(), microbatches=2, mesh=ps.Mesh()) as pipe,
            pytest.raises(ps.PlanError, match="do not compute what the whole model computes"),
        ):
            pipe.step(x, y)
    finally:
        del STATE.scale


@pytest.mark.slow
def test_a_wrong_recording_is_an_error_on_all_ranks(two: Ranks) -> None:
    two.check(wrong_on_rank)


def test_verify_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    plan = ps.split(ReadsThreadState(), stages=2, sample=x[:2], verify=False)
    monkeypatch.setattr(STATE, "scale", 2.0, raising=False)
    with ps.Pipeline(plan, nn.MSELoss(), microbatches=2) as pipe:
        assert pipe.step(x, y).loss > 0


def test_branches_on_none_and_on_errors_are_those_of_the_plain_model() -> None:
    for model in (BranchOnNone(), FallsBack()):
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        with ps.Pipeline(ps.split(model, stages=2), nn.MSELoss(), microbatches=2) as pipe:
            torch.testing.assert_close(pipe.step(x, y).loss, nn.MSELoss()(model(x), y).detach())
            with torch.no_grad():
                torch.testing.assert_close(pipe(x[:, None]), model(x[:, None]))


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
    monkeypatch.setattr("penstock.engine.executor.compare_outputs", lambda *args: compared.append(args[4]["x"].shape))
    with ps.Pipeline(ps.split(Plain(), stages=2, blocks="layers"), nn.MSELoss(), microbatches=2) as pipe:
        for size in (8, 8, 6):
            pipe.step(torch.randn(size, 4), torch.randn(size, 4))
        pipe.eval()
        with torch.no_grad():
            pipe(torch.randn(2, 4))
    assert compared == [(4, 4), (1, 4)]


def test_an_nn_sequential_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.executor.compare_outputs", lambda *args: pytest.fail("compared"))
    with ps.Pipeline(ps.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), stages=2), nn.MSELoss()) as pipe:
        assert pipe.step(torch.randn(4, 4), torch.randn(4, 4)).loss > 0


def test_hidden_states_that_a_model_collects_by_hooks() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, image_size=8, patch_size=4, out_indices=[1, 2, 3, 4]
    )
    model = transformers.Dinov2Backbone(config).eval()
    x = torch.randn(2, 3, 8, 8)
    with ps.Pipeline(ps.split(model, stages=2), microbatches=1) as pipe, torch.no_grad():
        got, want = pipe(x)["feature_maps"], model(x).feature_maps
    assert len(got) == len(want) == 4
    assert all(map(torch.equal, got, want))


def test_a_model_that_changes_its_parameters_is_left_as_it_was() -> None:
    """A codebook that follows its inputs: the comparison must not move it twice."""

    class Following(Plain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.layers[0].weight.data.mul_(0.5).add_(x.mean())
            return self.layers[1](self.layers[0](x))

    model = Following()
    plain, x = copy.deepcopy(model), torch.randn(4, 4)
    with ps.Pipeline(ps.split(model, stages=2, sample=x), microbatches=1) as pipe, torch.no_grad():
        torch.testing.assert_close(pipe(x), plain(x))
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_a_pipeline_is_no_module() -> None:
    with ps.Pipeline(ps.split(nn.Sequential(nn.Linear(4, 4)), stages=1)) as pipe:
        with pytest.raises(AttributeError, match=r"'modules'.*not an nn.Module.*pipe\.step.*ps\.save\(path, pipe"):
            pipe.modules()
        with pytest.raises(AttributeError, match=r"no attribute 'unknown'$"):
            _ = pipe.unknown


def test_hooks_run_once_for_each_micro_batch() -> None:
    model, seen = BranchOnNone(), list[int]()
    plan = ps.split(model, stages=2, sample=torch.randn(2, 4))
    model.second.register_forward_hook(lambda *_: seen.append(1))
    with ps.Pipeline(plan, nn.MSELoss(), microbatches=2) as pipe:
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))
    assert len(seen) == 2
