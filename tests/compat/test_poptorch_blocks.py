"""Blocks in PopTorch's three styles, the stages that strategies make of them, and PopTorch's errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
import penstock.compat.poptorch as poptorch
from penstock.compat.poptorch import blocks
from tests.compat.poptorch_models import Net, data, made, options
from tests.compat.poptorch_models import plainly as plainly

X = data(4)[0]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.add_module(name, nn.Linear(4, 4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))).relu())


class Decorated(Base):
    @poptorch.BlockFunction("B1", ipu_id=0)
    def head(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    @poptorch.BlockFunction("B2", ipu_id=1)
    def tail(self, x: Tensor) -> Tensor:
        return self.d(self.c(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.head(x))


class Started(Base):
    def forward(self, x: Tensor) -> Tensor:
        poptorch.Block("B1", ipu_id=0).start()
        x = self.b(self.a(x))
        with poptorch.Block("B2", ipu_id=1):
            x = self.c(x).relu()
        return self.d(x)


def begun(**blocks: tuple[Any, ...]) -> Base:
    model = Base()
    for name, arguments in blocks.items():
        assert poptorch.BeginBlock(getattr(model, name), *arguments) is getattr(model, name)
    return model


def stages(model: nn.Module, strategy: Any = None) -> list[tuple[set[str], int]]:
    """The modules of each stage, and its IPU."""
    plan, ipus = blocks.plan_stages(model, strategy or poptorch.PipelinedExecution(), ((X,), {}))
    modules = []
    for index in range(plan.num_stages):
        modules.append({name.split(".")[0] for name, _ in plan.stage_module(index).named_parameters()})
    return list(zip(modules, ipus, strict=True))


@pytest.mark.parametrize(
    "model",
    [Decorated(), Started(), begun(a=("B1", 0), c=("B2", 1)), begun(a=(None, 0), c=(None, 1))],
    ids=["BlockFunction", "Block.start", "BeginBlock", "BeginBlock without names"],
)
def test_each_style_gives_the_same_stages(model: nn.Module) -> None:
    assert stages(model) == [({"a", "b"}, 0), ({"c", "d"}, 1)]
    keys = list(Base().state_dict())
    assert list(model.state_dict()) == keys
    with torch.no_grad(), poptorch.inferenceModel(model, options(iterations=2)) as inference:
        torch.testing.assert_close(inference(X), model(X))


def test_layers_before_the_first_block_are_on_ipu_0() -> None:
    assert stages(begun(b=("B1", 1), d=("B2", 2))) == [({"a"}, 0), ({"b", "c"}, 1), ({"d"}, 2)]
    assert stages(begun(b=("B1", 0), d=("B2", 1))) == [({"a", "b", "c"}, 0), ({"d"}, 1)]
    assert stages(begun(a=("B1", 3), d=("B2", 1))) == [({"a", "b", "c"}, 3), ({"d"}, 1)]
    model = begun(b=("B1", 1), d=("B2", 2))
    with torch.no_grad(), poptorch.inferenceModel(model, options(iterations=4)) as inference:
        torch.testing.assert_close(inference(X), model(X))


def test_stages_that_return_to_an_ipu() -> None:
    model = begun(a=("B1", 0), b=("B2", 1), c=("B3", 0), d=("B4", 0))
    assert stages(model) == [({"a"}, 0), ({"b"}, 1), ({"c", "d"}, 0)]


def test_named_stages_take_their_ipus_from_themselves_then_from_blocks_then_from_their_order() -> None:
    model = begun(a=("B1",), b=("B2",), c=("B3", 7), d=("B4", 5))
    strategy = poptorch.PipelinedExecution(poptorch.Stage("B1").ipu(3), "B2", ["B3"], poptorch.Stage("B4").ipu(9))
    assert [ipu for _, ipu in stages(model, strategy)] == [3, 1, 7, 9]
    assert repr(strategy.stage("B1").ipu(2)) == "Stage('B1').ipu(2)"
    assert strategy.stage("B3").blocks == ["B3"]
    assert [ipu for _, ipu in stages(model, strategy)] == [2, 1, 7, 9]
    strategy = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
    assert [ipu for _, ipu in stages(model, strategy)] == [0, 1, 7, 5]


def test_blocks_that_the_model_lacks_are_skipped() -> None:
    strategy = poptorch.PipelinedExecution("B1", "B2", poptorch.Stage("loss"))
    assert stages(begun(a=("B1",), c=("B2",)), strategy) == [({"a", "b"}, 0), ({"c", "d"}, 1)]


def test_ipus_map_to_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [str(blocks.device_of_ipu(n)) for n in range(3)] == ["cpu"] * 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(blocks.device_of_ipu(n)) for n in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]


def test_blocks_inside_of_the_layers_of_a_sequential() -> None:
    class Layer(nn.Linear):
        def __init__(self, number: int) -> None:
            super().__init__(4, 4)
            self.number = number

        def forward(self, x: Tensor) -> Tensor:
            with poptorch.Block(f"B{self.number}", self.number):
                return super().forward(x)

    model = nn.Sequential(Layer(0), nn.Tanh(), Layer(1)).double()
    assert stages(model) == [({"0"}, 0), ({"2"}, 1)]
    with torch.no_grad(), poptorch.inferenceModel(model, options(iterations=2)) as inference:
        torch.testing.assert_close(inference(X), model(X))


def test_blocks_without_names_are_numbered_in_the_order_of_the_forward() -> None:
    class Numbered(Base):
        def forward(self, x: Tensor) -> Tensor:
            poptorch.Block.useAutoId()
            with poptorch.Block():
                x = self.a(x)
            with poptorch.Block("special"):
                x = self.b(x)
            with poptorch.Block():
                return self.d(self.c(x))

    strategy = poptorch.PipelinedExecution(["0", "special"], "1")
    assert stages(Numbered(), strategy) == [({"a", "b"}, 0), ({"c", "d"}, 1)]


def test_begin_block_and_remove_blocks() -> None:
    model = begun(a=("B1", 0), c=("B2", 1))
    with pytest.raises(poptorch.Error, match=r"module has already been assigned to a block\."):
        poptorch.BeginBlock(model.a, "B3")
    poptorch.removeBlocks(model)
    assert stages(model) == [({"a", "b", "c", "d"}, 0)]
    poptorch.BeginBlock(model.a, "B3")
    function = poptorch.BeginBlock(torch.relu, "B4")
    assert torch.equal(function(X), torch.relu(X))
    with pytest.raises(poptorch.Error, match="not an instance of"):
        poptorch.BeginBlock(3)  # type: ignore[type-var]


class Started(nn.Module):
    """Three blocks, each begun in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        poptorch.Block.start(ipu_id=0)
        x = self.a(x)
        poptorch.Block.start("B1", ipu_id=1)
        x = self.b(x)
        poptorch.Block("B2", 2).start()
        return self.c(x)


def test_started_blocks() -> None:
    plan, ipus = blocks.plan_stages(Started(), poptorch.PipelinedExecution(), ((X,), {}))
    assert (plan.groups, ipus) == ([("0",), ("B1",), ("B2",)], [0, 1, 2])


def test_numbers_as_names_of_begun_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    poptorch.BeginBlock(model[0], user_id=1)
    poptorch.BeginBlock(model[1], user_id=2)
    plan, _ = blocks.plan_stages(model, poptorch.PipelinedExecution("1", "2"), ((X,), {}))
    assert plan.groups == [("1",), ("2",)]


def test_outside_a_model_blocks_do_nothing() -> None:
    with poptorch.Block("B1", ipu_id=3):
        poptorch.Block("B2").start()
        poptorch.Block.start("B3")
    model = Net()
    assert model(X).shape == (4, 4)
    assert copy.deepcopy(begun(a=("B1", 0))).a._penstock_block.name == "B1"


# ── a model that cannot be traced ────────────────────────────────────────────────────────────────────────────────


def bert() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).double()


@pytest.mark.parametrize("named", [True, False], ids=["names", "IPUs"])
def test_layers_of_a_list_begin_blocks_in_a_model_that_cannot_be_traced(named: bool) -> None:
    ours, plain = bert(), bert()
    poptorch.BeginBlock(ours.bert.embeddings, "Embedding", 0)
    for number, layer in enumerate(ours.bert.encoder.layer):
        if number != 1:  # it is in the block before
            poptorch.BeginBlock(layer, f"Encoder{number}" if named else None, number // 2)
    poptorch.BeginBlock(ours.classifier, "Classifier", 1)
    blocks = ["Embedding", "Encoder0"], "Encoder2", ["Encoder3", "Classifier"]
    opts = options(poptorch.PipelinedExecution(*blocks) if named else None, accumulation=5, iterations=2)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(50, (20, 8), generator=generator)
    labels = torch.randint(2, (20,), generator=generator)
    with poptorch.trainingModel(ours, opts, poptorch.optim.SGD(ours.parameters(), lr=0.5)) as model:
        output = model(input_ids=ids, labels=labels)
        assert model._pipe.plan.num_stages == (3 if named else 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for update in range(2):
        optimizer.zero_grad()
        for k in range(5 * update, 5 * update + 5):
            expected = plain(input_ids=ids[2 * k : 2 * k + 2], labels=labels[2 * k : 2 * k + 2])
            (expected.loss / 5).backward()
        optimizer.step()
    torch.testing.assert_close(output.loss, expected.loss.detach())
    torch.testing.assert_close(output.logits, expected.logits.detach())
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: poptorch.PipelinedExecution("B1", ["B2", "B1"]), "B1 associated with more than one stage"),
        (lambda: poptorch.ShardedExecution("B1").stage("B2"), r"Unknown Block 'B2' list of expected Blocks: \['B1'\]"),
        (lambda: poptorch.Stage("B1", 2), r"Block IDs are supposed to be strings but got \[2\]"),
        (lambda: poptorch.PipelinedExecution(3), r"Block IDs are supposed to be strings but got \[3\]"),
        (lambda: poptorch.Block(3), "Block IDs are supposed to be strings but got 3"),
        (lambda: poptorch.Stage(), "a stage needs blocks"),
        (lambda: poptorch.Stage("B1").ipu(-1), "an IPU number must be an integer from 0"),
        (lambda: poptorch.Block("B1", "cuda:0"), "an IPU number must be an integer from 0"),
        (lambda: poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu, "B1"), "must be the only argument"),
        (
            lambda: stages(made(Net), poptorch.PipelinedExecution("B1", "B2", "B3")),
            r"Unknown Block 'B4' list of expected Blocks: \['B1', 'B2', 'B3'\]",
        ),
        (lambda: stages(made(Net)), "SameAsIpu was selected but no IPU was specified for block.s. B1, B2, B3, B4"),
        (lambda: stages(made(lambda: Net((0, 1, None, 2)))), "no IPU was specified for block.s. B3:"),
    ],
)
def test_assertion_errors(make: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        make()
    with pytest.raises(ps.PlanError, match=message):
        make()


def test_values_that_flow_to_an_earlier_stage_are_refused() -> None:
    with pytest.raises(ps.PlanError, match="is in stage 0 but needs the value"):
        stages(begun(a=("B1",), c=("B2",)), poptorch.PipelinedExecution("B2", "B1"))


def test_a_forward_with_blocks_that_cannot_be_traced_is_an_error_at_the_users_line() -> None:
    class Choosing(Base):
        def forward(self, x: Tensor) -> Tensor:
            with poptorch.Block("B1", 0):
                x = self.a(x)
            return self.b(x) if x.sum() > 0 else x

    with pytest.raises(ps.PlanError, match=r"test_poptorch_blocks.py:\d+.*cannot be traced here"):
        stages(Choosing())


def test_blocks_of_a_method_are_not_passed_over_where_the_forward_cannot_be_traced() -> None:
    class Choosing(Base):
        def start(self, x: Tensor) -> Tensor:
            with poptorch.Block("B1", 0):
                return self.a(x)

        def forward(self, x: Tensor) -> Tensor:
            x = self.start(x)
            return self.b(x) if x.sum() > 0 else x

    with pytest.raises(ps.PlanError, match="cannot be traced here"):
        stages(Choosing())


def test_errors_name_the_users_line() -> None:
    class Twice(Base):
        def forward(self, x: Tensor) -> Tensor:
            with poptorch.Block("B1", 0):
                x = self.a(x)
            with poptorch.Block("B1", 1):
                return self.b(x)

    message = r"'B1' is marked for ipu:0 and, at \S*test_poptorch_blocks.py:\d+, for ipu:1"
    with pytest.raises(ps.PlanError, match=message):
        stages(Twice())


def test_the_stages_of_phases() -> None:
    strategy = poptorch.SerialPhasedExecution(poptorch.Phase("B1", poptorch.Stage("B2").ipu(1)), ["B3"])
    assert str(strategy) == "SerialPhasedExecution(Stage('B1'), Stage('B2').ipu(1), Stage('B3'))"
    assert strategy.schedule == "gpipe"
    with pytest.raises(poptorch.Error, match="use SerialPhasedExecution"):
        poptorch.PhasedExecution("B1", "B2")
