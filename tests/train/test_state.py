"""Parameters and state of a pipeline have the plain model's names and values."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from tests.support.models import assert_same, batch, gradients, mlp


def normed() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_names_and_their_order_are_the_plain_models(schedule: str) -> None:
    model = normed()
    with ps.Pipeline(ps.split(model, stages=4), schedule=schedule) as pipe:
        assert list(pipe.state_dict()) == list(model.state_dict())
        assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
        assert all(mine is theirs for mine, theirs in zip(pipe.parameters(), model.parameters(), strict=True))


def test_a_parameter_that_stands_there_twice_is_there_once_as_in_the_plain_model() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    with ps.Pipeline(ps.split(model, stages=3)) as pipe:
        assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
        assert list(pipe.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize(("here", "there"), [(1, 4), (4, 1), (2, 3)])
def test_state_moves_between_pipelines_cut_in_any_way(here: int, there: int) -> None:
    source, target = normed(), nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)))
    with ps.Pipeline(ps.split(source, stages=here), F.mse_loss, microbatches=2) as pipe:
        pipe.step(batch(), batch(seed=5))
        state = copy.deepcopy(pipe.state_dict())
    with ps.Pipeline(ps.split(target, stages=there)) as pipe:
        pipe.load_state_dict(state)
    assert_same(target.state_dict(), source.state_dict(), rtol=0, atol=0)


def test_state_that_does_not_fit_names_what_is_missing_and_what_is_too_much() -> None:
    model = mlp(2)
    before = copy.deepcopy(model.state_dict())
    state = {name: torch.zeros_like(tensor) for name, tensor in before.items() if name != "0.bias"}
    with ps.Pipeline(ps.split(model, stages=2)) as pipe:
        with pytest.raises(ps.PlanError, match=r"missing \['0\.bias'\], unexpected \['nobody'\]"):
            pipe.load_state_dict({**state, "nobody": torch.ones(1)})
        assert_same(model.state_dict(), before, rtol=0, atol=0)
        pipe.load_state_dict({**state, "nobody": torch.ones(1)}, strict=False)
        assert not model[0].weight.any()
        assert_same(model[0].bias, nn.Parameter(before["0.bias"]))


def test_a_shape_that_does_not_fit_is_an_error() -> None:
    model = mlp(2)
    with (
        ps.Pipeline(ps.split(model, stages=2)) as pipe,
        pytest.raises((RuntimeError, ps.PlanError), match=r"0\.weight"),
    ):
        pipe.load_state_dict({**model.state_dict(), "0.weight": torch.ones(2, 2)})


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_clipping_is_torchs(norm_type: float, max_norm: float) -> None:
    model, plain = mlp(), mlp()
    F.mse_loss(plain(batch()), batch(seed=5)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    with ps.Pipeline(ps.split(model, stages=3), F.mse_loss, microbatches=4) as pipe:
        pipe.step(batch(), batch(seed=5))
        assert_same(pipe.clip_grad_norm_(max_norm, norm_type), expected)
    assert_same(gradients(model), gradients(plain))


def test_a_tie_counts_once_in_the_norm() -> None:
    def tied() -> nn.Sequential:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        return nn.Sequential(layer, nn.Tanh(), layer)

    model, plain = tied(), tied()
    F.mse_loss(plain(batch()), batch(seed=5)).backward()
    with ps.Pipeline(ps.split(model, stages=3), F.mse_loss) as pipe:
        pipe.step(batch(), batch(seed=5))
        assert_same(pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    assert_same(gradients(model), gradients(plain))


def test_clipping_without_gradients_is_zero() -> None:
    with ps.Pipeline(ps.split(mlp(), stages=3)) as pipe:
        assert float(pipe.clip_grad_norm_(1.0)) == 0.0


def test_a_norm_that_is_not_finite_is_an_error_when_asked_for() -> None:
    model = mlp()
    with ps.Pipeline(ps.split(model, stages=3), F.mse_loss) as pipe:
        pipe.step(batch(), batch())
        model[0].weight.grad.fill_(float("nan"))  # type: ignore[union-attr]
        before = gradients(model)
        with pytest.raises(RuntimeError, match="nan"):
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
        assert_same(gradients(model), before)


def test_zero_grad_forgets_or_zeroes() -> None:
    model = mlp()
    with ps.Pipeline(ps.split(model, stages=3), F.mse_loss) as pipe:
        pipe.step(batch(), batch())
        pipe.zero_grad(set_to_none=False)
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        pipe.zero_grad()
        assert all(p.grad is None for p in model.parameters())


def test_it_says_what_it_is() -> None:
    with ps.Pipeline(ps.split(mlp(), stages=4), schedule="zbv", microbatches=3) as pipe:
        assert repr(pipe) == "Pipeline(4 stages on 2 ranks, schedule 'zbv', 3 micro-batches)"


def test_weights_can_be_moved_and_the_model_moves_with_them() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            with ps.Block("first"):
                self.calls += 1
                x = self.first(x)
            with ps.Block("last"):
                return self.last(x)

    model = Counting()
    plan = ps.split(model, stages=["first", "last"])
    with ps.Pipeline(plan, F.mse_loss, microbatches=2, devices="cpu") as pipe:
        pipe.step(batch(), batch())
        pipe.move("meta")  # a device that is always there
        for state in (model.state_dict(), pipe.state_dict()):
            assert {tensor.device.type for tensor in state.values()} == {"meta"}
    with ps.Pipeline(ps.split(Counting(), stages=["first", "last"]), F.mse_loss, devices="cpu") as pipe:
        pipe.move()
        pipe.step(batch(), batch())
        assert pipe.state_dict()["calls"] == 1
