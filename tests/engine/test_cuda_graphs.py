"""When stages are captured as CUDA graphs, when they run eagerly, and when they are captured again.

On the CPU, recorded operators stand in for graphs (``tests/support/replayed_graphs``).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.engine.channel.local import LocalChannel
from penstock.engine.cuda_graphs import MAX_KINDS
from penstock.engine.message import Message
from tests.support.replayed_graphs import CpuGraphDevice, replay_on_cpu


@pytest.fixture(autouse=True)
def _graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    replay_on_cpu(monkeypatch)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = 1.5

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.factor


class Twins:
    """A pipeline with graphs and the plain model, which train alike."""

    def __init__(self, *layers: nn.Module, loss_fn: Any = F.mse_loss, stages: int = 2, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(layers or [Layer() for _ in range(4)]))
        self.plain, self.loss_fn = copy.deepcopy(self.model), loss_fn
        options = {"microbatches": 2, **options}
        self.pipe = ps.Pipeline(ps.split(self.model, stages=stages), loss_fn, cuda_graphs=True, **options)
        self.optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (self.model, self.plain)]
        self.zero_grad()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def steps(self, count: int = 4, batch: int = 4, *, plain: Callable[[Tensor], Tensor] | None = None) -> str:
        """Compare steps; returns the description of the graphs."""
        for step in range(count):
            x = torch.randn(batch, 4, generator=torch.Generator().manual_seed(step))
            result = self.pipe.step(x, -x)
            loss = self.loss_fn((plain or self.plain)(x), -x)
            loss.backward()
            torch.testing.assert_close(result.loss, loss.detach())
            self.check_gradients()
            for optimizer in self.optimizers:
                optimizer.step()
            self.zero_grad()
        return self.pipe.describe_graphs()

    def check_gradients(self) -> None:
        theirs = {name: parameter.grad for name, parameter in self.plain.named_parameters()}
        for name, parameter in self.model.named_parameters():
            torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-4, atol=1e-6)


CAPTURED = "stage 0: 2 slots captured for 1 kinds of calls\nstage 1: 1 slots captured for 1 kinds of calls"


# ── captures ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_stages_are_captured_in_the_third_step() -> None:
    twins = Twins()
    assert "0 slots" in twins.steps(2)
    assert twins.steps(1) == CAPTURED
    assert twins.steps(3) == CAPTURED


def test_a_pipeline_without_graphs_says_so() -> None:
    pipe = ps.Pipeline(ps.split(nn.Sequential(Layer(), Layer()), stages=2), F.mse_loss)
    assert pipe.describe_graphs() == "cuda_graphs is not set: all stages run eagerly"


def test_other_shapes_are_eager_first_and_then_captured() -> None:
    twins = Twins()
    twins.steps(4)
    assert twins.steps(1, batch=6) == CAPTURED
    assert "2 kinds" in twins.steps(3, batch=6)
    assert "2 kinds" in twins.steps(2, batch=4)


def test_the_number_of_kinds_is_limited() -> None:
    twins = Twins()
    for _ in range(4):
        for batch in range(2, 2 * MAX_KINDS + 6, 2):
            twins.steps(1, batch=batch)
    assert f"for {MAX_KINDS} kinds of calls; more than {MAX_KINDS} kinds" in twins.pipe.describe_graphs()


def test_fewer_microbatches_use_the_same_graphs() -> None:
    twins = Twins(microbatches=4)
    captured = twins.steps(4, batch=8)
    assert twins.steps(2, batch=6) == captured  # three micro-batches of two samples


def test_evaluations_are_captured_and_their_outputs_stay() -> None:
    twins = Twins()
    outputs, expected = [], []
    for step in range(5):
        x = torch.full((4, 4), float(step))
        with torch.no_grad():
            outputs.append(twins.pipe(x))
            expected.append(twins.plain(x))
        assert torch.equal(twins.pipe.evaluate(x, -x).loss, F.mse_loss(expected[-1], -x).detach())
    assert "captured for 2 kinds" in twins.pipe.describe_graphs()  # with a loss and without
    torch.testing.assert_close(outputs, expected)


def test_close_frees_the_graphs() -> None:
    twins = Twins()
    twins.steps(4)
    executor: Any = twins.pipe._executor
    assert len(executor.graphs.grads) == 8
    twins.pipe.close()
    assert "0 slots" in twins.pipe.describe_graphs()
    assert not executor.graphs.grads


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_gradients_are_added_to_those_of_earlier_steps() -> None:
    twins = Twins()
    twins.steps(3)
    for to_none in (True, False):
        for _ in range(3):
            x = torch.randn(4, 4)
            twins.pipe.step(x, -x)
            F.mse_loss(twins.plain(x), -x).backward()
            twins.check_gradients()
        for optimizer in twins.optimizers:
            optimizer.zero_grad(set_to_none=to_none)


def test_a_gradient_that_the_user_has_set_is_kept() -> None:
    twins = Twins()
    twins.steps(3)
    for model in (twins.model, twins.plain):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    x = torch.randn(4, 4)
    twins.pipe.step(x, -x)
    F.mse_loss(twins.plain(x), -x).backward()
    twins.check_gradients()


@pytest.mark.parametrize("steps", [0, 4])
def test_gradients_in_a_buffer_of_the_user_stay_there(steps: int) -> None:
    twins = Twins()
    twins.steps(steps)
    weights = [model[0].linear.weight for model in (twins.model, twins.plain)]
    buffers = [torch.zeros(20), torch.zeros(20)]
    for weight, buffer in zip(weights, buffers, strict=True):
        weight.grad = buffer[4:].view(4, 4)
    for _ in range(5):
        x = torch.randn(4, 4)
        twins.pipe.step(x, -x)
        F.mse_loss(twins.plain(x), -x).backward()
        torch.testing.assert_close(*buffers)
        twins.check_gradients()


class WithSpare(Layer):
    """A layer with a parameter that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))


def test_a_parameter_that_is_not_used_has_no_gradient() -> None:
    twins = Twins(WithSpare(), WithSpare(), Layer())
    twins.steps(5)
    x = torch.randn(4, 4)
    twins.pipe.step(x, -x)
    assert twins.model[0].spare.grad is None
    assert twins.model[0].linear.weight.grad is not None


def test_a_failed_step_leaves_no_gradient_and_the_next_one_is_right() -> None:
    twins = Twins()
    twins.steps(4)
    with pytest.raises(RuntimeError):
        twins.pipe.step(torch.randn(4, 5), torch.randn(4, 5))
    assert all(parameter.grad is None for parameter in twins.model.parameters())
    assert twins.steps(2) == CAPTURED


def test_an_output_without_gradients_is_copied_out_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    twins, sent, send = Twins(microbatches=1), [], LocalChannel.send
    monkeypatch.setattr(LocalChannel, "send", lambda self, k, value: [sent.append(value), send(self, k, value)])
    for model in (twins.model, twins.plain):
        model[:2].requires_grad_(False)
    twins.steps(5)
    outputs = [value.leaves[0].data_ptr() for value in sent if isinstance(value, Message)]
    assert len(set(outputs[-2:])) == 2


class MovingMean(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return super().forward(x)


def test_buffers_that_a_recompute_restores_are_in_memory_of_their_slot() -> None:
    twins = Twins(MovingMean(), Layer(), Layer(), Layer(), microbatches=8, recompute="always", schedule="gpipe")
    for batch in (2, 8):  # with more micro-batches, slots are captured in their first run
        assert "0 slots" not in twins.steps(3, batch=batch)
    graphs: Any = twins.pipe._executor.graphs
    first, second = (list(graphs.stages[stage].captured.values()) for stage in (0, 1))
    assert len(first) == len(second) == 8
    assert len({slot.forward_pool for slot in first}) == 8
    assert {slot.forward_pool for slot in second} == {graphs.stages[1].device.shared_pool}


# ── changes after a capture ──────────────────────────────────────────────────────────────────────────────────────


def test_an_attribute_that_changes_is_followed() -> None:
    twins = Twins()
    twins.steps(4)
    for model in (twins.model, twins.plain):
        model[1].factor = 0.5
    assert "0 slots" in twins.steps(1)
    assert twins.steps(3) == CAPTURED


class Settings:
    def __init__(self) -> None:
        self.factor = 1.5


class Configured(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.settings.factor


def test_an_object_of_a_module_that_changes_is_followed(caplog: Any) -> None:
    caplog.set_level("INFO", "penstock")
    twins = Twins(Layer(), Layer(), Configured(), Layer())
    twins.steps(4)
    for model in (twins.model, twins.plain):
        model[2].settings.factor = 0.5
    assert "stage 1: 0 slots" in twins.steps(1)
    assert [record.message for record in caplog.records if "cuda_graphs" in record.message] == [
        "cuda_graphs: stage 1 has changed, and is captured again"
    ]
    assert twins.steps(3) == CAPTURED


def test_parameters_that_move_or_change_dtype_are_followed() -> None:
    twins = Twins()
    twins.steps(4)
    for model in (twins.model, twins.plain):
        model[0].linear.weight.data = torch.eye(4)
    twins.steps(4)
    for model in (twins.model, twins.plain):
        model[1].linear.requires_grad_(False)
    assert twins.steps(4) == CAPTURED


def test_a_module_that_is_replaced_is_followed() -> None:
    twins = Twins()
    twins.steps(4)
    linear = nn.Linear(4, 4)
    for model in (twins.model, twins.plain):
        model[1].linear = copy.deepcopy(linear)
    assert "stage 0: 0 slots" in twins.steps(1)
    assert twins.steps(3) == CAPTURED


def test_a_parameter_that_is_replaced_is_followed() -> None:
    twins = Twins()
    twins.steps(4)
    for model in (twins.model, twins.plain):
        model[0].linear.weight = nn.Parameter(model[0].linear.weight.data)  # on the same memory
    assert twins.steps(4) == CAPTURED


def test_an_object_that_a_module_got_later_is_followed() -> None:
    twins = Twins(Configured(), Layer(), Layer(), Layer())
    twins.steps(4)
    for factor in (0.5, 0.7, 0.9):
        for model in (twins.model, twins.plain):
            if factor == 0.5:
                model[0].settings = Settings()
            model[0].settings.factor = factor
        twins.steps(4)


class Dilated(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.conv(x[:, None])[:, 0])


def test_an_attribute_of_a_module_of_torch_is_followed() -> None:
    twins = Twins(Dilated(), Layer(), Layer(), Layer())
    twins.steps(4)
    for model in (twins.model, twins.plain):
        model[0].conv.dilation = model[0].conv.padding = (2,)
    twins.steps(4)


global_factor = 1.0


class ReadsGlobals(Layer):
    class_factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * global_factor * self.class_factor


def test_attributes_of_classes_and_global_variables_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(ReadsGlobals(), Layer(), Layer(), Layer())
    twins.steps(4)
    monkeypatch.setattr(ReadsGlobals, "class_factor", 0.5)
    assert "stage 0: 0 slots" in twins.steps(1)
    twins.steps(3)
    monkeypatch.setitem(globals(), "global_factor", 0.5)
    assert "stage 0: 0 slots" in twins.steps(1)
    assert twins.steps(3) == CAPTURED


def scaled(x: Tensor) -> Tensor:
    return x * global_factor


def test_what_functions_read_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    box, weight = [1.0], 1.0

    class ReadsClosure(Layer):
        def forward(self, x: Tensor, options: dict[str, float] = {"factor": 1.0}) -> Tensor:  # noqa: B006
            return scaled(super().forward(x) * box[0] * options["factor"])

    def loss_fn(x: Tensor, y: Tensor, power: list[float]) -> Tensor:
        return (weight * (x - y).abs() ** power[0]).mean()

    power = [2.0]
    twins = Twins(ReadsClosure(), Layer(), Layer(), Layer(), loss_fn=partial(loss_fn, power=power))
    defaults: Any = ReadsClosure.forward.__defaults__
    assert twins.steps(4) == CAPTURED
    box[0] = 0.5
    twins.steps(4)
    defaults[0]["factor"] = 0.5
    twins.steps(4)
    monkeypatch.setitem(globals(), "global_factor", 0.5)
    twins.steps(4)
    power[0] = 3.0
    twins.steps(4)
    weight = 0.5
    assert twins.steps(4) == CAPTURED


def test_a_forward_of_one_module_of_torch_is_followed() -> None:
    twins = Twins()
    twins.steps(4)
    for model in (twins.model, twins.plain):
        linear = model[1].linear
        linear.forward = partial(F.linear, weight=linear.weight)
    assert "stage 0: 0 slots" in twins.steps(1)
    assert twins.steps(3) == CAPTURED


def test_stages_that_share_objects_and_parameters() -> None:
    first, second = Configured(), Configured()
    second.settings, second.linear = first.settings, first.linear
    twins = Twins(first, Layer(), second, Layer())
    assert twins.steps(4) == CAPTURED
    for model in (twins.model, twins.plain):
        model[0].settings.factor = 0.5
    assert twins.steps(4) == CAPTURED


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


class UsesSecond(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.uses = False

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, y = pair
        return super().forward(x + y if self.uses and self.training else x)


def test_outputs_that_get_gradients_later() -> None:
    twins = Twins(TwoOutputs(), UsesSecond())
    models = (twins.model, twins.plain)
    twins.steps(4)
    for model in models:
        model[1].uses = True
    twins.steps(4)
    for training in (False, True):
        for model in models:
            model[1].train(training)
        twins.steps(4)
    for trained in (False, True):
        for model in models:
            model[0].second.requires_grad_(trained)
        twins.steps(4)
    assert "eager" not in twins.pipe.describe_graphs()


class UsesSecondSometimes(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(3)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, y = pair
        return super().forward(x + y if self.random.random() < 0.5 else x)


def test_outputs_that_get_gradients_from_some_microbatches() -> None:
    twins = Twins(TwoOutputs(), UsesSecondSometimes(), microbatches=1)
    assert "stage 0: eager, because its outputs do not always get gradients" in twins.steps(8)


def test_inference_mode_has_graphs_of_its_own() -> None:
    twins = Twins()
    x = torch.randn(4, 4)
    for mode in (torch.inference_mode, torch.no_grad) * 4:
        with mode():
            torch.testing.assert_close(twins.pipe(x), twins.plain(x))
    assert "captured for 2 kinds" in twins.pipe.describe_graphs()


def test_training_and_evaluation_modes_have_graphs_of_their_own() -> None:
    twins = Twins(Layer(), nn.BatchNorm1d(4), Layer(), nn.BatchNorm1d(4), microbatches=1)
    for _ in range(4):
        for training in (True, False):
            twins.model.train(training)
            twins.plain.train(training)
            twins.steps(2, batch=8)
    assert "for 2 kinds" in twins.pipe.describe_graphs()
    torch.testing.assert_close(twins.model[1].running_mean, twins.plain[1].running_mean)


# ── stages that run eagerly ──────────────────────────────────────────────────────────────────────────────────────


class Counter(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class ReadsData(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.abs().sum() > 1 else -x)


class DrawsInPython(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * random.random()


class DrawsOnTheHost(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(torch.rand(()) < 2)


class ChangesItsInput(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class AsksForMicrobatch(Layer):
    def forward(self, x: Tensor) -> Tensor:
        ps.current_microbatch()
        return super().forward(x)


class CountsInDict(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "counts"):
            self.counts = {"calls": 0}
        self.counts["calls"] += 1
        return super().forward(x)


class CountsInClass(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        CountsInClass.calls += 1
        return super().forward(x)


class ListOfParameters(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [nn.Parameter(torch.ones(4))]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scales[0]


class ListOfWeights(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.others = nn.Parameter(torch.eye(4)), [nn.Parameter(torch.eye(4))]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(x), self.weight) + F.linear(x, self.others[0])


FOREIGN = "its backward adds to the gradient of a tensor that is not a parameter of its modules"


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Counter, "its forward changes Python state (calls)"),
        (CountsInDict, "its forward changes Python state (dict)"),
        (CountsInClass, "its forward changes Python state (calls)"),
        (ListOfParameters, f"it cannot be captured ({FOREIGN})"),
        (ReadsData, "it cannot be captured (operation not permitted when stream is capturing)"),
        (DrawsInPython, "its forward changes Python state (module)"),
        (DrawsOnTheHost, "its forward draws random numbers on the CPU"),
        (ChangesItsInput, "it changes its inputs in place"),
        (AsksForMicrobatch, "a layer asks for the current micro-batch"),
    ],
)
def test_a_stage_that_a_replay_would_change_is_eager(layer: type[Layer], reason: str, caplog: Any) -> None:
    twins = Twins(Layer(), Layer(), layer(), Layer())
    found = twins.steps(5)
    assert found == f"{CAPTURED.splitlines()[0]}\nstage 1: eager, because {reason}"
    assert [record.message for record in caplog.records if "cuda_graphs" in record.message] == [
        f"cuda_graphs: stage 1 runs eagerly, because {reason}"
    ]


def test_a_deferred_gradient_of_another_tensor_is_not_captured() -> None:
    twins = Twins(Layer(), ListOfWeights(), schedule="zb_h1")
    assert FOREIGN in twins.steps(5)
    others = [model[1].others[0].grad for model in (twins.model, twins.plain)]
    torch.testing.assert_close(*others)


class CountsEvaluations(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


def test_state_that_only_evaluations_change() -> None:
    twins = Twins(Layer(), Layer(), CountsEvaluations(), Layer())
    x = torch.randn(4, 4)
    for training in (False, True) * 4:
        twins.model.train(training)
        if training:
            twins.steps(1)
        else:
            twins.pipe.evaluate(x, x)
    assert twins.model[2].calls == 8


def test_an_interrupted_capture_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    capture, interrupts = CpuGraphDevice.capture, [0, 0, 1, 0]

    def interrupted(*args: Any) -> Callable[[], None]:
        made = capture(*args)
        if interrupts and interrupts.pop(0):
            raise KeyboardInterrupt
        return made

    monkeypatch.setattr(CpuGraphDevice, "capture", interrupted)
    twins = Twins()
    twins.steps(2)
    with pytest.raises(KeyboardInterrupt):
        twins.steps(1)
    assert all(parameter.grad is None for parameter in twins.model.parameters())
    assert twins.steps(4) == CAPTURED


def test_a_stage_with_hooks_is_eager_from_then_on() -> None:
    twins = Twins()
    twins.steps(4)
    seen = []
    twins.model[0].register_forward_hook(lambda *_: seen.append(1))
    assert "stage 0: eager, because its modules have hooks" in twins.steps(2)
    assert len(seen) == 4
    twins.model[3].linear.weight.register_hook(lambda grad: seen.append(2))
    assert "stage 1: eager, because its parameters have hooks" in twins.steps(2)
    assert 2 in seen


def test_an_eager_stage_between_captured_ones() -> None:
    twins = Twins(Layer(), Counter(), Layer(), stages=3, microbatches=4, schedule="zb_h1")
    found = twins.steps(6, batch=8).splitlines()
    assert ["eager" in line for line in found] == [False, True, False]


def test_a_dynamic_pipeline_is_eager(caplog: Any) -> None:
    assert "eager, because the pipeline is dynamic" in Twins(dynamic=True).steps(3)
    (record,) = (record for record in caplog.records if "cuda_graphs" in record.message)
    assert record.message == "cuda_graphs: stages 0, 1 run eagerly, because the pipeline is dynamic"


def test_options_that_capture_graphs_twice_are_refused() -> None:
    with pytest.raises(ps.PlanError, match="makes CUDA graphs of its own"):
        Twins(compile={"mode": "reduce-overhead"})
    with pytest.raises(ps.PlanError, match="compile must be a bool or a dict"):
        Twins(compile="inductor")
