"""``ps.split`` of an ``nn.Sequential``: what it takes, what it refuses, and that it leaves the model alone."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import penstock as ps
from tests.support.models import assert_same, mlp, snapshot


def cut(plan: ps.Plan) -> list[list[str]]:
    return [list(stage.layers) for stage in plan.stages]


def four() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))


# ── the cut ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_balance_says_how_many_layers_each_stage_has() -> None:
    assert cut(ps.split(four(), balance=[1, 3])) == [["0"], ["1", "2", "3"]]


def test_balance_may_be_any_sequence_of_numbers() -> None:
    assert cut(ps.split(four(), balance=(2, 2))) == cut(ps.split(four(), balance=[2, 2]))


def test_stages_balances_the_number_of_parameters() -> None:
    wide = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    assert cut(ps.split(wide, stages=2)) == [["0"], ["1", "2", "3"]]


def test_layers_without_parameters_do_not_all_land_in_one_stage() -> None:
    idle = nn.Sequential(*(nn.ReLU() for _ in range(6)))
    assert cut(ps.split(idle, stages=3)) == [["0", "1"], ["2", "3"], ["4", "5"]]


def test_one_stage_and_as_many_stages_as_layers_are_both_fine() -> None:
    assert cut(ps.split(four(), stages=1)) == [["0", "1", "2", "3"]]
    assert cut(ps.split(four(), stages=4)) == [["0"], ["1"], ["2"], ["3"]]


def test_names_are_the_models_own() -> None:
    named = nn.Sequential(OrderedDict(stem=nn.Linear(2, 2), act=nn.ReLU(), head=nn.Linear(2, 2)))
    assert cut(ps.split(named, balance=[2, 1])) == [["stem", "act"], ["head"]]


def test_a_nested_sequential_is_one_layer() -> None:
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    assert cut(ps.split(nested, stages=2)) == [["0"], ["1"]]


def test_a_subclass_that_keeps_sequentials_forward_is_fine() -> None:
    class Trunk(nn.Sequential):
        """A name of its own, nothing else."""

    assert cut(ps.split(Trunk(nn.Linear(2, 2), nn.Linear(2, 2)), stages=2)) == [["0"], ["1"]]


def test_stages_feed_each_other_in_a_line() -> None:
    plan = ps.split(four(), stages=3)
    assert [(edge.src, edge.dst) for edge in plan.edges] == [(0, 1), (1, 2)]


# ── what it refuses ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("balance", [[2, 3], [1, 2], [4, 1]], ids=str)
def test_balance_with_a_wrong_sum_names_both_numbers(balance: list[int]) -> None:
    with pytest.raises(ps.PlanError, match=rf"{sum(balance)} layers.* has 4"):
        ps.split(four(), balance=balance)


def test_balance_takes_whole_numbers_from_one_up() -> None:
    for balance in [[], [0, 4], [-1, 5], [2.0, 2], [True, 3], ["2", "2"], [None, 4]]:
        with pytest.raises(ps.PlanError, match="balance="):
            ps.split(four(), balance=balance)  # type: ignore[arg-type]


@pytest.mark.parametrize("balance", [4, "22", 2.0], ids=repr)
def test_balance_that_is_no_list_is_refused(balance: object) -> None:
    with pytest.raises(ps.PlanError, match="balance must be a list"):
        ps.split(four(), balance=balance)  # type: ignore[arg-type]


@pytest.mark.parametrize("stages", [0, -1, 2.0, True, "2"], ids=repr)
def test_stages_is_a_positive_whole_number(stages: object) -> None:
    with pytest.raises(ps.PlanError, match="positive"):
        ps.split(four(), stages=stages)  # type: ignore[arg-type]


def test_more_stages_than_layers_names_both_numbers() -> None:
    with pytest.raises(ps.PlanError, match=r"5 stages.* 4 layers"):
        ps.split(four(), stages=5)


@pytest.mark.parametrize("how", [{}, {"balance": [2, 2], "stages": 2}], ids=["neither", "both"])
def test_either_balance_or_stages_is_needed(how: dict[str, object]) -> None:
    with pytest.raises(ps.PlanError, match="either"):
        ps.split(four(), **how)  # type: ignore[arg-type]


class _Residual(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + super().forward(input)


def test_a_sequential_with_a_forward_of_its_own_is_traced() -> None:
    of_object = four()
    of_object.forward = lambda x: 2 * nn.Sequential.forward(of_object, x)  # type: ignore[method-assign]
    for model in (_Residual(*four()), of_object):
        plan = ps.split(model, stages=2)
        assert plan.recipe["front"] == "trace"
        assert plan.check(torch.randn(2, *model[0].weight.shape[1:]))


def test_a_list_of_modules_cannot_run() -> None:
    with pytest.raises(ps.PlanError, match="ModuleList"):
        ps.split(nn.ModuleList([nn.Linear(2, 2)]), stages=1)


def test_something_that_is_no_module_is_refused() -> None:
    with pytest.raises(ps.PlanError, match="got list"):
        ps.split([nn.Linear(2, 2)], stages=1)  # type: ignore[arg-type]


def test_an_empty_sequential_is_refused() -> None:
    with pytest.raises(ps.PlanError, match="no layers"):
        ps.split(nn.Sequential(), stages=1)


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_on_the_sequential_itself_are_refused_because_nobody_would_call_them(register: str) -> None:
    model = four()
    getattr(model, register)(lambda *args: None)
    with pytest.raises(ps.PlanError, match="hooks"):
        ps.split(model, stages=2)


def test_parameters_and_buffers_of_the_sequential_itself_are_refused_because_they_would_be_lost() -> None:
    model = four()
    model.register_buffer("mean", torch.zeros(1))
    with pytest.raises(ps.PlanError, match=r"mean of the nn\.Sequential itself would be lost"):
        ps.split(model, stages=2)
    model.register_buffer("mean", torch.zeros(1), persistent=False)
    assert cut(ps.split(model, stages=1)) == [["0", "1", "2", "3"]]
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    with pytest.raises(ps.PlanError, match="scale of"):
        ps.split(model, stages=2)


def test_layers_that_do_not_know_their_size_yet_are_refused_by_name() -> None:
    lazy = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises(ps.PlanError, match="LazyLinear"):
        ps.split(lazy, stages=2)


# ── what it leaves alone ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_model_is_not_touched() -> None:
    model = mlp().train()
    model[2].eval()
    before, members, attributes = snapshot(model), list(model), set(vars(model))
    plan = ps.split(model, stages=2)
    plan.stage_module(0), plan.stage_module(1)
    assert_same(snapshot(model), before)
    assert list(model) == members
    assert set(vars(model)) == attributes


def test_stages_hold_the_models_own_layers() -> None:
    model = four()
    plan = ps.split(model, balance=[1, 3])
    assert list(plan.stage_module(0)) == [model[0]]
    assert list(plan.stage_module(1)) == [model[1], model[2], model[3]]


def test_a_layer_in_evaluation_mode_stays_so() -> None:
    model = mlp().train()
    model[0].eval()
    with ps.Pipeline(ps.split(model, stages=2), nn.MSELoss()) as pipe:
        pipe.step(torch.ones(2, 4), torch.ones(2, 4))
    assert [layer.training for layer in model] == [False, True, True, True, True, True, True]


# ── parameters that stand in several places ──────────────────────────────────────────────────────────────────────


def tied(*where: int, layers: int = 5) -> nn.Sequential:
    """A model whose layers ``where`` have one weight between them."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    for i in where[1:]:
        model[i].weight = model[where[0]].weight
    return model


def test_a_parameter_in_several_stages_is_a_tie() -> None:
    plan = ps.split(tied(0, 3), stages=5)
    assert [(tie.names, tie.stages) for tie in plan.ties] == [(("0.weight", "3.weight"), (0, 3))]


def test_a_tie_may_have_more_than_two_ends_and_there_may_be_several() -> None:
    model = tied(0, 2, 4)
    model[3].bias = model[1].bias
    plan = ps.split(model, stages=5)
    assert {(tie.names, tie.stages) for tie in plan.ties} == {
        (("0.weight", "2.weight", "4.weight"), (0, 2, 4)),
        (("1.bias", "3.bias"), (1, 3)),
    }


def test_a_parameter_shared_inside_one_stage_is_no_tie() -> None:
    assert ps.split(tied(0, 1), balance=[2, 3]).ties == ()


def test_equal_values_are_not_a_tie() -> None:
    model = four()
    model[3].load_state_dict(model[0].state_dict())
    assert ps.split(model, stages=4).ties == ()


def test_a_layer_that_stands_there_twice_is_two_layers_and_a_tie() -> None:
    layer = nn.Linear(2, 2)
    plan = ps.split(nn.Sequential(layer, nn.ReLU(), layer), balance=[1, 1, 1])
    assert cut(plan) == [["0"], ["1"], ["2"]]
    assert {tie.names for tie in plan.ties} == {("0.weight", "2.weight"), ("0.bias", "2.bias")}


def test_a_shared_parameter_counts_once_within_a_stage() -> None:
    layer = nn.Linear(2, 2)
    plan = ps.split(nn.Sequential(layer, layer, nn.Linear(2, 2)), balance=[2, 1])
    assert [stage.parameters for stage in plan.stages] == [6, 6]


def test_a_sample_may_have_a_tensor_that_all_samples_share() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) + shift)

    batch = (torch.randn(6, 4), ps.Broadcast(torch.randn(1, 4)))
    model = Shifted()
    with ps.Pipeline(ps.split(model, stages=2, sample=batch), lambda y: y.square().mean(), microbatches=3) as pipe:
        torch.testing.assert_close(pipe.step(batch).loss, model(batch[0], batch[1].tensor).square().mean().detach())
