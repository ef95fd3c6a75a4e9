"""The self-test of a plan: it is silent about what is right, and names the first value of what is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.split.plan import Edge, Groups, LayerChain, build_plan
from penstock.split.sequential import SequentialChain
from tests.support.models import assert_same, batch, mlp, snapshot


class Net(nn.Module):
    """A linear layer whose output is doubled on the way out, with a count of its calls."""

    calls: Tensor

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.factor * self.linear(x)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Net(), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))


class Changed(nn.Module):
    """A stage, with something done to what it takes and gives."""

    def __init__(self, stage: nn.Module, forward: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        for name, module in stage.named_children():
            self.add_module(name, module)
        self._stage, self._forward = [stage], forward

    def forward(self, x: Any) -> Any:
        return self._forward(self._stage[0], x)


class Broken(SequentialChain):
    """A line whose stage 1 is not what it should be."""

    def __init__(self, model: nn.Module, change: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__(model)
        self.change = change

    def stage(self, groups: Groups, index: int) -> nn.Module:
        stage = super().stage(groups, index)
        return self.change(stage) if index == 1 else stage


GROUPS = [("0",), ("1", "2"), ("3", "4")]


def broken(change: Callable[[nn.Module, Any], Any], model: nn.Module | None = None) -> ps.Plan:
    return build_plan(Broken(model or net(), lambda stage: Changed(stage, change)), GROUPS)


# ── what is right ────────────────────────────────────────────────────────────────────────────────────────────────


def test_equal_stages_give_a_report_that_is_true() -> None:
    report = ps.split(net(), stages=3).check(batch())
    assert report
    assert str(report) == (
        "3 stages compute what the whole model computes: 1 outputs, 4 buffers and 9 gradients are equal"
    )


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_any_cut_in_any_mode(stages: int, mode: bool) -> None:
    assert ps.split(net().train(mode), stages=stages).check(batch())


@pytest.mark.parametrize("sample", [batch(), (batch(),), {"input": batch()}], ids=["tensor", "tuple", "dict"])
def test_the_sample_is_what_the_model_is_called_with(sample: Any) -> None:
    assert ps.split(net(), stages=2).check(sample)


def test_integers_in_place_layers_ties_and_frozen_layers() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 10, bias=False))
    model[3].weight = model[0].weight
    model[2].requires_grad_(False)
    assert ps.split(model, stages=4).check(torch.arange(10).view(2, 5))
    assert ps.split(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), stages=2).check(batch())


def test_nothing_to_differentiate_is_fine() -> None:
    frozen = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4)).requires_grad_(False)
    assert ps.split(frozen, stages=2).check(torch.arange(10))


def test_sparse_gradients_are_compared() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    assert ps.split(model, stages=2).check(torch.arange(10))


def test_the_loss_is_where_backward_starts_and_a_count_is_not_compared() -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"loss": x.square().mean(), "logits": x, "hidden": None}

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), Loss())
    assert ps.split(model, stages=3).check(batch()).outputs == 3


def test_arguments_that_stages_fix_are_fixed_for_the_whole_model_too() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, cache: bool = True) -> Any:
            x = self.linear(x)
            return (x, x) if cache else x

    class Fixes(LayerChain):
        def __init__(self, fixed: dict[str, Any]) -> None:
            self.model, self.layers, self.recipe, self.fixed = Cached(), ("linear",), {}, fixed

        def members(self, layer: str) -> list[tuple[str, Tensor]]:
            return list(self.model.named_parameters())

        def edges(self, groups: Groups) -> tuple[Edge, ...]:
            return ()

        def stage(self, groups: Groups, index: int) -> nn.Module:
            parts = nn.Sequential(self.model)
            return Changed(parts, lambda stage, arguments: stage[0](**arguments, cache=False))

    assert build_plan(Fixes({"cache": False}), [("linear",)]).check(batch())
    with pytest.raises(ps.PlanError, match=r"output\[0\] .* is missing"):
        build_plan(Fixes({}), [("linear",)]).check(batch())


def test_nothing_in_the_model_or_the_generators_changes() -> None:
    model = net()
    model[0].weight.grad = torch.full((4, 4), 3.0)
    before, grad = snapshot(model), model[0].weight.grad
    states, modes = (torch.get_rng_state(), random.getstate()), [m.training for m in model.modules()]
    sample = batch().requires_grad_()
    for plan in (ps.split(model, stages=3), broken(lambda stage, x: stage(x) * 2, model)):
        try:
            plan.check(sample)
        except ps.PlanError:
            assert isinstance(plan.chain, Broken)
        assert_same(snapshot(model), before)
        assert model[0].weight.grad is grad
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert [m.training for m in model.modules()] == modes
        assert sample.grad is None


def test_it_compares_gradients_also_where_they_are_off() -> None:
    plan = broken(lambda stage, x: stage(x.detach()))
    with torch.no_grad(), pytest.raises(ps.PlanError, match="gradient"):
        plan.check(batch())


# ── what is wrong ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stage_that_drops_a_scale_is_found() -> None:
    def drops(stage: nn.Module, x: Tensor) -> Tensor:
        return stage[1](stage[0].linear(x))  # type: ignore[index, union-attr, no-any-return]

    with pytest.raises(
        ps.PlanError, match=r"output \(stage 2\) differs: .*Greatest absolute difference: [\d.e-]+ at index"
    ):
        broken(drops).check(batch())


def test_a_stage_that_changes_its_output_is_found() -> None:
    with pytest.raises(ps.PlanError, match=r"3 stages do not compute .*: output \(stage 2\) differs: "):
        broken(lambda stage, x: stage(x) + 1).check(batch())


def test_the_last_stage_has_only_the_output() -> None:
    line = SequentialChain(net())
    groups = [("0", "1", "2"), ("3", "4")]
    plan = build_plan(Broken(line.model, lambda stage: Changed(stage, lambda stage, x: stage(x) + 1)), groups)
    with pytest.raises(ps.PlanError, match=r": output \(stage 1\) differs: .*Greatest absolute difference: 1\.0"):
        plan.check(batch())


def test_another_kind_of_output_is_told_in_words() -> None:
    def last(change: Callable[[Any], Any]) -> ps.Plan:
        return build_plan(Broken(mlp(), lambda s: Changed(s, lambda s, x: change(s(x)))), [("0",), tuple("123456")])

    with pytest.raises(ps.PlanError, match=r"output .* 'dtype' do not match: torch.float64 != torch.float32"):
        last(lambda x: x.double()).check(batch())
    with pytest.raises(ps.PlanError, match=r"output .* 'shape' do not match: .*\[7, 4\]\) != .*\[8, 4\]"):
        last(lambda x: x[1:]).check(batch())
    with pytest.raises(ps.PlanError, match=r"output .* is missing"):
        last(lambda x: (x,)).check(batch())
    with pytest.raises(ps.PlanError, match=r"output .* is None, in the whole model"):
        last(lambda x: None).check(batch())


def test_a_stage_that_detaches_is_found_by_the_gradient_next_to_it() -> None:
    with pytest.raises(ps.PlanError, match=r"the gradient of 0\.bias \(stage 0\) is None, in the whole model torch"):
        broken(lambda stage, x: stage(x.detach())).check(batch())


def test_a_stage_that_scales_only_the_gradient_is_found() -> None:
    def scaled(stage: nn.Module, x: Tensor) -> Tensor:
        return stage(x.detach() + 2 * (x - x.detach()))  # type: ignore[no-any-return]

    with pytest.raises(ps.PlanError, match=r"the gradient of 0\.bias \(stage 0\) differs: "):
        broken(scaled).check(batch())


def test_gradients_that_a_plain_sum_would_cancel_are_compared() -> None:
    class Apart(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.flip(0)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Apart())
    with pytest.raises(ps.PlanError, match=r"the gradient of 0\.(weight|bias) \(stage 0\) differs: "):
        broken(lambda stage, x: stage(x.detach() + 2 * (x - x.detach())), model).check(batch())


def test_a_stage_that_updates_a_buffer_twice_is_found_by_the_buffer() -> None:
    def twice(stage: nn.Module, x: Tensor) -> Tensor:
        stage[0].calls += 1  # type: ignore[index, union-attr, operator]
        return stage(x)  # type: ignore[no-any-return]

    with pytest.raises(ps.PlanError, match=r"buffer 1\.calls \(stage 1\) differs: .*2"):
        broken(twice).check(batch())


def test_a_stage_that_loses_a_parameter_is_found() -> None:
    class Lost(nn.Module):
        """Computes with values of its own in place of the parameters."""

        def __init__(self, stage: nn.Module) -> None:
            super().__init__()
            self._stage = [stage]

        def forward(self, x: Tensor) -> Tensor:
            stage = self._stage[0]
            values = {name: p.detach() for name, p in stage.named_parameters()}
            return torch.func.functional_call(stage, values, (x,))  # type: ignore[no-any-return]

    with pytest.raises(ps.PlanError, match=r"parameter 2\.bias is in no stage: it would be lost"):
        build_plan(Broken(net(), Lost), GROUPS).check(batch())


def test_a_parameter_that_nobody_uses_is_lost_all_the_same() -> None:
    model = net()
    model[1].register_parameter("spare", nn.Parameter(torch.ones(1)))
    assert ps.split(model, stages=3).check(batch())

    with pytest.raises(ps.PlanError, match=r"parameter 1\.spare is in no stage"):
        build_plan(Broken(model, _spareless), GROUPS).check(batch())


def _spareless(stage: nn.Module) -> nn.Module:
    """The stage under other clothes: all of its parameters but one."""
    part = Changed(nn.Module(), lambda _, x: stage(x))
    inner = nn.Module()
    inner.add_module("linear", stage.get_submodule("1.linear"))
    part.add_module("1", inner)
    part.add_module("2", stage.get_submodule("2"))
    return part


def test_other_random_numbers_are_found() -> None:
    def draws(stage: nn.Module, x: Tensor) -> Tensor:
        torch.rand(1)
        return stage(x)  # type: ignore[no-any-return]

    with pytest.raises(ps.PlanError, match=r"output \(stage 2\) differs"):
        broken(draws).check(batch())


def test_a_stage_that_fails_is_named() -> None:
    with pytest.raises(ps.PlanError, match=r"stage 1 does not run .* but the whole model does: RuntimeError"):
        broken(lambda stage, x: stage(x[:, :2])).check(batch())


def test_a_model_that_fails_is_not_blamed_on_its_stages() -> None:
    with pytest.raises(ps.PlanError, match="the model does not run on the sample: RuntimeError"):
        ps.split(net(), stages=2).check(batch(width=5))


def test_tolerances_allow_for_little() -> None:
    plan = broken(lambda stage, x: stage(x) * (1 + 1e-6))
    with pytest.raises(ps.PlanError):
        plan.check(batch())
    assert plan.check(batch(), rtol=1e-3, atol=1e-3)
    with pytest.raises(ps.PlanError):
        broken(lambda stage, x: stage(x) * 2).check(batch(), rtol=1e-3, atol=1e-3)


def test_a_model_that_is_not_the_same_twice_is_told_from_a_plan_that_is_wrong() -> None:
    dice = iter(range(100))

    class Moody(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + next(dice)

    model = nn.Sequential(nn.Linear(4, 4), Moody())
    with pytest.raises(ps.PlanError, match="the model itself gives other values when it is run again"):
        ps.split(model, stages=2).check(batch())


def test_nan_equals_nan() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.constant_(model[0].weight, torch.nan)
    assert ps.split(model, stages=2).check(batch())


def test_a_plan_without_its_model_cannot_be_checked() -> None:
    with pytest.raises(ps.PlanError, match="no model"):
        replace(ps.split(mlp(), stages=2), chain=None).check(batch())
