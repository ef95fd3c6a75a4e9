"""``pipe.step``: any mini-batch gives the plain model's loss and gradients, and a bad one changes nothing."""

from __future__ import annotations

import copy
from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from tests.support.models import assert_same, batch, gradients, mlp, plain_step, snapshot

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb_h1", "zbv"]


def pipeline(model: nn.Sequential, loss_fn: Any = F.mse_loss, stages: int = 2, **options: Any) -> ps.Pipeline:
    options.setdefault("microbatches", 4)
    return ps.Pipeline(ps.split(model, stages=stages), loss_fn, **options)


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 7, 8, 10])
def test_any_number_of_samples_gives_the_plain_models_step(schedule: str, samples: int) -> None:
    model = mlp()
    x, y = batch(samples), batch(samples, seed=5)
    expected = plain_step(model, x, y, F.mse_loss)
    with pipeline(model, stages=4, schedule=schedule) as pipe:
        result = pipe.step(x, y)
    assert_same(result.loss, expected.loss)
    assert_same(result.outputs, expected.output.detach())
    assert_same(gradients(model), expected.gradients)
    assert (result.samples, result.microbatches) == (samples, min(samples, 4))


@pytest.mark.parametrize(("samples", "count"), [(1, 1), (3, 1), (4, 2), (9, 3), (10, 4), (16, 6)])
def test_micro_batches_may_be_cut_by_their_size(samples: int, count: int) -> None:
    model, x, y = mlp(), batch(samples), batch(samples, seed=5)
    expected = plain_step(model, x, y, F.mse_loss)
    with pipeline(model, microbatches=2, microbatch_size=3) as pipe:
        result = pipe.step(x, y)
        assert pipe.evaluate(x, y).microbatches == count
    assert_same(result.loss, expected.loss)
    assert_same(gradients(model), expected.gradients)
    assert result.microbatches == count


@pytest.mark.parametrize("size", [0, 2.0, True])
def test_a_size_that_cannot_be(size: Any) -> None:
    with pytest.raises(ps.ScheduleError, match="microbatch_size must be at least 1 sample, got"):
        pipeline(mlp(), microbatch_size=size)


def test_the_size_may_be_another_one_each_step() -> None:
    model = mlp()
    with pipeline(model) as pipe:
        for samples in (8, 3, 8, 1, 10, 3, 16):
            x, y = batch(samples, seed=samples), batch(samples, seed=samples + 50)
            expected = plain_step(model, x, y, F.mse_loss)
            assert_same(pipe.step(x, y).loss, expected.loss)
            assert_same(gradients(model), expected.gradients)
            pipe.zero_grad()


def test_the_shape_may_be_another_one_each_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pipeline(model) as pipe:
        for length in (3, 5, 1, 3):
            x = torch.randn(4, length, 4)
            expected = plain_step(model, x, x, F.mse_loss)
            assert_same(pipe.step(x, x).loss, expected.loss)
            assert_same(gradients(model), expected.gradients)
            pipe.zero_grad()


def test_gradients_accumulate_over_steps_as_in_plain_torch() -> None:
    model = mlp()
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss, steps=3)
    with pipeline(model, schedule="1f1b") as pipe:
        for _ in range(3):
            pipe.step(batch(), batch(seed=5))
    assert_same(gradients(model), expected.gradients)


def test_gradients_that_are_there_already_are_added_to_in_place() -> None:
    model = mlp()
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
    held = []
    for p in model.parameters():
        p.grad = torch.ones_like(p)
        held.append(p.grad)
    with pipeline(model) as pipe:
        pipe.step(batch(), batch(seed=5))
    assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
    assert_same({n: p.grad - 1 for n, p in model.named_parameters()}, expected.gradients, atol=1e-5)  # type: ignore[operator]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_follows_the_plain_model(schedule: str) -> None:
    model, plain = mlp(), mlp()
    theirs = torch.optim.Adam(plain.parameters(), lr=0.01)
    with pipeline(model, stages=4, schedule=schedule) as pipe:
        ours = torch.optim.Adam(pipe.parameters(), lr=0.01)
        for step in range(5):
            x, y = batch(7, seed=step), batch(7, seed=step + 50)
            theirs.zero_grad()
            F.mse_loss(plain(x), y).backward()
            theirs.step()
            ours.zero_grad()
            pipe.step(x, y)
            ours.step()
    assert_same(model.state_dict(), plain.state_dict(), atol=1e-5)


# ── structures ───────────────────────────────────────────────────────────────────────────────────────────────────


Point = namedtuple("Point", "a b")


class Mix(nn.Module):
    """Adds up all tensors it finds, times any number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: Any) -> Tensor:
        tensors, scale = [], 1.0
        todo = [value]
        while todo:
            item = todo.pop()
            if isinstance(item, dict):
                todo += item.values()
            elif isinstance(item, (tuple, list)):
                todo += item
            elif isinstance(item, Tensor):
                tensors.append(item.float())
            elif isinstance(item, (int, float)):
                scale *= item
        out: Tensor = self.linear(scale * torch.stack(tensors).sum(0))
        return out


INPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x, 2 * x),
    "list": lambda x: [x, 2 * x],
    "dict": lambda x: {"a": x, "b": 2 * x},
    "nested": lambda x: {"a": [x, (x, None)], "b": {"c": 2 * x}},
    "None and numbers": lambda x: (x, None, 3, 2.5, "name", True),
    "integers": lambda x: (x, (10 * x).long()),
    "booleans": lambda x: (x, x > 0),
    "namedtuple": lambda x: Point(x, [None, x]),
    "list of one": lambda x: [x],
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_may_be_nested(kind: str) -> None:
    model = nn.Sequential(Mix(), nn.Tanh(), nn.Linear(4, 4))
    value, y = INPUTS[kind](batch(6)), batch(6, seed=5)
    expected = plain_step(model, value, y, F.mse_loss)
    with pipeline(model) as pipe:
        result = pipe.step(value, y)
        assert_same(pipe(value).detach(), expected.output.detach())
    assert_same(result.loss, expected.loss)
    assert_same(gradients(model), expected.gradients)


def test_a_tuple_of_one_is_the_one_argument_of_the_model() -> None:
    model = mlp()
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
    with pipeline(model) as pipe:
        assert_same(pipe.step((batch(),), batch(seed=5)).loss, expected.loss)
        assert_same(pipe.step({"input": batch()}, batch(seed=5)).loss, expected.loss)


def test_a_tensor_without_dimensions_goes_to_every_micro_batch() -> None:
    class Scaled(nn.Module):
        def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
            return value[0] * value[1]

    model = nn.Sequential(Scaled(), nn.Linear(4, 4))
    value = (batch(), torch.tensor(3.0))
    expected = plain_step(model, value, batch(seed=5), F.mse_loss)
    with pipeline(model) as pipe:
        assert_same(pipe.step(value, batch(seed=5)).loss, expected.loss)
    assert_same(gradients(model), expected.gradients)


class Masked(nn.Module):
    """Looks at the whole of a mask of another first dimension than its input's."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = value
        assert mask.shape == (1, 4)
        return x * mask


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("run", ["step", "call"])
def test_a_repeated_tensor_goes_whole_to_every_micro_batch(run: str, microbatches: int) -> None:
    model, mask = nn.Sequential(Masked(), nn.Linear(4, 4)), torch.randn(1, 4, requires_grad=True)
    plain, plain_mask = copy.deepcopy(model), mask.detach().clone().requires_grad_()
    loss = F.mse_loss(plain((batch(), plain_mask)), batch(seed=5))
    loss.backward()
    with pipeline(model, microbatches=microbatches) as pipe:
        value = (batch(), ps.Broadcast(mask))
        if run == "step":
            assert_same(pipe.step((value,), batch(seed=5)).loss, loss.detach())
        else:
            F.mse_loss(pipe(value), batch(seed=5)).backward()
    assert_same(gradients(model), gradients(plain))
    assert_same(mask.grad, plain_mask.grad)


def test_targets_may_be_repeated() -> None:
    model, mean = mlp(), batch(1)
    far = nn.MSELoss()
    expected = plain_step(model, batch(), mean.expand(8, 4), far)
    with pipeline(model, lambda output, target: far(output, target.expand_as(output)), reduction="mean") as pipe:
        assert_same(pipe.step(batch(), ps.Broadcast(mean)).loss, expected.loss)
    assert_same(gradients(model), expected.gradients)
    with pytest.raises(ps.PlanError, match="Broadcast takes a tensor, got a int"):
        ps.Broadcast(3)  # type: ignore[arg-type]


class Fan(nn.Module):
    """The value on the edge is nested, and a part of it is not used."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.linear, self.first = nn.Linear(4, 4), first

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        parts = {"ids": (10 * x).long(), "h": h, "none": None, "flag": True, "more": [h * 2, x > 0], "unused": h + 1}
        return {self.first: parts.pop(self.first), **parts}


class Collect(nn.Module):
    def forward(self, parts: dict[str, Any]) -> Tensor:
        assert parts["none"] is None
        assert parts["flag"] is True
        twice, mask = parts["more"]
        out: Tensor = parts["h"] * mask + twice * parts["ids"]
        return out


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("first", ["ids", "h", "none", "unused"])
def test_edges_may_carry_anything_in_any_order(first: str, schedule: str) -> None:
    model = nn.Sequential(Fan(first), Collect(), nn.Linear(4, 4))
    expected = plain_step(model, batch(6), batch(6, seed=5), F.mse_loss)
    with pipeline(model, stages=3, schedule=schedule) as pipe:
        assert_same(pipe.step(batch(6), batch(6, seed=5)).loss, expected.loss)
    assert_same(gradients(model), expected.gradients)


def test_targets_may_be_nested() -> None:
    def loss_fn(output: Tensor, target: dict[str, Any]) -> Tensor:
        return F.mse_loss(output * target["scale"], target["y"])

    model, y = mlp(), {"y": batch(seed=5), "scale": 2.0}
    expected = plain_step(model, batch(), y, loss_fn)
    with pipeline(model, loss_fn) as pipe:
        assert_same(pipe.step(batch(), y).loss, expected.loss)
    assert_same(gradients(model), expected.gradients)


def test_outputs_are_joined_as_they_were_cut() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"a": x, "b": (x.sum(1), None)}

    model = nn.Sequential(nn.Linear(4, 4), Two())
    with pipeline(model, lambda out, y: F.mse_loss(out["a"], y)) as pipe:
        outputs = pipe.step(batch(7), batch(7, seed=5)).outputs
    with torch.no_grad():
        assert_same(outputs, model(batch(7)))
    assert not outputs["a"].requires_grad


def test_outputs_none_keeps_no_outputs() -> None:
    with pipeline(mlp(), outputs=None) as pipe:
        assert pipe.step(batch(), batch()).outputs is None


# ── modes ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_inputs_that_want_a_gradient_get_one(schedule: str) -> None:
    model = mlp()
    x = batch().requires_grad_()
    plain = x.detach().clone().requires_grad_()
    F.mse_loss(copy.deepcopy(model)(plain), batch(seed=5)).backward()
    with pipeline(model, stages=4, schedule=schedule) as pipe:
        pipe.step(x, batch(seed=5))
    assert_same(x.grad, plain.grad)


def test_inputs_may_come_out_of_a_graph_of_their_own() -> None:
    before, model = nn.Linear(4, 4), mlp()
    whole = plain_step(nn.Sequential(before, model), batch(), batch(seed=5), F.mse_loss)
    with pipeline(model) as pipe:
        pipe.step(before(batch()), batch(seed=5))
    assert_same(before.weight.grad, whole.gradients["0.weight"])


def test_under_no_grad_a_step_still_trains() -> None:
    model = mlp()
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
    with pipeline(model) as pipe, torch.no_grad():
        pipe.step(batch(), batch(seed=5))
        assert not torch.is_grad_enabled()
    assert_same(gradients(model), expected.gradients)


def test_under_inference_mode_a_step_says_that_it_needs_gradients() -> None:
    model = mlp()
    with pipeline(model) as pipe:
        before = snapshot(model)
        with torch.inference_mode(), pytest.raises(ps.PlanError, match="inference_mode"):
            pipe.step(batch(), batch())
        assert_same(snapshot(model), before)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_autocast_follows_the_work(schedule: str) -> None:
    """The same as a plain loop that accumulates over the same micro-batches under the same autocast, bit by bit."""
    model = mlp()
    plain = copy.deepcopy(model)
    x, y = batch(8), batch(8, seed=5)
    losses = []
    for part_x, part_y in zip(x.chunk(4), y.chunk(4), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            output = plain(part_x)
            loss = F.mse_loss(output, part_y)
        assert output.dtype is torch.bfloat16
        losses.append(loss.detach())
        (loss / 4).backward()
    with pipeline(model, stages=4, schedule=schedule) as pipe, torch.autocast("cpu", torch.bfloat16):
        result = pipe.step(x, y)
    assert result.outputs.dtype is torch.bfloat16
    assert_same(result.loss, torch.stack(losses).mean())
    if schedule in ("zb_h1", "zbv"):  # weight gradients are added up in place, in single precision
        assert_same(gradients(model), gradients(plain), rtol=2e-2, atol=1e-3)
    else:
        assert_same(gradients(model), gradients(plain), rtol=0, atol=0)


def test_autocast_ends_with_the_block() -> None:
    with pipeline(mlp()) as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            assert pipe.step(batch(), batch()).outputs.dtype is torch.bfloat16
        assert pipe.step(batch(), batch()).outputs.dtype is torch.float32


def test_frozen_parameters_stay_without_gradient() -> None:
    for frozen in range(3):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[frozen].requires_grad_(False)
        expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
        for schedule in ("1f1b", "zb_h1"):
            with pipeline(model, stages=3, schedule=schedule) as pipe:
                pipe.step(batch(), batch(seed=5))
                assert_same(gradients(model), expected.gradients)
                pipe.zero_grad()


def test_a_stage_may_be_frozen_and_thawed_between_steps() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pipeline(model) as pipe:
        for requires in (True, False, True):
            model[0].requires_grad_(requires)
            expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
            pipe.step(batch(), batch(seed=5))
            assert_same(gradients(model), expected.gradients)
            pipe.zero_grad()


class Unused(nn.Module):
    """Has a parameter that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.idle = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_parameter_that_takes_no_part_keeps_no_gradient(schedule: str) -> None:
    model = nn.Sequential(Unused(), Unused())
    with pipeline(model, schedule=schedule) as pipe:
        pipe.step(batch(), batch())
    assert {name for name, grad in gradients(model).items() if grad is None} == {"0.idle", "1.idle"}


def test_batch_norm_runs_once_per_micro_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    with pipeline(model) as pipe:
        pipe.step(batch(), batch())
    assert int(model[1].num_batches_tracked) == 4


def test_a_layer_that_stands_there_twice_gets_both_gradients() -> None:
    for schedule in ("gpipe", "1f1b", "zb_h1"):
        layer = nn.Linear(4, 4)
        model = nn.Sequential(layer, nn.Tanh(), layer)
        expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
        with pipeline(model, stages=3, schedule=schedule, microbatches=8) as pipe:
            pipe.step(batch(), batch(seed=5))
        assert_same(gradients(model), expected.gradients)


# In torch's own words an in-place change of a value that an earlier layer still needs is an error. A stage's input
# shares its memory with what the stage before may have kept, and the change must not go unseen there:
# a gradient that is wrong without a word is the worst that can happen (trap 6 of the peers' list).


class AddOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("keeps", [nn.Tanh, nn.Identity])
def test_a_stage_that_changes_its_input_in_place_is_right_or_says_so(
    keeps: type[nn.Module], microbatches: int, schedule: str
) -> None:
    class Plus(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    torch.manual_seed(0)
    linears = nn.Linear(4, 4), nn.Linear(4, 4)
    expected = plain_step(nn.Sequential(linears[0], keeps(), Plus(), linears[1]), batch(), batch(seed=5), F.mse_loss)
    model = nn.Sequential(linears[0], keeps(), AddOne(), linears[1])
    plan = ps.split(model, balance=[2, 2])
    with ps.Pipeline(plan, F.mse_loss, microbatches=microbatches, schedule=schedule) as pipe:
        said = None
        try:
            pipe.step(batch(), batch(seed=5))
        except RuntimeError as error:
            said = str(error)
    if said is None:
        assert_same(gradients(model), expected.gradients)
    else:
        assert "inplace" in said


class Views(nn.Module):
    """Two views of one tensor."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.of = first, second

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(of(x) for of in self.of)


class ChangeFirst(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        parts[0].mul_(3)
        return torch.cat(parts, 1)


VIEWS: dict[str, tuple[Any, Any, bool]] = {
    "the same": (lambda x: x, lambda x: x, True),
    "a part": (lambda x: x[:, :2], lambda x: x, True),
    "turned": (lambda x: x[:, ::2], lambda x: x.t().t(), True),
    "beside each other": (lambda x: x[:, :2], lambda x: x[:, 2:], True),  # views of one tensor
    "in turn": (lambda x: x[:, ::2], lambda x: x[:, 1::2], True),
    "apart": (lambda x: x, lambda x: x * 2, False),
}


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("views", VIEWS)
def test_a_stage_that_changes_one_of_two_inputs_that_overlap_says_so(views: str, recompute: str) -> None:
    torch.manual_seed(0)
    first, second, overlap = VIEWS[views]
    width = first(batch()).shape[1] + second(batch()).shape[1]
    model = nn.Sequential(nn.Linear(4, 4), Views(first, second), ChangeFirst(), nn.Linear(width, 4))
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
    with ps.Pipeline(ps.split(model, balance=[2, 2]), F.mse_loss, microbatches=2, recompute=recompute) as pipe:
        if overlap:
            with pytest.raises(ps.PlanError, match="in place"):
                pipe.step(batch(), batch(seed=5))
        else:
            pipe.step(batch(), batch(seed=5))
            assert_same(gradients(model), expected.gradients)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


BAD: dict[str, tuple[Any, Any, str]] = {
    "samples": (batch(8), batch(6), r"inputs have 8 samples.*targets have 6"),
    "inside the inputs": ((batch(8), batch(6)), batch(8), r"inputs disagree.*\[8, 6\]"),
    "inside the targets": (batch(8), (batch(8), batch(6)), r"targets disagree.*\[8, 6\]"),
    "empty": (batch(0), batch(0), r"empty"),
    "empty inside": ((batch(0), batch(0)), batch(0), r"empty"),
    "arrays": (batch().numpy(), batch(), r"inputs are NumPy arrays.*pass tensors"),
    "arrays as targets": (batch(), batch().numpy(), r"targets are NumPy arrays"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mini_batch_that_does_not_fit_changes_nothing(case: str) -> None:
    inputs, targets, says = BAD[case]
    model = mlp()
    with pipeline(model) as pipe:
        pipe.step(batch(), batch())
        before = snapshot(model)
        with pytest.raises(ps.PlanError, match=says):
            pipe.step(inputs, targets)
        assert_same(snapshot(model), before)
        pipe.zero_grad()
        expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
        pipe.step(batch(), batch(seed=5))
        assert_same(gradients(model), expected.gradients)


def test_a_model_without_anything_to_train_says_so() -> None:
    model = mlp().requires_grad_(False)
    with pipeline(model) as pipe, pytest.raises(ps.PlanError, match="nothing to train"):
        pipe.step(batch(), batch())


# ── what testing by hand found ───────────────────────────────────────────────────────────────────────────────────


def test_a_first_stage_that_changes_its_input_in_place() -> None:
    """Micro-batches are parts of one tensor, and shared its version counter: one change spoiled what all had saved."""

    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    model = nn.Sequential(Scale(), nn.Linear(4, 4), nn.Linear(4, 4))
    expected = plain_step(copy.deepcopy(model), batch(), batch(seed=3), F.mse_loss)
    with ps.Pipeline(ps.split(model, stages=2), F.mse_loss, microbatches=4, devices="cpu") as pipe:
        assert_same(pipe.step(batch(), batch(seed=3)).loss, expected.loss)
        assert_same(gradients(pipe.named_parameters()), expected.gradients)


def test_tensors_hidden_in_an_object_do_not_cross() -> None:
    """In a thread they took their graph along, and ``pipe(x).backward()`` lost their gradients."""

    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Wraps(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Box(super().forward(x))

    class Unwraps(nn.Linear):
        def forward(self, box: Any) -> Tensor:
            return super().forward(box.value)

    plan = ps.split(nn.Sequential(Wraps(4, 4), Unwraps(4, 4)), stages=2)
    says = r"stage 0 returns a Box with a tensor in it \(value\)"
    with ps.Pipeline(plan, F.mse_loss, devices="cpu") as pipe, pytest.raises(ps.PlanError, match=says):
        pipe.step(batch(), batch())


def test_inputs_may_be_any_mapping() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.second(torch.tanh(self.first(x)))

    model = Net()
    with ps.Pipeline(ps.split(model, stages=2), F.mse_loss, microbatches=2, devices="cpu") as pipe:
        result = pipe.step(UserDict(x=batch()), batch())
        assert_same(result.outputs, model(batch()).detach())
        with pytest.raises(ps.PlanError, match="no inputs"), torch.no_grad():
            pipe()
