"""Regressions found by manual testing, each with its description."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from tests.support.models import assert_same, batch, gradients, plain_step


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))


class AroundAndMore(Blocks):
    """A checkpoint around a block and what follows it."""

    def run(self, i: int, x: Tensor) -> Tensor:
        return torch.tanh(self.blocks[i](x))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for i in range(4):
            x = checkpoint(self.run, i, x, use_reentrant=False)  # type: ignore[assignment]
        return self.last(x)


class Reentrant(Blocks):
    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)  # type: ignore[operator]
        return self.last(x)


def assert_trains_as_plain(model: nn.Module, **how: Any) -> None:
    x, y = batch(), batch(seed=3)
    expected = plain_step(copy.deepcopy(model), x, y, F.mse_loss)
    with ps.Pipeline(ps.split(model, **how), F.mse_loss, microbatches=4, devices="cpu") as pipe:
        assert_same(pipe.step(x, y).loss, expected.loss)
        assert_same(gradients(pipe.named_parameters()), expected.gradients)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_checkpoint_around_a_block_and_more_runs_again_on_what_was_received(stages: int) -> None:
    """In its backward, a block of an earlier stage ran instead of giving what had come: wrong gradients, no error."""
    assert_trains_as_plain(AroundAndMore(), blocks="blocks", stages=stages)


@pytest.mark.parametrize("how", [{"stages": 2}, {"cuts": ["blocks.1", "blocks.3"]}], ids=str)
def test_a_reentrant_checkpoint_in_a_traced_forward(how: dict[str, Any]) -> None:
    """It was recorded as it runs, without a graph: parameters before it had no gradients."""
    assert_trains_as_plain(Reentrant(), **how)


class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.a(x)))


class Skipping(Straight):
    def forward(self, x: Tensor) -> Any:
        a = self.a(x)
        return self.c(self.b(a)) + a


@pytest.mark.parametrize(("saved", "found"), [(Straight, Skipping), (Skipping, Straight)])
def test_a_plan_of_another_forward_is_refused(tmp_path: Path, saved: type[nn.Module], found: type[nn.Module]) -> None:
    """The layers are the same, but what crosses between them is not."""
    ps.split(saved(), cuts=["b", "c"]).save(tmp_path / "plan.json")
    with pytest.raises(ps.PlanError, match=r"edges of the plan: \[.*\], of the model: \[.*Split it again"):
        ps.Plan.load(tmp_path / "plan.json", found())


@pytest.mark.parametrize("tied", [True, False])
def test_a_plan_with_other_ties_is_refused(tmp_path: Path, tied: bool) -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)]
    models[tied][2].weight = models[tied][0].weight
    ps.split(models[0], balance=[1, 2]).save(tmp_path / "plan.json")
    with pytest.raises(ps.PlanError, match=r"ties of the plan: .*, of the model: .* Split it again"):
        ps.Plan.load(tmp_path / "plan.json", models[1])


def test_a_plan_can_be_copied_and_pickled() -> None:
    plan = ps.split(Skipping(), cuts=["b", "c"])
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert other == plan
        assert other.model is not plan.model
        assert other.check(batch())


HOW: dict[str, dict[str, Any]] = {
    "cuts": {"cuts": ["b"]},
    "names": {"stages": [["A"], ["B"]]},
    "devices": {},
    "layers": {"balance": [1, 1]},
}


class Blocked(Straight):
    def forward(self, x: Tensor) -> Any:
        with ps.Block("A", device="cpu"):
            x = self.a(x)
        with ps.Block("B", device="cpu:0"):
            return self.c(self.b(x))


@pytest.mark.parametrize("how", HOW)
def test_a_limit_on_memory_holds_however_stages_are_chosen(how: str) -> None:
    model = Straight() if how == "cuts" else Blocked()
    assert ps.split(model, memory="1MB", **HOW[how]).num_stages == 2
    with pytest.raises(ps.PlanError, match=r"stage 1 has layers that need 640 bytes, but its limit is 400 bytes"):
        ps.split(model, memory=400, **HOW[how])


def test_weights_that_are_to_be_one_and_differ_show_in_the_check() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = ps.split(model, stages=2, shared_weights=[("0.weight", "1.weight")])
    with pytest.raises(ps.PlanError, match=r"0\.weight and 1\.weight are to be one parameter, but have different"):
        plan.check(batch())
    with torch.no_grad():
        model[1].weight.copy_(model[0].weight)
    assert plan.check(batch())


WRONG: dict[str, tuple[Any, str]] = {
    "two cuts in one place": (lambda: ps.split(Nested(), cuts=["b", "b.0"]), r"nothing runs between b and b\.0"),
    "a cut before everything": (lambda: ps.split(Straight(), cuts=[""]), r"no module '' to cut before$"),
    "no such stage": (lambda: ps.split(Straight(), cuts=["b"]).stage_module(2), r"no stage 2.*2 \(0\.\.1\)"),
    "a stage of nothing": (lambda: ps.Stage(), "needs blocks"),
    "a stage of numbers": (lambda: ps.Stage(3), "got 3"),  # type: ignore[arg-type]
    "a stage nowhere": (lambda: ps.Stage("A").on("gpu"), r"the stage of A names a device 'gpu'"),
    "a scripted model": (lambda: ps.split(torch.jit.trace(nn.Linear(4, 4), batch()), stages=1), "scripted model"),
    "no model": (lambda: ps.split(Straight(), cuts=["b"]).attach("x"), "got str"),  # type: ignore[arg-type]
}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrong", WRONG)
def test_one_clear_message(wrong: str) -> None:
    call, says = WRONG[wrong]
    with pytest.raises(ps.PlanError, match=says):
        call()


def test_an_init_that_leaves_something_out_is_an_error() -> None:
    """Otherwise uninitialised memory remains; a non-persistent buffer is easily forgotten."""

    class Rotary(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("table", torch.ones(4), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.table

    with torch.device("meta"):
        model = nn.Sequential(Rotary(), Rotary())
    real = nn.Sequential(Rotary(), Rotary())

    def fill(stage: nn.Module) -> None:
        stage.load_state_dict({name: value for name, value in real.state_dict().items() if name in stage.state_dict()})

    with pytest.raises(ps.PlanError, match=r"init left 1 tensors of stage 0 without values \(0\.table is one\)"):
        ps.Pipeline(ps.split(model, stages=2), F.mse_loss, init=fill, devices="cpu")
