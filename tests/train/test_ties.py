"""Tied parameters: one tensor on one device, equal copies over several."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.engine.replicas.ties import place_tied_parameters
from tests.support.ranks import Ranks

WORDS, WIDTH = 11, 6
NAMES = ("0.weight", "3.weight")


def language_model(tied: bool) -> nn.Sequential:
    """An embedding, two layers, and a head whose weight is the embedding's, or a separate parameter equal to it."""
    torch.manual_seed(0)
    embed, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    head.weight = embed.weight if tied else nn.Parameter(embed.weight.detach().clone())
    return nn.Sequential(embed, nn.Linear(WIDTH, WIDTH), nn.Tanh(), head).double()


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randint(WORDS, (10,), generator=generator), torch.randint(WORDS, (10,), generator=generator)


def train(model: nn.Module, steps: int = 20) -> tuple[list[Tensor], list[Tensor]]:
    """The plain model's losses and gradient norms."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses, norms = [], []
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        losses.append(loss.detach())
    return losses, norms


def train_pipe(pipe: ps.Pipeline, steps: int = 20) -> tuple[list[Tensor], list[Tensor]]:
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
    losses, norms = [], []
    for x, y in batches(steps):
        optimizer.zero_grad()
        losses.append(pipe.step(x, y).loss)
        norms.append(pipe.clip_grad_norm_(0.5))
        optimizer.step()
    return losses, norms


def assert_trains_as_tied(pipe: ps.Pipeline) -> None:
    plain = language_model(tied=True)
    torch.testing.assert_close(train_pipe(pipe), train(plain))
    for name, tensor in pipe.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name])


def plan(tied: bool, balance: tuple[int, ...] = (1, 1, 2)) -> ps.Plan:
    return ps.split(language_model(tied), balance=list(balance), shared_weights=() if tied else [NAMES])


@pytest.fixture
def every_stage_its_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every stage were on a device of its own."""

    def apart(ties: Any, modules: Any, places: Any) -> Any:
        return place_tied_parameters(ties, modules, {stage: stage for stage in places})

    monkeypatch.setattr("penstock.train.build.place_tied_parameters", apart)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("tied", [True, False], ids=["one parameter", "two of one name"])
def test_twenty_steps_on_one_device(tied: bool, schedule: str) -> None:
    with ps.Pipeline(plan(tied), F.cross_entropy, microbatches=4, schedule=schedule, devices="cpu") as pipe:
        assert_trains_as_tied(pipe)
        assert len(list(pipe.parameters())) == 3, "the tied weight, and weight and bias of the layer between"


def test_separate_parameters_of_one_stage_become_one() -> None:
    with ps.Pipeline(plan(False, (4,)), F.cross_entropy, microbatches=4, devices="cpu") as pipe:
        assert_trains_as_tied(pipe)


@pytest.mark.usefixtures("every_stage_its_own_place")
@pytest.mark.parametrize("tied", [True, False], ids=["one parameter", "two of one name"])
def test_twenty_steps_over_several_devices(tied: bool) -> None:
    with ps.Pipeline(plan(tied), F.cross_entropy, microbatches=4, devices="cpu") as pipe:
        assert_trains_as_tied(pipe)
        first, second = (dict(pipe.named_parameters())[name] for name in NAMES)
        assert first is not second
        assert torch.equal(first, second), "bit for bit"


@pytest.mark.usefixtures("every_stage_its_own_place")
def test_an_optimizer_of_the_models_own_parameters_leaves_the_copies_to_be_aligned() -> None:
    model, plain = language_model(True), language_model(True)
    expected, _ = train(plain, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    made = ps.split(model, balance=[1, 1, 1, 1])
    with ps.Pipeline(made, F.cross_entropy, microbatches=4, devices="cpu") as pipe:
        for (x, y), loss in zip(batches(5), expected, strict=True):
            torch.testing.assert_close(pipe.step(x, y).loss, loss)
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            pipe.align_ties()
            pipe.zero_grad()
        first, second = (dict(pipe.named_parameters())[name] for name in NAMES)
        assert first is not second
        assert torch.equal(first, second)


@pytest.mark.usefixtures("every_stage_its_own_place")
def test_a_layer_that_stands_in_stages_of_several_devices() -> None:
    layer = nn.Linear(4, 4).double()
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 4).double(), layer)
    plain, x = copy.deepcopy(model), torch.randn(6, 4, dtype=torch.float64)
    with ps.Pipeline(ps.split(model, balance=[2, 1, 1]), F.mse_loss, microbatches=3, devices="cpu") as pipe:
        pipe(x).square().sum().backward()
        plain(x).square().sum().backward()
        expected = dict(plain.named_parameters(remove_duplicate=False))
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name].grad)
        assert {name for name, _ in pipe.named_parameters()} >= {"0.weight", "3.weight"}


def over_processes(rank: int, tied: bool) -> list[float]:
    pipe = ps.Pipeline(plan(tied), F.cross_entropy, microbatches=4, mesh=ps.Mesh())
    assert_trains_as_tied(pipe)
    state = pipe.state_dict(full=True)
    assert torch.equal(state[NAMES[0]], state[NAMES[1]])
    return [float(x) for x in state[NAMES[0]].flatten()]


@pytest.mark.parametrize("tied", [True, False], ids=["one parameter", "two of one name"])
def test_twenty_steps_over_processes(three: Ranks, tied: bool) -> None:
    first, *others = three.run(over_processes, tied)
    assert all(first == other for other in others)


class Table(nn.Module):
    """An embedding that is looked up, that is a head, or that is there and not used."""

    def __init__(self, table: nn.Embedding, use: str) -> None:
        super().__init__()
        self.table, self.use = table, use

    def forward(self, x: Tensor) -> Tensor:
        out = x
        if self.use == "head":
            out = F.linear(x, self.table.weight)
        elif self.use == "lookup":
            out = self.table(x.long().abs() % WORDS).sum(-2)
        return out


USES = [("lookup", "head"), ("lookup", "lookup"), ("lookup", "not"), ("not", "lookup"), ("not", "not")]


def tables(rank: int, sparse: bool) -> None:
    for uses in USES:
        torch.manual_seed(0)
        table = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        last = nn.Linear(WORDS if uses[1] == "head" else WIDTH, 3)
        model = nn.Sequential(Table(table, uses[0]), nn.Linear(WIDTH, WIDTH), Table(table, uses[1]), last).double()
        plain, x = copy.deepcopy(model), torch.randn(6, 2, WIDTH, dtype=torch.float64) * 5
        y = torch.zeros_like(plain(x))
        with ps.Pipeline(ps.split(model, balance=[1, 3]), F.mse_loss, microbatches=2, mesh=ps.Mesh()) as pipe:
            for _ in range(2):
                pipe.step(x, y)
                F.mse_loss(plain(x), y).backward()
            expected = dict(plain.named_parameters(remove_duplicate=False))
            for name, parameter in pipe.named_parameters():
                found, right = parameter.grad, expected[name].grad
                assert (found is None) == (right is None), f"{uses}: {name}"
                if found is not None and right is not None:
                    torch.testing.assert_close(found.to_dense(), right.to_dense())


@pytest.mark.parametrize("sparse", [False, True])
def test_copies_that_are_used_differently_or_not_at_all(two: Ranks, sparse: bool) -> None:
    two.check(tables, sparse)


@pytest.mark.parametrize("kept", NAMES)
def test_a_state_may_have_a_tied_parameter_once(kept: str) -> None:
    state = {name: tensor + 1 for name, tensor in language_model(tied=True).state_dict().items()}
    for name in NAMES:
        if name != kept:
            del state[name]
    with ps.Pipeline(plan(True), F.cross_entropy, devices="cpu") as pipe:
        pipe.load_state_dict(state)
        assert torch.equal(pipe.state_dict()["3.weight"], state[kept])


WRONG: dict[str, tuple[Any, str]] = {
    "unknown": ([("0.weight", "3.weights")], r"'3.weights'.*did you mean '3.weight'"),
    "one name": ([("0.weight",)], r"pairs of names"),
    "a text": (["0.weight"], r"pairs of names"),
    "shapes": ([("0.weight", "1.weight")], r"\(11, 6\).*\(6, 6\)"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_parameters_that_cannot_be_tied(wrong: str) -> None:
    shared, says = WRONG[wrong]
    with pytest.raises(ps.PlanError, match=says):
        ps.split(language_model(False), balance=[1, 3], shared_weights=shared)


def test_a_saved_plan_keeps_its_shared_weights(tmp_path: Any) -> None:
    plan(False).save(tmp_path / "plan.json")
    loaded = ps.Plan.load(tmp_path / "plan.json", language_model(False))
    assert loaded.ties == plan(False).ties
    with ps.Pipeline(loaded, F.cross_entropy, microbatches=4, devices="cpu") as pipe:
        assert_trains_as_tied(pipe)
