"""Models cut by tracing run as the plain model does, at every cut, in train and eval, and stay as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.split.plan import Edge, Plan, build_plan, run_stages
from penstock.split.trace.chain import TraceChain
from tests.split.trace_checks import assert_owned, assert_runs_as_plain, chain_for, cut_everywhere, every_cut, untouched
from tests.split.trace_models import (
    Arguments,
    Bare,
    Dropping,
    Nested,
    Odd,
    Outputs,
    Positional,
    Residual,
    Sample,
    Twice,
    UNet,
)

pytestmark = pytest.mark.slow

IDS = torch.arange(10).reshape(2, 5)
X = torch.linspace(-1, 2, 24).reshape(4, 6)

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "residual": (Residual, (torch.linspace(-1, 1, 40).reshape(5, 8),)),
    "u-net": (UNet, (X,)),
    "nested": (Nested, (X,)),
    "positional": (Positional, (IDS,)),
    "dropping": (Dropping, (X,)),
    "twice": (Twice, (X,)),
    "arguments": (Arguments, (X, [X, X + 1])),
    "outputs": (Outputs, (torch.linspace(-1, 1, 60).reshape(2, 5, 6),)),
    "language model": (lambda: Sample().eval(), (IDS,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_subset_of_the_cuts_runs_as_the_plain_model(name: str) -> None:
    make, args = MODELS[name]
    torch.manual_seed(0)
    model = make()
    with untouched(model):
        chain = chain_for(model)
    for groups in every_cut(chain):
        with untouched(model):
            plan = build_plan(chain, groups)
            assert_owned(plan)
        assert_runs_as_plain(plan, *args)


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_of_a_stage_runs_by_itself(name: str) -> None:
    make, args = MODELS[name]
    model = make().eval()
    plan = cut_everywhere(model)
    stages = [copy.deepcopy(plan.stage_module(index)) for index in range(plan.num_stages)]
    torch.manual_seed(0)
    expected = model(*args)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    output = run_stages(plan, args, {}, stages)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_a_skip_goes_straight_to_its_consumer() -> None:
    plan = cut_everywhere(UNet(depth=2))
    pairs = [(edge.src, edge.dst) for edge in plan.edges]
    assert pairs == [(0, 1), (0, 4), (1, 2), (1, 3), (2, 3), (3, 4), (4, 5)]


def test_one_value_crosses_bare_and_several_in_a_tuple() -> None:
    assert isinstance(cut_everywhere(Residual()).stage_module(0)({"x": torch.ones(2, 8)}), Tensor)
    sample = torch.ones(2, 5, 6)
    plan = cut_everywhere(Outputs(), sample=((sample,), {}))
    sent = plan.stage_module(0)({"x": sample})
    assert [edge.dst for edge in plan.edges if edge.src == 0] == [1, 3]
    assert isinstance(sent[0], Tensor)
    assert [type(value) for value in sent[1]] == [Tensor, Tensor]  # the LSTM's state


def test_sizes_are_constants_of_a_recording() -> None:
    plan = cut_everywhere(Positional())
    assert [(edge.src, edge.dst, edge.values) for edge in plan.edges] == [
        (0, 1, ("add",)),
        (1, 2, ("add",)),
        (2, 3, ("mul",)),
    ]
    for length in (5, 3):
        assert_runs_as_plain(plan, IDS[:, :length])


def test_kinds_of_call_share_a_plan() -> None:
    model = Arguments()
    chain = chain_for(model)
    mask = (X > 0).float()
    for groups in every_cut(chain):
        plan = build_plan(chain, groups)
        assert_runs_as_plain(plan, X, [X])
        assert_runs_as_plain(plan, X, extra=[X, X, X], mask=mask)
        assert_runs_as_plain(plan, X, [], power=3, twice=True)
        assert_runs_as_plain(plan, X, [X], mask=None, other=X, one_more=mask)


def test_a_targets_argument_goes_from_the_first_stage_to_the_loss() -> None:
    model = Sample().eval()
    plan = cut_everywhere(model, sample=((IDS,), {"targets": IDS}))
    assert Edge(0, 4, ("targets",)) in plan.edges
    assert_runs_as_plain_eval(plan, IDS, targets=IDS)
    assert_runs_as_plain_eval(plan, IDS)


def assert_runs_as_plain_eval(plan: Plan, *args: Any, **kwargs: Any) -> None:
    expected = plan.require_chain().model(*args, **kwargs)
    torch.testing.assert_close(run_stages(plan, args, kwargs), expected, rtol=0, atol=0)


def test_a_tied_weight_is_a_tie() -> None:
    plan = cut_everywhere(Sample())
    (tie,) = plan.ties
    assert set(tie.names) == {"word_embeddings.weight", "lm_head.weight"}
    assert tie.stages == (0, 4)
    (used,) = cut_everywhere(Positional()).ties
    assert used.names == ("embed.weight",)
    ties = {frozenset(tie.names) for tie in cut_everywhere(Twice()).ties}
    assert ties == {frozenset({f"shared.{name}", f"alias.{name}"}) for name in ("weight", "bias")}


def test_a_mode_set_on_the_model_is_the_stages_mode_too() -> None:
    model = Dropping()
    plan = cut_everywhere(model)
    stages = [plan.stage_module(index) for index in range(plan.num_stages)]
    model.eval()
    torch.manual_seed(1)
    expected = model(X)
    torch.manual_seed(1)
    torch.testing.assert_close(run_stages(plan, (X,), {}, stages), expected, rtol=0, atol=0)
    assert not any(stage.training for stage in stages)


def test_hooks_of_modules_that_stay_whole_run_and_no_hook_runs_at_the_split() -> None:
    model = Nested()
    seen: list[str] = []
    model.odd.register_forward_hook(lambda *_: seen.append("odd"))
    model.odd.linear.register_forward_pre_hook(lambda *_: seen.append("linear"))
    model.head.register_full_backward_hook(lambda *_: seen.append("back"))
    plan = cut_everywhere(model)
    assert seen == []
    run_stages(plan, (X,), {}).sum().backward()
    assert seen == ["linear", "odd", "back"]


def test_stages_hold_the_models_own_modules() -> None:
    model = Nested()
    plan = cut_everywhere(model)
    stage = plan.stage_module(0)
    assert stage.get_submodule("odd") is model.odd
    assert stage.get_submodule("body.0.a") is model.body[0].a


def test_a_plan_is_found_again_from_its_recipe() -> None:
    for model, how in ((Residual(), {}), (UNet(), {"cuts": ["middle", "up.1"]}), (Bare(), {"stages": 3})):
        chain = chain_for(model, **how)
        again = TraceChain.from_recipe(copy.deepcopy(model), chain.recipe)
        assert again.layers == chain.layers
        groups = [(layer,) for layer in chain.layers]
        assert again.edges(groups) == chain.edges(groups)
    with pytest.raises(PlanError, match="has none"):
        TraceChain.from_recipe(Bare(), {**chain_for(Bare(), stages=3).recipe, "how": "marks"})
    with pytest.raises(PlanError, match="not known here"):
        TraceChain.from_recipe(Bare(), {"front": "trace"})


# ── cuts by name ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "cuts", [["trunk"], ["tail"], ["trunk", "tail.2"], ["trunk.layers.1", "trunk.layers.3", "tail.1"]]
)
def test_cuts_lie_before_named_modules(cuts: list[str]) -> None:
    model = Bare()
    with untouched(model):
        plan = cut_everywhere(model, cuts=cuts)
    assert plan.num_stages == len(cuts) + 1
    for stage, name in enumerate(cuts, start=1):
        module = model.get_submodule(name)
        assert module in set(plan.stage_module(stage).modules())
        assert module not in set(plan.stage_module(stage - 1).modules())
    assert_owned(plan)
    assert_runs_as_plain(plan, X)


class Unruly(Bare):
    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(self.stem(x))
        return self.tail(self.tail(x))


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (["trunkk"], "no module 'trunkk'.*did you mean 'trunk'"),
        (["trunk.layers.9"], "no module 'trunk.layers.9'.*did you mean 'trunk.layers"),
        (["unused"], "never calls unused"),
        (["tail"], "calls tail 2 times"),
        (["trunk", "trunk"], "twice"),
        ("trunk", "list of names"),
        ([3], "list of names"),
        ([], "empty"),
        (["stem"], "nothing runs before stem"),
        (["trunk.layers"], "never calls trunk.layers"),
        (["unused.linear"], "never calls unused.linear"),
    ],
)
def test_wrong_cuts_are_refused(cuts: Any, message: str) -> None:
    model = Unruly()
    with untouched(model), pytest.raises(PlanError, match=message):
        chain_for(model, cuts=cuts)


# ── nothing marked ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_an_unmarked_model_is_cut_between_modules(stages: int) -> None:
    model = Bare()
    with untouched(model):
        chain = chain_for(model, stages=stages)
    assert len(chain.layers) >= stages
    for groups in list(every_cut(chain))[:: max(1, 2 ** len(chain.layers) // 64)]:
        assert_owned(build_plan(chain, groups))
        assert_runs_as_plain(build_plan(chain, groups), X)


def test_modules_stay_whole_while_they_fit_a_stage() -> None:
    assert chain_for(Bare(), stages=1).layers == ("stem", "trunk", "tail.0", "tail.1", "tail.2")
    assert "trunk.layers.3" in chain_for(Bare(), stages=3).layers


class Optional(nn.Module):
    """Modules that only some kinds of call use, and one that is called any number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor | None = None, twice: bool = False, times: int = 1) -> Tensor:
        x = self.a(x)
        if mask is not None:
            x = self.b(x) * mask
        for _ in range(times + twice):
            x = self.c(x)
        return x


def test_other_kinds_of_call_keep_the_layers() -> None:
    chain = chain_for(Optional(), stages=2, sample=((X, X), {"twice": True}))
    assert chain.layers == ("a", "b", "c", "c#2")
    for groups in every_cut(chain):
        plan = build_plan(chain, groups)
        assert_owned(plan)
        for kwargs in ({}, {"mask": X}, {"twice": True}, {"times": 3}, {"times": 2, "mask": X}):
            assert_runs_as_plain(plan, X, **kwargs)


def test_a_heavy_module_that_cannot_be_traced_stays_whole() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Odd(6), nn.Linear(6, 6))
    model[1].linear = nn.Linear(6, 6)
    big = Odd(64)
    assert chain_for(nn.Sequential(nn.Linear(64, 64), big), stages=2).layers == ("0", "1")
    assert chain_for(model, stages=3).layers == ("0", "1", "2")


def test_a_hooked_module_stays_whole() -> None:
    model = Bare()
    model.trunk.register_forward_hook(lambda *_: None)
    model.tail.register_forward_hook(lambda *_: None)
    assert chain_for(model, stages=2).layers == ("stem", "trunk", "tail")
