"""Blocks in three styles, stages by their names and devices, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.split.marks import (
    BeginBlock,
    Block,
    BlockFunction,
    Stage,
    devices_of_stages,
    groups_by_device,
    groups_by_name,
)
from penstock.split.plan import build_plan, run_stages
from penstock.split.trace.front_end import marked_chain
from tests.split.trace_checks import assert_owned, assert_runs_as_plain, chain_for, every_cut, untouched
from tests.split.trace_models import BegunDigits, ConvLayer, DecoratedDigits, ScopedDigits, WithLoss

IMAGES = torch.linspace(-1, 1, 3 * 28 * 28).reshape(3, 1, 28, 28)
LABELS = torch.tensor([1, 5, 9])
X = torch.linspace(-1, 2, 24).reshape(4, 6)

STYLES = {"scopes": ScopedDigits, "decorators": DecoratedDigits, "beginnings": BegunDigits}


@pytest.mark.parametrize("style", STYLES)
def test_each_style_of_annotation_gives_the_same_blocks(style: str) -> None:
    model = STYLES[style]()
    with untouched(model):
        chain = chain_for(model)
    assert chain.layers == ("B1", "B2", "B3", "B4")
    assert [sorted(name for name, _ in chain.members(block)) for block in chain.layers] == [
        ["layer1.conv.bias", "layer1.conv.weight"],
        ["layer2.conv.bias", "layer2.conv.weight"],
        ["layer3.bias", "layer3.weight"],
        ["layer4.bias", "layer4.weight"],
    ]
    for groups in every_cut(chain):
        assert_owned(build_plan(chain, groups))
        assert_runs_as_plain(build_plan(chain, groups), IMAGES)


@pytest.mark.parametrize("style", STYLES)
def test_the_loss_is_computed_in_the_last_block_when_labels_are_given(style: str) -> None:
    model = WithLoss(STYLES[style]())
    chain = chain_for(model)
    for stages in (["B1", "B2", "B3", "B4"], [["B1", "B2"], ["B3", "B4"]], [Stage("B1", "B2", "B3"), Stage("B4")]):
        plan = build_plan(chain, groups_by_name(chain, stages))
        assert_owned(plan)
        assert_runs_as_plain(plan, IMAGES)
        assert_runs_as_plain(plan, IMAGES, LABELS)
        assert_runs_as_plain(plan, IMAGES, labels=LABELS)
        assert Edge_pairs(plan)[-1][1] == plan.num_stages - 1


def Edge_pairs(plan: Any) -> list[tuple[int, int]]:
    return [(edge.src, edge.dst) for edge in plan.edges]


def test_modules_within_one_block_stay_whole() -> None:
    model = DecoratedDigits()
    seen: list[str] = []
    model.layer2.register_forward_hook(lambda *_: seen.append("layer2"))
    plan = build_plan(chain_for(model), [("B1",), ("B2",), ("B3",), ("B4",)])
    assert plan.stage_module(1).get_submodule("layer2") is model.layer2
    assert_runs_as_plain(plan, IMAGES)
    assert seen


def test_a_module_that_is_one_block_need_not_be_traceable() -> None:
    class Choosing(nn.Linear):
        @BlockFunction("two")
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else -super().forward(x)

    class Chosen(Base):
        def __init__(self) -> None:
            super().__init__()
            self.b = Choosing(6, 6)
            BeginBlock(self.a, "one")
            BeginBlock(self.c, "three")

        def forward(self, x: Tensor) -> Tensor:
            return self.d(self.c(self.b(self.a(x))))

    assert held(Chosen()) == {"one": {"a"}, "two": {"b"}, "three": {"c", "d"}}
    chain = chain_for(Chosen())
    assert_runs_as_plain(build_plan(chain, [("one",), ("two",), ("three",)]), X)


def test_a_model_that_begins_a_block_itself() -> None:
    chain = chain_for(BeginBlock(Loose(), "zero"))
    assert chain.layers == ("zero", "one", "two")
    assert {name.split(".")[0] for name, _ in chain.members("zero")} == {"a"}


def test_a_block_that_the_plan_did_not_know_of_is_refused_when_it_is_reached() -> None:
    class Named(Base):
        def forward(self, x: Tensor, name: str = "one") -> Tensor:
            with Block(name):
                x = self.a(x)
            with Block("two"):
                return self.b(x)

    chain = chain_for(Named())
    plan = build_plan(chain, [("one",), ("two",)])
    with pytest.raises(PlanError, match=r"test_block.py:\d+: called as Named\(x, name='three'\).*reaches 'three'"):
        run_stages(plan, (X,), {"name": "three"})


def test_begin_block_gives_the_module_itself_and_changes_no_names() -> None:
    layer = ConvLayer(1, 2, 3, 2)
    keys = list(layer.state_dict())
    assert BeginBlock(layer, "B1") is layer
    assert list(layer.state_dict()) == keys
    assert list(copy.deepcopy(layer).state_dict()) == keys
    with pytest.raises(PlanError, match="without a block, got a ConvLayer with"):
        BeginBlock(layer, "B2")
    function = BeginBlock(torch.relu, "B1")
    assert torch.equal(function(X), torch.relu(X))
    with pytest.raises(PlanError, match="without a block"):
        BeginBlock(function, "B2")


def test_outside_a_split_blocks_do_nothing() -> None:
    @BlockFunction("B1")
    def double(x: Tensor) -> Tensor:
        """Twice."""
        return 2 * x

    with Block("B0"), Block("B1"):
        assert torch.equal(double(X), 2 * X)
    assert double.__name__ == "double"


def test_blocks_without_a_name_are_numbered_as_they_are_met() -> None:
    class Numbered(Base):
        def __init__(self) -> None:
            super().__init__()
            BeginBlock(self.d)

        @BlockFunction()
        def middle(self, x: Tensor) -> Tensor:
            return self.b(x)

        def forward(self, x: Tensor) -> Tensor:
            with Block():
                x = self.middle(self.a(x))
            with Block("named"):
                x = self.middle(self.c(x))
            return self.e(self.d(x))

    for _ in range(2):
        model = Numbered()
        assert held(model) == {"0": {"a"}, "1": {"b"}, "named": {"c"}, "2": {"d"}}  # the method is one block
        chain = chain_for(model)
        assert_runs_as_plain(build_plan(chain, groups_by_name(chain, [["0", "1", "named"], ["2"]])), X)


# ── which block an operation belongs to ──────────────────────────────────────────────────────────────────────────


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "abcdef":
            self.add_module(name, nn.Linear(6, 6))


class Loose(Base):
    """Before any block, between blocks, after the last."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        with Block("one"):
            x = self.b(x)
        x = self.c(x)
        with Block("two"):
            x = self.d(x)
        return self.e(x).relu()


class Within(Base):
    """A block in a block; the outer one goes on after it."""

    def forward(self, x: Tensor) -> Tensor:
        with Block("outer"):
            x = self.a(x)
            with Block("inner"):
                y = self.b(x)
            x = self.c(x)
        with Block("last"):
            return self.d(x + y)


class Again(Base):
    """A block that is entered again after another one."""

    def forward(self, x: Tensor) -> Tensor:
        with Block("one"):
            x = self.a(x)
        with Block("two"):
            y = self.b(x)
        with Block("one"):
            x = self.c(x)
        with Block("three"):
            return self.d(x + y)


class Back(Base):
    """Its first block needs a value of the second."""

    def forward(self, x: Tensor) -> Tensor:
        with Block("one"):
            x = self.a(x)
        with Block("two"):
            left = self.b(x)
        with Block("one"):
            x = self.c(left)
        with Block("three"):
            return self.d(x)


def held(model: nn.Module) -> dict[str, set[str]]:
    chain = chain_for(model)
    return {layer: {name.split(".")[0] for name, _ in chain.members(layer)} - set("ef") for layer in chain.layers}


def test_what_is_in_no_block_belongs_to_the_first_or_to_the_last_one_entered() -> None:
    assert held(Loose()) == {"one": {"a", "b", "c"}, "two": {"d"}}


def test_what_is_before_any_block_can_be_one_of_its_own() -> None:
    chain = marked_chain(Loose(), sample=((X,), {}), lead=Block("lead", "cpu"))
    assert chain is not None
    assert chain.layers == ("lead", "one", "two")
    assert {name.split(".")[0] for name, _ in chain.members("lead")} == {"a"}
    plan = build_plan(chain, [("lead",), ("one",), ("two",)])
    assert_runs_as_plain(plan, X)
    assert copy.deepcopy(plan).groups == plan.groups


def test_the_inner_block_counts() -> None:
    assert held(Within()) == {"outer": {"a", "c"}, "inner": {"b"}, "last": {"d"}}


@pytest.mark.parametrize("model", [Loose(), Within(), Again()])
def test_blocks_run_as_the_plain_model_in_any_stages(model: nn.Module) -> None:
    chain = chain_for(model)
    for groups in every_cut(chain):
        plan = build_plan(chain, groups_by_name(chain, groups))
        assert_owned(plan)
        assert_runs_as_plain(plan, X)


def test_stages_may_have_another_order_than_the_blocks_where_no_value_flows_back() -> None:
    chain = chain_for(Within())
    plan = build_plan(chain, groups_by_name(chain, [["outer"], ["last", "inner"]]))
    assert_runs_as_plain(plan, X)


# ── stages by name and by device ─────────────────────────────────────────────────────────────────────────────────


def test_a_value_that_would_flow_back_is_named() -> None:
    model = Back()
    chain = chain_for(model)
    assert_runs_as_plain(build_plan(chain, groups_by_name(chain, [["one", "two"], ["three"]])), X)
    message = r"'one' \(.*test_block.py:\d+\) is in stage 0 but needs the value 'b' of 'two' \(.*:\d+\).* stage 1"
    with untouched(model), pytest.raises(PlanError, match=message):
        groups_by_name(chain, ["one", "two", "three"])
    with pytest.raises(PlanError, match="is in stage 0 but needs the value"):
        groups_by_name(chain_for(Loose()), ["two", "one"])


def test_wrong_stages_are_refused() -> None:
    for stages, message in [
        (["B1", "B2", "B3", "B5"], r"unknown block 'B5': did you mean.*The model has 'B1', 'B2', 'B3', 'B4'"),
        ([["B1", "B2"], ["B2", "B3", "B4"]], "block 'B2' is in more than one stage.*0 and 1"),
        ([["B1", "B1"], ["B2", "B3", "B4"]], "block 'B1' is in more than one stage"),
        ([["B1"], ["B2", "B4"]], "no stage has the block.* 'B3'"),
        ([["B1", 2], ["B3", "B4"]], "stage 0 has an unknown block 2"),
        ([1, 2], "stage 0 has an unknown block 1"),
        ([["B1", "B2", "B3", "B4"], []], "stage 1 has no blocks"),
    ]:
        with pytest.raises(PlanError, match=message):
            groups_by_name(chain_for(ScopedDigits()), stages)


def test_a_stage_says_where_it_goes() -> None:
    stage = Stage("B1", "B2").on("cuda:0")
    assert (stage.blocks, stage.device, repr(stage)) == (("B1", "B2"), "cuda:0", "Stage('B1', 'B2').on('cuda:0')")
    assert devices_of_stages([stage, Stage("B3").on(torch.device("cpu"))]) == ("cuda:0", "cpu")
    assert devices_of_stages(["B1", ["B2"], Stage("B3")]) is None
    with pytest.raises(PlanError, match=r"stages \[1\] name no device"):
        devices_of_stages([stage, "B3"])


def test_blocks_that_all_have_devices_make_the_stages() -> None:
    chain = chain_for(ScopedDigits("cpu", "cpu", "cuda:1", "cpu"))
    assert groups_by_device(chain) == [("B1", "B2"), ("B3",), ("B4",)]
    assert build_plan(chain, groups_by_device(chain)).devices == ("cpu", "cuda:1", "cpu")
    with pytest.raises(PlanError, match="but B3, B4 has none"):
        groups_by_device(chain_for(ScopedDigits("cpu", "cpu")))


def test_a_block_has_one_device_and_a_name() -> None:
    class Two(Base):
        def forward(self, x: Tensor) -> Tensor:
            with Block("one", device="cpu"):
                x = self.a(x)
            with Block("one", device="cuda:0"):
                return self.b(x)

    with pytest.raises(PlanError, match=r"'one' is marked for cpu and, at .*test_block.py:\d+, for cuda:0"):
        chain_for(Two())
    for wrong in ("", 3):
        with pytest.raises(PlanError, match="a block's name is a string"):
            Block(wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="names a device 'gpu!' that torch does not know"):
        Block("B1", device="gpu!")


def test_a_block_that_only_some_calls_enter_is_a_layer_all_the_same() -> None:
    class Lossy(Base):
        def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
            with Block("one"):
                x = self.a(x)
            if target is None:
                return x
            with Block("loss"):
                return (self.b(x) - target).pow(2).mean()

    chain = chain_for(Lossy(), sample=((X, X), {}))
    assert chain.layers == ("one", "loss")
    plan = build_plan(chain, [("one",), ("loss",)])
    assert_runs_as_plain(plan, X)
    assert_runs_as_plain(plan, X, X)
