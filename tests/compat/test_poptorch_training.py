"""A PopTorch call is the plain loop: samples, updates, averaged gradients, outputs, statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock.compat.poptorch as poptorch
from tests.compat.poptorch_models import (
    STAGES,
    WIDTH,
    Net,
    Plain,
    assert_same_state,
    data,
    options,
    plain_call,
    twins,
)
from tests.compat.poptorch_models import plainly as plainly

pytestmark = pytest.mark.slow

STRATEGIES = {
    "pipelined": (Net, STAGES),
    "stages": (
        Net,
        poptorch.PipelinedExecution(
            poptorch.Stage("B1", "B2").ipu(0), poptorch.Stage("B3").ipu(1), poptorch.Stage("B4").ipu(0)
        ),
    ),
    "lists": (Net, poptorch.PipelinedExecution(["B1", "B2"], ["B3", "B4"])),
    "sharded": (Net, poptorch.ShardedExecution("B1", "B2", "B3", "B4")),
    "phases": (Net, poptorch.SerialPhasedExecution(poptorch.Phase("B1", ["B2", "B3"]), [poptorch.Stage("B4").ipu(1)])),
    "parallel phases": (Net, poptorch.ParallelPhasedExecution(poptorch.Phase("B1"), ["B2"], ["B3", "B4"])),
    "by IPUs": (lambda: Net((0, 0, 1, 2)), None),
    "by blocks": (Net, poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)),
    "no blocks": (Plain, None),
    "no blocks, sharded": (Plain, poptorch.ShardedExecution()),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_calls_update_as_a_plain_loop(strategy: str) -> None:
    make, how = STRATEGIES[strategy]
    ours, plain = twins(make)  # type: ignore[arg-type]
    expected = torch.optim.AdamW(plain.parameters(), lr=0.05)
    optimizer = poptorch.optim.AdamW(ours.parameters(), lr=0.05)
    opts = options(how, accumulation=7, iterations=3)
    with poptorch.trainingModel(ours, opts, optimizer) as model:
        for call in range(3):
            batch = data(42, seed=call)
            outputs = plain_call(plain, expected, batch, iterations=3, accumulation=7)
            output, loss = model(*batch)
            torch.testing.assert_close((output, loss), outputs[-1])
            assert loss.dim() == 0
            assert_same_state(ours, plain)  # BatchNorm's statistics too
        assert all(parameter.grad is None for parameter in ours.parameters())
        assert model._pipe is not None
        names = {"sharded": "sharded", "phases": "gpipe"}
        assert model._pipe.schedule.name == names.get(strategy.split()[-1], "1f1b")


@pytest.mark.parametrize("mean", [True, False], ids=["Mean", "Sum"])
def test_gradients_of_micro_batches_and_replicas_are_averaged_or_summed(mean: bool) -> None:
    ours, plain = twins(Plain)
    opts = options(accumulation=2, iterations=2, replicas=3)
    kind = poptorch.ReductionType.Mean if mean else poptorch.ReductionType.Sum
    opts.Training.accumulationAndReplicationReductionType(kind)
    with poptorch.trainingModel(ours, opts, poptorch.optim.SGD(ours.parameters(), lr=0.1)) as model:
        batch = data(24)
        model(*batch)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain_call(plain, optimizer, batch, iterations=2, accumulation=6, mean=mean)
    assert_same_state(ours, plain)


def expected_outputs(mode: str, micro: list[tuple[Tensor, Tensor]], replicas: int) -> tuple[Tensor, Tensor]:
    """The outputs that ``mode`` keeps, in order of iterations and replicas."""
    turns = [micro[at : at + replicas] for at in range(0, len(micro), replicas)]
    if mode == "Sum":
        kept = [tuple(map(sum, zip(*(turn[r] for turn in turns), strict=True))) for r in range(replicas)]
    else:
        chosen = {"Final": turns[-1:], "Default": turns[-1:], "All": turns, "EveryN": turns[1::2]}[mode]
        kept = [pair for turn in chosen for pair in turn]
    losses = torch.stack([pair[1] for pair in kept])
    return torch.cat([pair[0] for pair in kept]), losses if len(kept) > 1 else losses[0]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("mode", ["Default", "Final", "All", "Sum", "EveryN"])
def test_output_modes_of_a_training_call(mode: str, replicas: int) -> None:
    ours, plain = twins(Plain)
    opts = options(accumulation=2, iterations=3, replicas=replicas)
    opts.outputMode(poptorch.OutputMode[mode], *[2] * (mode == "EveryN"))
    with poptorch.trainingModel(ours, opts, poptorch.optim.SGD(ours.parameters(), lr=0.1)) as model:
        batch = data(2 * 6 * replicas)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        micro = plain_call(plain, optimizer, batch, iterations=3, accumulation=2 * replicas)
        torch.testing.assert_close(model(*batch), expected_outputs(mode, micro, replicas))


@pytest.mark.parametrize("mode", ["Default", "Final", "All", "Sum", "EveryN"])
@pytest.mark.parametrize("strategy", [STAGES, poptorch.ShardedExecution("B1", "B2", "B3", "B4")], ids=str)
def test_output_modes_of_an_inference_call(mode: str, strategy: Any) -> None:
    ours, plain = twins()
    ours.eval()
    plain.eval()
    opts = options(strategy, iterations=6).outputMode(poptorch.OutputMode[mode], *[2] * (mode == "EveryN"))
    with poptorch.inferenceModel(ours, opts) as model, torch.no_grad():
        x, _ = data(12)
        parts = plain(x).chunk(6)
        wanted = {"Final": parts[5], "Sum": sum(parts), "EveryN": torch.cat(parts[1::2])}.get(mode, torch.cat(parts))
        torch.testing.assert_close(model(x), wanted)
        torch.testing.assert_close(model(x=x), wanted)


def test_every_nth_counts_over_the_updates_of_a_call() -> None:
    ours, plain = twins(Plain)
    opts = options(accumulation=2, iterations=5).outputMode(poptorch.OutputMode.EveryN, 5)
    with poptorch.trainingModel(ours, opts, poptorch.optim.SGD(ours.parameters(), lr=0.1)) as model:
        batch = data(20)
        micro = plain_call(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batch, iterations=5, accumulation=2)
        output, loss = model(*batch)
        torch.testing.assert_close(output, torch.cat([micro[4][0], micro[9][0]]))
        torch.testing.assert_close(loss, torch.stack([micro[4][1], micro[9][1]]))


def test_arguments_by_position_and_by_name() -> None:
    x, labels = data(14)
    for args, kwargs in [((x, labels), {}), ((x,), {"labels": labels}), ((), {"labels": labels, "x": x})]:
        ours, plain = twins()
        opts = options(STAGES, accumulation=7)
        with poptorch.trainingModel(ours, opts, poptorch.optim.SGD(ours.parameters(), lr=0.1)) as model:
            model(*args, **kwargs)
        plain_call(plain, torch.optim.SGD(plain.parameters(), lr=0.1), (x, labels), accumulation=7)
        assert_same_state(ours, plain)


def test_the_default_optimizer_is_sgd() -> None:
    ours, plain = twins(Plain)
    batch = data(4)
    with poptorch.trainingModel(ours) as model:
        model(*batch)
    plain_call(plain, torch.optim.SGD(plain.parameters(), lr=0.01), batch)
    assert_same_state(ours, plain)


@pytest.mark.parametrize("off", ["", "Optimizer", "Activation", "Weight", "Optimizer Activation Weight"])
def test_tensors_in_the_hosts_memory_do_not_change_the_result(off: str) -> None:
    ours, plain = twins()
    opts = options(STAGES, accumulation=7, iterations=2)
    for what in off.split():
        place = poptorch.TensorLocationSettings().useOnChipStorage(False)
        getattr(opts.TensorLocations, f"set{what}Location")(place)
    optimizer = poptorch.optim.Adam(ours.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # it wraps the optimizer's step
    expected = torch.optim.Adam(plain.parameters(), lr=0.05)
    with poptorch.trainingModel(ours, opts, optimizer) as model:
        for call in range(3):
            expected.param_groups[0]["lr"] = 0.05 * 0.5**call
            batch = data(28, seed=call)
            model(*batch)
            plain_call(plain, expected, batch, iterations=2, accumulation=7)
            scheduler.step()
            model.setOptimizer(optimizer)
    assert_same_state(ours, plain)


RUNS: list[str] = []


@torch.library.custom_op("penstock_tests::poptorch_costly", mutates_args=())
def costly(x: Tensor) -> Tensor:
    RUNS.append("costly")
    return 3 * x


costly.register_fake(torch.empty_like)
costly.register_autograd(lambda ctx, grad: 3 * grad)


class Counted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        RUNS.append("linear")
        return super().forward(x)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Counted(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        with poptorch.Block("A", 0):
            x, y = poptorch.recomputationCheckpoint(costly(self.first(x)), x)
            x = torch.tanh(x + y)
        with poptorch.Block("B", 1):
            x = self.last(x)
            return x, F.cross_entropy(x, labels)


@pytest.mark.parametrize(("kind", "linears"), [(0, 3), (3, 6)], ids=["kept", "recomputed"])
def test_forwards_are_recomputed_from_their_checkpoints(kind: int, linears: int) -> None:
    ours, plain = twins(Checkpointed)
    opts = options(accumulation=3)
    opts._Popart.set("autoRecomputation", kind)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with poptorch.trainingModel(ours, opts, poptorch.optim.SGD(ours.parameters(), lr=0.1)) as model:
        for call in range(2):
            batch = data(6, seed=call)
            plain_call(plain, optimizer, batch, accumulation=3)
            RUNS.clear()
            model(*batch)
    assert_same_state(ours, plain)
    assert (RUNS.count("linear"), RUNS.count("costly")) == (linears, 3)


def test_random_numbers_follow_the_seed() -> None:
    class Dropping(Plain):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            return super().forward(F.dropout(x, 0.5, self.training), labels)

    outputs = []
    for seed in (3, 3, 4):
        ours, _ = twins(Dropping)
        with poptorch.trainingModel(ours, options(accumulation=2).randomSeed(seed)) as model:
            outputs.append(torch.stack([model(*data(8))[1] for _ in range(2)]))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


# ── the loss ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Custom(nn.Module):
    """``how`` says which tensors are returned, and which is marked."""

    def __init__(self, how: str, blocks: bool) -> None:
        super().__init__()
        self.how, self.blocks = how, blocks
        self.linear, self.other = nn.Linear(WIDTH, 1), nn.Linear(1, 1)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if self.blocks:
            poptorch.Block("A", 0).start()
        out = self.linear(x)
        if self.blocks:
            poptorch.Block("B", 1).start()
        out = self.other(out)
        error = (out - y[:, None]).square()
        mean, total = error.mean(), error.abs().sum()
        if self.how == "marked":
            return out, mean, poptorch.identity_loss(mean + total, reduction="none")
        if self.how == "marked rows":
            return poptorch.identity_loss(error, reduction="none")
        if self.how in ("mean", "sum"):
            return {"out": out, "sizes": [mean.detach(), poptorch.identity_loss(error, self.how)]}
        return {"one": (mean, out), "alone": mean, "two": (mean, total, out), "none": (out, mean.detach())}[self.how]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        error = (self.other(self.linear(x)) - y[:, None]).square()
        parts = {"marked": error.mean() + error.sum(), "marked rows": error.sum(), "sum": error.sum()}
        return parts.get(self.how, error.mean())


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
@pytest.mark.parametrize("how", ["marked", "marked rows", "mean", "sum", "one", "alone"])
@pytest.mark.filterwarnings("ignore:For pipelining, depth")
def test_the_loss_is_found(how: str, blocks: bool) -> None:
    ours, plain = twins(lambda: Custom(how, blocks))
    x, labels = data(4)
    y = labels.double()
    with poptorch.trainingModel(ours, options(accumulation=2), torch.optim.SGD(ours.parameters(), lr=0.1)) as model:
        model(x, y)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
        (plain.loss(part, target) / 2).backward()  # type: ignore[operator]
    optimizer.step()
    assert_same_state(ours, plain)


def test_one_sample_with_one_number_is_not_taken_for_the_loss() -> None:
    ours, plain = twins(lambda: Custom("one", False))
    x, y = data(1)[0], torch.zeros(1, dtype=torch.float64)
    with poptorch.trainingModel(ours, None, torch.optim.SGD(ours.parameters(), lr=0.1)) as model:
        loss, output = model(x, y)
    assert (loss.shape, output.shape) == ((), (1, 1))
    plain.loss(x, y).backward()  # type: ignore[operator]
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same_state(ours, plain)


@pytest.mark.parametrize(
    ("how", "message"),
    [("none", "Couldn't find a loss in graph"), ("two", "Multiple independent losses found in graph")],
)
def test_ambiguous_losses_are_refused(how: str, message: str) -> None:
    ours, _ = twins(lambda: Custom(how, False))
    x, y = data(4)
    with poptorch.trainingModel(ours) as model, pytest.raises(poptorch.Error, match=message):
        model(x, y.double())


def test_reductions_of_identity_loss() -> None:
    x = torch.tensor([1.0, 2.0, 6.0])
    assert poptorch.identity_loss(x, "mean") == 3 == poptorch.identity_loss(x, 1)
    assert poptorch.identity_loss(x, "sum") == 9 == poptorch.identity_loss(x, 0)
    assert torch.equal(poptorch.identity_loss(x, "none"), x)
    with pytest.raises(AssertionError, match="Unsupported reduction type"):
        poptorch.identity_loss(x, "max")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("off_chip", ["", "Optimizer", "Optimizer Weight"])
def test_on_a_gpu(off_chip: str) -> None:
    ours, plain = twins()
    opts = options(STAGES, accumulation=7, iterations=2).outputMode(poptorch.OutputMode.All)
    for what in off_chip.split():
        place = poptorch.TensorLocationSettings().useOnChipStorage(False)
        getattr(opts.TensorLocations, f"set{what}Location")(place)
    optimizer = poptorch.optim.AdamW(ours.parameters(), lr=0.05)
    expected = torch.optim.AdamW(plain.parameters(), lr=0.05)
    with poptorch.trainingModel(ours, opts, optimizer) as model:
        for call in range(3):
            batch = data(28, seed=call)
            micro = plain_call(plain, expected, batch, iterations=2, accumulation=7)
            output, losses = model(*batch)
            assert output.device.type == losses.device.type == "cpu"
            torch.testing.assert_close(losses, torch.stack([loss for _, loss in micro]))
        assert next(ours.parameters()).is_cuda == ("Weight" not in off_chip)
        inference = opts.clone().deviceIterations(4)
        inference.Training.gradientAccumulation(1)
        x, _ = data(8)
        ours.eval()
        plain.eval()
        torch.testing.assert_close(poptorch.inferenceModel(ours, inference)(x), plain(x).detach())
        model.copyWeightsToHost()
        torch.testing.assert_close(ours(x), plain(x))
        model(*data(28))
    assert next(ours.parameters()).device.type == "cpu"
