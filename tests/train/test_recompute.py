"""A recomputed forward changes nothing but the memory that a step needs."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.schedule import Costs, Schedule, auto, simulate
from tests.schedule.samples import placed
from tests.support.models import assert_same, batch, gradients, mlp, plain_step
from tests.support.ranks import Ranks


def pipeline(model: nn.Module, stages: int = 2, **options: Any) -> ps.Pipeline:
    options = {"microbatches": 4, "devices": "cpu", "recompute": "always", **options}
    return ps.Pipeline(ps.split(model, stages=stages), F.mse_loss, **options)


class Counts(nn.Module):
    """Remembers in which kind of forward it was called."""

    def __init__(self) -> None:
        super().__init__()
        seen: list[str] = []
        self.seen = lambda: seen  # a list that is an attribute would be restored after a recompute

    def forward(self, x: Tensor) -> Tensor:
        kind = "again" if ps.is_recomputing() else "to be run again" if ps.hooks.is_checkpointing() else "once"
        self.seen().append(kind)
        assert ps.current_microbatch() is not None
        return x


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        ("never", {"once": 4}),
        ("except_last", {"once": 1, "to be run again": 3, "again": 3}),
        ("always", {"to be run again": 4, "again": 4}),
        ({1: "always"}, {"once": 4}),
        (["always", "never"], {"to be run again": 4, "again": 4}),
    ],
    ids=str,
)
def test_which_forwards_run_twice(recompute: Any, expected: dict[str, int]) -> None:
    counts = Counts()
    with pipeline(nn.Sequential(counts, *mlp()), recompute=recompute) as pipe:
        pipe.step(batch(), batch())
        assert {kind: counts.seen().count(kind) for kind in counts.seen()} == expected


def test_except_last_counts_the_micro_batches_that_there_are() -> None:
    counts = Counts()
    with pipeline(nn.Sequential(counts, *mlp()), recompute="except_last", microbatches=8) as pipe:
        pipe.step(batch(3), batch(3))
        assert (counts.seen().count("once"), counts.seen().count("again")) == (1, 2)


@pytest.mark.parametrize(
    "schedule",
    [
        placed((0, 1), "0F0 0F1 0R0 0F2 0R2 0I0 0B1 0W0 0B2", "1F0 1R0 1I0 1F1 1W0 1B1 1F2 1B2"),
        auto(Costs(latency=1.0), (0, 1, 0, 1), 6, cap=2.0, recompute=None, seconds=0.05, repeatable=True).schedule,
        auto(Costs(latency=1.0), (0, 1, 1, 0), 6, cap=2.0, recompute=None, seconds=0.05, repeatable=True).schedule,
    ],
    ids=["by hand", "searched on a loop", "searched on a V"],
)
def test_micro_batches_may_be_recomputed_or_not_and_ahead_of_time(schedule: Schedule) -> None:
    assert any(a.kind == "R" and b.kind not in "IB" for order in schedule.orders for a, b in pairwise(order))
    model, x, y = mlp(8), batch(12), batch(12, seed=3)
    expected = plain_step(copy.deepcopy(model), x, y, F.mse_loss)
    options: dict[str, Any] = {"schedule": schedule, "microbatches": schedule.num_microbatches, "recompute": "never"}
    with pipeline(model, schedule.num_stages, **options) as pipe:
        assert_same(pipe.step(x, y).loss, expected.loss)
        assert_same(gradients(pipe.named_parameters()), expected.gradients)


def test_an_automatic_order_is_made_with_its_recomputes() -> None:
    model, x, y = mlp(8), batch(12), batch(12, seed=3)
    expected = plain_step(copy.deepcopy(model), x, y, F.mse_loss)
    costs = Costs(latency=1.0, checkpoint=0.25)
    with pipeline(model, 4, schedule=costs, microbatches=6) as pipe:
        found = auto(costs, pipe.schedule.placement, 6, recompute=True, seconds=0.5, repeatable=True)
        assert pipe.schedule.orders == found.schedule.orders
        assert_same(pipe.step(x, y).loss, expected.loss)
        assert_same(gradients(pipe.named_parameters()), expected.gradients)
    with pipeline(model, 4, schedule=replace(costs, checkpoint=0.0), microbatches=6) as pipe:
        held = simulate(pipe.schedule, costs).peak_memory  # what is not known to be kept is not kept without end
        assert max(held) <= 4 * 0.25 + 2 * 0.75


def test_activations_are_freed_until_the_recompute() -> None:
    alive: list[int] = []
    made: list[weakref.ref[Any]] = []

    class Held:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()  # the tensor itself would keep its own graph alive
            made.append(weakref.ref(self))

    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(ref() is not None for ref in made))
            with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
                return torch.sigmoid(x) * 2

    model = nn.Sequential(nn.Linear(4, 4), Makes(), nn.Linear(4, 4), nn.Linear(4, 4))
    with pipeline(model, schedule="gpipe") as pipe:
        pipe.step(batch(8), batch(8))
    assert alive == [0] * 8


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv"])
def test_an_input_that_the_stage_changes_in_place_is_kept(schedule: str) -> None:
    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1).mul(2)

    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (Changes(), nn.Linear(4, 4))))
    x, y = batch(), batch(seed=3)
    expected = plain_step(copy.deepcopy(model), x.clone(), y, F.mse_loss)
    with pipeline(model, stages=4, schedule=schedule) as pipe:
        for _ in range(2):
            result = pipe.step(x.clone(), y)
            assert_same(result.loss, expected.loss)
            assert_same(gradients(pipe.named_parameters()), expected.gradients)
            pipe.zero_grad()


def test_an_input_that_is_changed_meanwhile_is_an_error() -> None:
    x = batch()
    with pipeline(mlp()) as pipe:
        output = pipe(x)
        x.add_(1)
        with pytest.raises(ps.PlanError, match=r"input of stage 0 was changed in place after its forward.*clone"):
            output.sum().backward()


def test_twice_with_retain_graph_and_the_error_without() -> None:
    model, x = mlp(), batch()
    plain = copy.deepcopy(model)
    with pipeline(model) as pipe:
        loss = pipe(x).square().sum()
        expected = plain(x).square().sum()
        for total in (loss, expected):
            total.backward(retain_graph=True)
            total.backward()
        assert_same(gradients(pipe.named_parameters()), gradients(plain.named_parameters()))
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_autocast_and_modes_are_those_of_the_call() -> None:
    """Backward runs outside of autocast, and here after a switch to eval mode."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), batch()
    plain = copy.deepcopy(model)
    with pipeline(model, microbatches=1) as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            output, expected = pipe(x), plain(x)
        assert output.dtype is torch.bfloat16
        pipe.eval()
        output.float().square().sum().backward()
        expected.float().square().sum().backward()
        assert not pipe.training
        assert_same(gradients(pipe.named_parameters()), gradients(plain.named_parameters()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside(reentrant: bool) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Inside(), nn.Linear(4, 4), Inside())
    x, y = batch(), batch(seed=3)
    expected = plain_step(copy.deepcopy(model), x, y, F.mse_loss)
    with pipeline(model) as pipe:
        result = pipe.step(x, y)
        assert_same(result.loss, expected.loss)
        assert_same(gradients(pipe.named_parameters()), expected.gradients)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None)], ids=["momentum", "average"])
def test_running_statistics_count_a_forward_once(norm: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), copy.deepcopy(norm))
    plain, x = copy.deepcopy(model), batch(8)
    with pipeline(model) as pipe:
        for _ in range(2):
            pipe.step(x, x)
            for part in x.split(2):
                plain(part)
        torch.testing.assert_close(pipe.state_dict(), dict(plain.state_dict()))


def test_buffers_that_a_forward_changes_are_as_they_were_when_it_runs_again() -> None:
    class Remembers(nn.Module):
        """Multiplies by how often it has been called, and counts."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.ones(1))
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            out = x * self.scale * self.calls.clone()
            self.calls += 1
            return out

    model, x = nn.Sequential(nn.Linear(4, 4), Remembers(), nn.Linear(4, 4)), batch(8)
    plain = copy.deepcopy(model)
    with pipeline(model) as pipe:
        for _ in range(2):
            result = pipe.step(x, x)
            outputs = torch.cat([plain(part) for part in x.split(2)])
            expected = F.mse_loss(outputs, x)
            expected.backward()
            assert_same(result.loss, expected.detach())
        assert_same(gradients(pipe.named_parameters()), gradients(plain.named_parameters()))
        torch.testing.assert_close(pipe.state_dict()["1.calls"], plain.state_dict()["1.calls"])


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.first(x))
        x = ps.keep(Costly.apply(x))
        return self.third(torch.tanh(self.second(x)))


class Costly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return COSTLY(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 3 * grad


RUNS: list[int] = []


@torch.library.custom_op("penstock_tests::costly", mutates_args=())
def COSTLY(x: Tensor) -> Tensor:
    RUNS.append(1)
    return 3 * x


@COSTLY.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_value_that_is_kept_is_not_computed_again(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Keeps(), nn.Linear(4, 4), Keeps(), nn.Linear(4, 4))
    x, y = batch(), batch(seed=3)
    expected = plain_step(copy.deepcopy(model), x, y, F.mse_loss)
    with pipeline(model, schedule=schedule) as pipe:
        for step in range(3):
            RUNS.clear()
            result = pipe.step(x, y)
            assert_same(result.loss, expected.loss)
            assert_same(gradients(pipe.named_parameters()), expected.gradients)
            pipe.zero_grad()
            if step:  # by now it is known that these stages keep something
                assert len(RUNS) == 2 * 4


def test_a_value_is_kept_in_a_forward_that_is_traced() -> None:
    """A mark that is made in the code between modules is made whenever that code runs, and not at the trace alone."""

    class Marked(Keeps):
        def forward(self, x: Tensor) -> Any:
            with ps.Block("one"):
                x = ps.keep(Costly.apply(torch.tanh(self.first(x))))
                x = torch.tanh(self.second(x))
            with ps.Block("two"):
                return self.third(x)

    torch.manual_seed(0)
    model = Marked()
    x, y = batch(), batch(seed=3)
    expected = plain_step(copy.deepcopy(model), x, y, F.mse_loss)
    plan = ps.split(model, stages=["one", "two"])
    with ps.Pipeline(plan, F.mse_loss, microbatches=4, devices="cpu", recompute="always") as pipe:
        for _ in range(2):
            pipe.zero_grad()
            RUNS.clear()
            pipe.step(x, y)
            assert_same(gradients(pipe.named_parameters()), expected.gradients)
        assert len(RUNS) == 4


def test_a_kept_value_that_is_changed_afterwards_is_an_error() -> None:
    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = ps.keep(x * 2)
            return y.add_(1)

    def two_steps(pipe: ps.Pipeline) -> None:
        for _ in range(2):
            pipe.step(batch(), batch())

    model = nn.Sequential(nn.Linear(4, 4), Changes(), nn.Linear(4, 4))
    with (
        pipeline(model, stages=1) as pipe,
        pytest.raises(ps.PlanError, match=r"marked by ps\.keep was changed in place"),
    ):
        two_steps(pipe)


def test_keep_is_the_identity_elsewhere() -> None:
    x = batch()
    assert ps.keep(x) is x
    assert ps.keep(None) is None


def fails_again(rank: int) -> str:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if ps.is_recomputing():
                raise ValueError("not twice")
            return x

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Fails())
    options: dict[str, Any] = {"microbatches": 2, "mesh": ps.Mesh(), "recompute": "always"}
    pipe = ps.Pipeline(ps.split(model, balance=[1, 2]), F.mse_loss, **options)
    with pytest.raises(ps.PipelineError) as caught:
        pipe.step(batch(), batch())
    return str(caught.value)


def test_a_failure_in_a_second_forward_reaches_everybody(two: Ranks) -> None:
    for text in two.run(fails_again):
        assert "1R0" in text
        assert "not twice" in text


WRONG = {
    "a word": ("sometimes", r"'never', 'except_last', 'always'.*'sometimes'"),
    "too few": (["always"], r"1 modes.*2 stages"),
    "no such stage": ({5: "always"}, r"stage 5.*2 stages"),
    "a number": (1, r"got 1"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_valid_values_of_recompute(wrong: str) -> None:
    recompute, says = WRONG[wrong]
    with pytest.raises(ps.ScheduleError, match=says):
        pipeline(mlp(), recompute=recompute)
