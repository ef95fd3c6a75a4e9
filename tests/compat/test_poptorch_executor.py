"""Training and inference models beside their calls: modes, weights, optimizers, files, and what is refused."""

from __future__ import annotations

import copy
import gc
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock.compat.poptorch as poptorch
from tests.compat.poptorch_models import STAGES, Net, Plain, assert_same_state, data, made, options, plain_call, twins
from tests.compat.poptorch_models import plainly as plainly
from tests.support.models import penstock_threads, threads_end


def test_the_inference_model_has_the_weights_that_were_trained() -> None:
    ours, plain = twins(Plain)
    batch = data(8)
    training = poptorch.trainingModel(ours, options(accumulation=2))
    inference = poptorch.inferenceModel(ours, options(iterations=2))
    before = inference(batch[0])
    training(*batch)
    plain_call(plain, torch.optim.SGD(plain.parameters(), lr=0.01), batch, accumulation=2)
    after = inference(batch[0])
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, torch.cat([plain(part) for part in batch[0].chunk(2)]).detach())
    torch.testing.assert_close(training.state_dict(), plain.state_dict())
    training.load_state_dict(copy.deepcopy(plain).state_dict())
    training.destroy()
    inference.destroy()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.double()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        with poptorch.Block("A", 0):
            x = self.drop(x) if self.training else x * 2
        with poptorch.Block("B", 1):
            x = self.linear(x)
        return x if y is None else (x, F.cross_entropy(x, y))


def test_modes_are_those_that_the_model_had_when_it_was_wrapped() -> None:
    model = made(Noisy)
    x, _ = data(8)
    noisy = poptorch.inferenceModel(model, options(iterations=2))
    model.eval()
    quiet = poptorch.inferenceModel(model, options(iterations=2))
    expected = model(x)
    model.train()
    torch.testing.assert_close(quiet(x), expected)
    model.eval()
    assert not torch.equal(noisy(x), noisy(x))
    assert not model.training
    assert not model.drop.training
    assert noisy.training
    torch.testing.assert_close(noisy.eval()(x), expected)
    assert not torch.equal(quiet.train()(x), quiet(x))
    assert not model.training
    noisy.destroy()
    quiet.destroy()


def test_attributes_of_the_model() -> None:
    model = made(Net)
    with poptorch.trainingModel(model, options(STAGES, accumulation=7)) as training:
        assert training.layers is model.layers
        assert training.model is model
        assert dict(training.named_parameters()).keys() == dict(model.named_parameters()).keys()
        assert training.options.Training.gradient_accumulation == 7
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            training.options.deviceIterations(2)
        with pytest.raises(AttributeError):
            _ = training.nothing
        with pytest.raises(poptorch.Error, match="cycleCount needs an IPU"):
            training.cycleCount()


def test_compile_builds_the_pipeline_without_running_it() -> None:
    ours, plain = twins()
    with poptorch.trainingModel(ours, options(STAGES, accumulation=7)) as training:
        assert not training.isCompiled()
        assert not training.isAttachedToDevice()
        with pytest.raises(poptorch.Error, match="for a compiled model"):
            training.attachToDevice()
        training.compile(*data(14))
        assert training.isCompiled()
        assert training.isAttachedToDevice()
        assert_same_state(ours, plain)
        training.detachFromDevice()
        assert not training.isAttachedToDevice()
        with pytest.raises(poptorch.Error, match="not attached"):
            training.detachFromDevice()
        training.copyNamedBuffersToDevice()
        assert training.isAttachedToDevice()
        with pytest.raises(poptorch.Error, match="needs a previous call"):
            training.getLatency()
        training(*data(14))
        least, most, mean = training.getLatency()
        assert 0 < least <= mean <= most


def test_a_model_can_be_wrapped_again_once_it_was_destroyed() -> None:
    model = made(Plain)
    first = poptorch.trainingModel(model)
    first(*data(4))
    with pytest.raises(RuntimeError, match=r"has already been wrapped in 'poptorch.trainingModel'. Call model.destroy"):
        poptorch.inferenceModel(first)  # type: ignore[arg-type]
    first.destroy()
    first.destroy()
    with pytest.raises(poptorch.Error, match="was destroyed"):
        first(*data(4))
    with poptorch.trainingModel(first.model) as second:
        second(*data(4))


def test_threads_end_with_the_model() -> None:
    before = penstock_threads()
    model = poptorch.inferenceModel(made(Net), options(STAGES, iterations=4))
    model(data(8)[0])
    mine = penstock_threads() - before
    assert len(mine) == 4
    del model
    gc.collect()
    assert threads_end(mine)


# ── optimizers ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_new_optimizer_of_the_same_class_keeps_the_state() -> None:
    ours, plain = twins(Plain)
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    with poptorch.trainingModel(ours, None, poptorch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)) as model:
        for call, lr in enumerate((0.1, 0.1, 0.02, 0.5)):
            batch = data(4, seed=call)
            expected.param_groups[0]["lr"] = lr
            model.setOptimizer(poptorch.optim.SGD(ours.parameters(), lr=lr, momentum=0.9))
            model(*batch)
            plain_call(plain, expected, batch)
        assert_same_state(ours, plain)
        model.setOptimizer(torch.optim.Adam(ours.parameters(), lr=0.1))
        batch = data(4, seed=9)
        model(*batch)
        plain_call(plain, torch.optim.Adam(plain.parameters(), lr=0.1), batch)
        assert_same_state(ours, plain)
        with pytest.raises(poptorch.Error, match="an optimizer is"):
            model.setOptimizer("SGD")  # type: ignore[arg-type]
    with pytest.raises(poptorch.Error, match="setOptimizer needs a model made by"):
        poptorch.inferenceModel(ours).setOptimizer(expected)


def test_one_optimizer_for_several_models() -> None:
    ours, plain = twins(Plain)
    opts = options()
    opts.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
    optimizer = poptorch.optim.Adam(ours.parameters(), lr=0.05)
    expected = torch.optim.Adam(plain.parameters(), lr=0.05)
    for call in range(3):
        batch = data(4, seed=call)
        with poptorch.trainingModel(ours, opts, optimizer) as model:
            model(*batch)
            if call == 1:
                optimizer = poptorch.optim.Adam(ours.parameters(), lr=0.05)
                model.setOptimizer(optimizer)
        plain_call(plain, expected, batch)
    assert_same_state(ours, plain)


def test_marks_of_an_optimizers_settings() -> None:
    attributes = poptorch.optim.SGD(made(Plain).parameters(), lr=0.1).variable_attrs
    attributes.markAsConstant("momentum")
    assert attributes.isConstant("momentum")
    attributes.markAsVariable("momentum")
    assert not attributes.isConstant("momentum")


@pytest.mark.parametrize("norm", [None, 0.05], ids=["as they are", "clipped"])
@pytest.mark.parametrize("scaling", ["loss_scaling", "automatic"])
def test_loss_scale_and_clipping(scaling: str, norm: float | None) -> None:
    ours, plain = twins(Plain)
    opts = options(accumulation=2)
    extra: dict[str, Any] = {"loss_scaling": 128.0} if scaling == "loss_scaling" else {}
    opts.Training.setAutomaticLossScaling(scaling == "automatic")
    optimizer = poptorch.optim.SGD(ours.parameters(), lr=0.1, max_grad_norm=norm, **extra)
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    with poptorch.trainingModel(ours, opts, optimizer) as model:
        for call in range(3):
            batch = data(8, seed=call)
            _, loss = model(*batch)
            expected.zero_grad()
            losses = [plain(x, y)[1] for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True)]
            (sum(losses) / 2).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), norm or 1e9)
            expected.step()
            torch.testing.assert_close(loss, losses[-1].detach())
            if "loss_scaling" in extra:
                optimizer.loss_scaling = 256.0
    assert_same_state(ours, plain)


def test_automatic_loss_scaling_leaves_out_updates_that_are_not_finite() -> None:
    ours, plain = twins(Plain)
    opts = options()
    opts.Training.setAutomaticLossScaling(True)
    x, y = data(4)
    with poptorch.trainingModel(ours, opts, poptorch.optim.SGD(ours.parameters(), lr=0.1)) as model:
        model(torch.full_like(x, torch.nan), y)
        assert_same_state(ours, plain)
        model(x, y)
        assert all(bool(p.isfinite().all()) for p in ours.parameters())


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("training", [True, False])
def test_save_and_load(tmp_path: Path, training: bool) -> None:
    file = str(tmp_path / "model.poptorch")
    ours = made(Net)
    x, labels = data(14)
    if training:
        optimizer = poptorch.optim.Adam(ours.parameters(), lr=0.05, loss_scaling=4.0)
        model = poptorch.trainingModel(ours, options(STAGES, accumulation=7), optimizer)
        model(x, labels)
        model.save(file)
        copied = poptorch.load(file)
        for _ in range(2):
            torch.testing.assert_close(copied(x, labels), model(x, labels))
        assert copied.model is not ours
        torch.testing.assert_close(copied.model.state_dict(), ours.state_dict())
    else:
        model = poptorch.inferenceModel(ours.eval(), options(STAGES, iterations=7))
        ours.train()  # which is not the wrapped model's mode
        model.compileAndExport(file, x)
        copied = poptorch.load(file, lambda opts: opts.outputMode(poptorch.OutputMode.Final))
        torch.testing.assert_close(copied(x), model(x)[-2:])
    model.destroy()
    copied.destroy()
    torch.save({"weights": 1}, file)
    with pytest.raises(poptorch.Error, match="was not written by a model's save"):
        poptorch.load(file)


def test_a_trace_of_the_first_call(tmp_path: Path) -> None:
    opts = options(poptorch.PipelinedExecution(["B1", "B2"], ["B3", "B4"]), accumulation=3)
    with poptorch.trainingModel(made(Net), opts.enableProfiling(str(tmp_path / "profile"))) as model:
        model(*data(6))
    events = json.loads((tmp_path / "profile" / "training.json").read_text())["traceEvents"]
    linear = Counter(event["tid"] for event in events if event.get("name") == "aten::linear")
    # Each stage has a thread; before, this one records the forward and compares the stages with the whole model.
    *stages, _ = sorted(linear.values())
    assert stages == [2 * 3, 2 * 3]


def test_hardware() -> None:
    assert poptorch.ipuHardwareIsAvailable()
    assert not poptorch.isRunningOnIpu()


@pytest.mark.parametrize(
    ("level", "expected"), [("DEBUG", logging.DEBUG), (3, logging.WARNING), ("OFF", 60), ("TRACE", 1)]
)
def test_log_levels(level: str | int, expected: int) -> None:
    logger = logging.getLogger("penstock")
    before = logger.level
    try:
        poptorch.setLogLevel(level)
        assert logger.level == expected
        with pytest.raises(AssertionError, match="Invalid log level: 'LOUD'"):
            poptorch.setLogLevel("LOUD")
        assert logger.level == expected
    finally:
        logger.setLevel(before)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("samples", [41, 10, 0])
def test_invalid_batch_dimensions(samples: int) -> None:
    opts = options(STAGES, accumulation=7, iterations=3, replicas=2)
    message = (
        rf"Invalid batch dimension: In the input torch.Size\(\[{samples}, 4\]\), the batch dimension \({samples}\) "
        r"must be a multiple of Options.deviceIterations\(3\) \* Options.replicationFactor\(2\) \* "
        r"Options.Training.gradientAccumulation\(7\) = 42"
    )
    with poptorch.trainingModel(made(Net), opts) as model, pytest.raises(AssertionError, match=message):
        model(*data(samples))


def test_outputs_have_no_backward() -> None:
    with poptorch.trainingModel(made(Plain)) as model:
        _, loss = model(*data(4))
        with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly on outputs of a PopTorch"):
            loss.backward()


def test_inference_has_no_gradient_accumulation() -> None:
    with pytest.raises(poptorch.Error, match=r"Gradient accumulation must be left to its default value \(1\)"):
        poptorch.inferenceModel(made(Net), options(accumulation=2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: poptorch.trainingModel(made(Plain), {}), "'options' must be of type poptorch.Options"),
        (lambda: poptorch.trainingModel(made(Plain), None, 3), "an optimizer is"),
        (lambda: poptorch.trainingModel(made(Plain))(), "takes tensors with samples"),
        (lambda: poptorch.trainingModel(made(Plain))(3), "takes tensors with samples"),
        (
            lambda: poptorch.inferenceModel(made(Plain), options().outputMode(poptorch.OutputMode.EveryN, 2)),
            "every 2th micro-batch, but a call has 1",
        ),
    ],
)
def test_invalid_use(make: Any, message: str) -> None:
    with pytest.raises(poptorch.Error, match=message):
        make()


def test_existing_gradients_are_discarded() -> None:
    ours, plain = twins(Plain)
    for parameter in ours.parameters():
        parameter.grad = torch.ones_like(parameter)
    with poptorch.trainingModel(ours) as model:
        model(*data(4))
    plain_call(plain, torch.optim.SGD(plain.parameters(), lr=0.01), data(4))
    assert_same_state(ours, plain)


def test_calls_after_a_failure_in_the_model() -> None:
    class Fails(Plain):
        fails = False

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            if self.fails:
                raise RuntimeError("no luck")
            return super().forward(x, labels)

    ours, plain = twins(Fails)
    batch = data(8)
    with poptorch.trainingModel(ours, options(accumulation=2)) as model:
        ours.fails = True  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="no luck"):
            model(*batch)
        ours.fails = False  # type: ignore[assignment]
        model(*batch)
    plain_call(plain, torch.optim.SGD(plain.parameters(), lr=0.01), batch, accumulation=2)
    assert_same_state(ours, plain)
