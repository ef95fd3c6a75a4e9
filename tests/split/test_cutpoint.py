"""``ps.CutPoint()`` and ``ps.cut(x)``: where they may stand, what they are outside a split, how they are misused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.split.marks import Block, CutPoint, cut, cut_points
from penstock.split.plan import build_plan, run_stages
from tests.split.trace_checks import assert_owned, assert_runs_as_plain, chain_for, every_cut, untouched
from tests.split.trace_models import Nested, Odd, Residual, Sample, UNet

X = torch.linspace(-1, 2, 24).reshape(4, 6)


def layers(model: nn.Module) -> tuple[str, ...]:
    return chain_for(model).layers


def test_outside_a_split_a_mark_is_the_value_itself() -> None:
    x = torch.ones(2)
    assert cut(x) is x
    assert CutPoint()(x) is x
    assert list(CutPoint().state_dict()) == []


def test_the_layers_are_what_lies_between_marks() -> None:
    assert layers(Residual()) == ("stem", "parts.0", "parts.1", "parts.2", "head")
    assert layers(UNet(depth=1)) == ("down.0", "middle", "up.0", "cut 3")
    assert layers(Nested()) == ("odd…body.0.a", "body.0.b…body.2.a", "body.2.b", "head")


def test_cut_points_are_found_in_every_form_and_have_names() -> None:
    assert sorted(cut_points(Residual()).values()) == ["cuts.0", "cuts.1", "first", "loose[0]"]
    assert sorted(cut_points(Nested()).values()) == ["body.0.marks['middle']", "body.2.marks['middle']"]


def test_of_n_marks_any_subset_is_a_boundary() -> None:
    model = Sample().eval()
    ids = torch.arange(10).reshape(2, 5)
    chain = chain_for(model)
    for groups in every_cut(chain):
        plan = build_plan(chain, groups)
        assert_owned(plan)
        torch.testing.assert_close(run_stages(plan, (ids,), {}), model(ids), rtol=0, atol=0)
        torch.testing.assert_close(run_stages(plan, (ids, ids), {}), model(ids, ids), rtol=0, atol=0)


def test_crossing_counts_the_values() -> None:
    chain = chain_for(UNet(depth=2))
    assert [chain.crossing(number) for number in range(1, 6)] == [1, 2, 3, 2, 1]


def test_marks_may_pass_any_value() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.b = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x, y = cut((self.a(x), x))
            named = cut({"x": self.b(x), "y": y})
            return named["x"] + named["y"]

    chain = chain_for(Pairs())
    for groups in every_cut(chain):
        assert_runs_as_plain(build_plan(chain, groups), X)


def test_a_mark_that_only_training_reaches_is_found_in_eval() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.b = nn.Linear(6, 6)
            self.aux = nn.Linear(6, 6)
            self.marks = (CutPoint(), CutPoint())

        def forward(self, x: Tensor) -> Any:
            x = self.marks[0](self.a(x))
            if self.training:
                return self.b(x), self.aux(self.marks[1](x))
            return self.b(x)

    model = Auxiliary().eval()
    chain = chain_for(model)
    assert chain.layers == ("a", "b", "aux")
    for groups in every_cut(chain):
        assert_owned(build_plan(chain, groups))
        assert_runs_as_plain(build_plan(chain, groups), X)


# ── misuse ───────────────────────────────────────────────────────────────────────────────────────────────────────


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.odd = Odd(6)
        self.mark = CutPoint()
        self.spare = [CutPoint(), CutPoint()]


class UsedTwice(TwoLinears):
    def forward(self, x: Tensor) -> Tensor:
        x = self.mark(self.a(x))
        x = self.spare[0](self.spare[1](x))
        return self.mark(self.b(x))


class UsedInALoop(TwoLinears):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.spare[1](self.a(x))
        return self.mark(self.spare[0](x))


class NeverReached(TwoLinears):
    def forward(self, x: Tensor) -> Tensor:
        return self.spare[0](self.b(self.mark(self.a(x))))


class MixedMarks(TwoLinears):
    def forward(self, x: Tensor) -> Tensor:
        x = self.spare[0](self.spare[1](self.mark(self.a(x))))
        with Block("B1"):
            return self.b(x)


class DataLoop(nn.Module):
    """The loop that data controls is in a nested module, and its cut is reached only through it."""

    def __init__(self, marks: bool) -> None:
        super().__init__()
        self.inner = Loop() if marks else Counted()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = cut(self.a(x))
        return x


class Counted(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.mark = CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.sum())):
            x = self.a(x)
        return self.mark(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (UsedTwice, r"CutPoint mark is used twice, at .*test_cutpoint.py:\d+ and at .*test_cutpoint.py:\d+"),
        (UsedInALoop, r"CutPoint spare\[1\] is used twice"),
        (NeverReached, r"never reaches the CutPoint\(s\) spare\[1\]"),
        (MixedMarks, r"cut points and with blocks"),
        (lambda: DataLoop(True), r"test_cutpoint.py:\d+: `while x.norm\(\) > 1:` inner \(Loop\)"),
        (lambda: DataLoop(False), r"test_cutpoint.py:\d+: `for _ in range\(int\(x.sum\(\)\)\):` inner \(Counted\)"),
    ],
)
def test_misuse_is_named_and_leaves_the_model_alone(make: Any, message: str) -> None:
    model = make()
    with untouched(model), pytest.raises(PlanError, match=message):
        layers(model)
    cut(X)
    assert model.training


def test_a_mark_never_reached_in_a_module_that_is_never_called() -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    model.spare = Nested()  # type: ignore[assignment]
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    with pytest.raises(PlanError, match=r"never reaches the CutPoint\(s\) spare.body.0.marks\['middle'\]"):
        layers(model)


def test_other_threads_run_models_while_one_is_traced() -> None:
    """A recording replaces ``nn.Module.__call__`` for its time: models in other threads run as always."""
    model, other, stop, wrong = UNet(), Odd(6), threading.Event(), []
    expected = other(X)

    def run() -> None:
        while not stop.is_set():
            if not torch.equal(other(X), expected):
                wrong.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(10):
            chain_for(model)
    finally:
        stop.set()
        thread.join()
    assert not wrong
