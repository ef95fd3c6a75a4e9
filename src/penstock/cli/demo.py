"""``penstock demo``: train an MNIST network as a pipeline, and compare it with the plain model on the same data.

Both start with the same weights. Loss, gradient norm and the number of correct digits are compared at every step; a
difference beyond rounding is an error. With ``--processes``, ``penstock run`` starts this module as the program of each
rank: every rank compares, rank 0 prints.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, replace
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import penstock as ps
from penstock.cli import UsageError, complete_schedule, option, unwritable, usage_errors
from penstock.cli.run import run as run_processes
from penstock.data import Digits, load_mnist
from penstock.errors import PenstockError, ScheduleError
from penstock.format import count_noun
from penstock.schedule import Costs, simulate
from penstock.schedule.provider import ScheduleProvider
from penstock.train.launch import usable_cores
from penstock.train.pipeline import StepTotals
from penstock.train.progress import ProgressUI, progress_ui
from penstock.viz import print_schedule

_EXAMPLES = """\
Examples:
  penstock demo                      1f1b, four ranks, one thread each
  penstock demo --schedule zbv       four stages in a V on two ranks
  penstock demo --processes          one process per rank, torch.distributed
  penstock demo --strategy sharded   one micro-batch at a time
  penstock demo --stages 2 --debug   two stages, with shapes and orders
  penstock demo --profile            with a trace of some steps:
                                     ps.Trace.load reads profile/trace.json,
                                     ui.perfetto.dev profile/perfetto.json
"""

# Layers per stage, by the number of stages. The second layer takes longer than all others together.
_BALANCES = {1: [4], 2: [1, 3], 3: [1, 1, 2], 4: [1, 1, 1, 1]}

# Largest accepted difference of losses and gradient norms, relative to the plain model's if that is above 1. Regrouped
# sums of doubles differ by about 1e-15. A wrong gradient changes the norm in the same step, and then the losses.
TOLERANCE = 1e-9

app = typer.Typer(add_completion=False)


@app.command(epilog=_EXAMPLES)
def demo(
    epochs: Annotated[int, option("Passes over the data.", min=1)] = 10,
    batch_size: Annotated[int, option("Samples per step.", min=1)] = 80,
    microbatches: Annotated[int, option("Micro-batches per step.", min=1)] = 8,
    device_iterations: Annotated[int, option("Steps per call; results are read once per call.", min=1)] = 1,
    test_batch_size: Annotated[int, option("Samples per batch in the test.", min=1)] = 100,
    learning_rate: Annotated[float, option("Learning rate of AdamW.", min=1e-9, max=1)] = 1e-3,
    stages: Annotated[Literal[1, 2, 3, 4], option("Number of stages.")] = 4,
    strategy: Annotated[
        Literal["pipelined", "sharded"],
        option("pipelined: with --schedule; sharded: one micro-batch at a time, without overlap."),
    ] = "pipelined",
    schedule: Annotated[
        str | None, option("Default: 1f1b; see 'penstock schedule --list'.", autocompletion=complete_schedule)
    ] = None,
    processes: Annotated[bool, option("Run one process per rank instead of one thread.", "--processes")] = False,
    device: Annotated[Literal["cpu", "cuda"], option("Device of the stages.")] = "cpu",
    offload_optimiser: Annotated[bool, option("Keep the optimiser state on the host.", "--offload-optimiser")] = False,
    profile: Annotated[bool, option("Write a trace of some steps.", "--profile")] = False,
    report: Annotated[str, option("The report page to write.", metavar="FILE")] = "penstock-demo.html",
    profile_dir: Annotated[str, option("Directory of trace.json and perfetto.json.", metavar="DIR")] = "profile",
    debug: Annotated[bool, option("Show shapes and orders first, and progress after each call.", "--debug")] = False,
    data: Annotated[str | None, option("Directory of MNIST's four files (default: an extract).", metavar="DIR")] = None,
    seed: Annotated[int, option("Seed of the weights and of the order of the data.", min=0)] = 0,
) -> int:
    """Train an MNIST network as a pipeline, and compare it with the plain model on the same data."""
    if strategy == "sharded" and schedule is not None:
        raise UsageError("--strategy sharded is a schedule itself: leave out --schedule")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this machine has no GPU")
    if profile:
        with usage_errors(f"--profile-dir: cannot write to {profile_dir!r}", OSError):
            Path(profile_dir).mkdir(parents=True, exist_ok=True)
    if reason := unwritable(report):
        raise UsageError(f"--report: cannot write {report!r}: {reason}")
    name = "sharded" if strategy == "sharded" else schedule or "1f1b"
    settings = Settings(
        epochs, batch_size, test_batch_size, learning_rate, name, microbatches, seed, data, stages,
        device_iterations, device, offload_optimiser, profile_dir if profile else None, report, debug,
    )  # fmt: skip
    with usage_errors("--data", PenstockError):
        samples = min(batch_size, len(load_mnist(data)[0]))
    if microbatches > samples:
        raise UsageError(f"--microbatches {microbatches} is too many: a step has {samples} samples")
    with usage_errors("--schedule", ScheduleError):
        schedules = settings.schedules()
    if not schedules.training(1).trains:
        raise UsageError(f"--schedule: {schedules.name!r} has no backward, and cannot train")
    if processes:
        arguments = [json.dumps(asdict(settings))]
        return run_processes("penstock.cli.demo", schedules.ranks, arguments, cpu=device == "cpu", module=True)
    threads = torch.get_num_threads()
    try:
        train(settings)
    finally:
        torch.set_num_threads(threads)
    return 0


@dataclass(frozen=True)
class Settings:
    """The options of a run. ``data`` is a directory of MNIST files, or None for the extract in the package.

    A call runs ``device_iterations`` steps before it reads their results. ``trace_dir`` is the directory for a trace of
    some steps.
    """

    epochs: int
    batch_size: int
    test_batch_size: int
    learning_rate: float
    schedule: str
    microbatches: int
    seed: int
    data: str | None = None
    stages: int = 4
    device_iterations: int = 1
    device: str = "cpu"
    offload: bool = False
    trace_dir: str | None = None
    report: str = "penstock-demo.html"
    debug: bool = False

    def plan(self) -> ps.Plan:
        """The plan of the network with its four layers."""
        return ps.split(network(self.seed), balance=_BALANCES[self.stages])

    def schedules(self) -> ScheduleProvider:
        """The schedules of the pipeline."""
        plan = self.plan()
        edges = [(edge.src, edge.dst) for edge in plan.edges]
        return ScheduleProvider(self.schedule, plan.num_stages, edges, self.microbatches)

    def device_of(self, rank: int) -> str:
        """The device of a rank: GPUs are assigned round-robin."""
        return f"cuda:{rank % torch.cuda.device_count()}" if self.device == "cuda" else self.device


def network(seed: int = 0) -> nn.Sequential:
    """The MNIST network of Graphcore's tutorial on pipelining, with the weights of ``seed``. Keeps torch's RNG state.

    It is in double precision. In single precision, two runs diverge after a few hundred steps, because rounding changes
    the sign of a ReLU's input now and then, and training amplifies the difference.
    """

    def conv_layer(channels: int, filters: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, filters, kernel_size=5), nn.MaxPool2d(2), nn.ReLU())

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: dict[str, nn.Module] = {
            "conv1": conv_layer(1, 10),  # [n, 1, 28, 28] -> [n, 10, 12, 12]
            "conv2": conv_layer(10, 20),  # -> [n, 20, 4, 4]
            "hidden": nn.Sequential(nn.Flatten(), nn.Linear(320, 256), nn.ReLU()),  # -> [n, 256]
            "digit": nn.Linear(256, 10),  # -> [n, 10]
        }
    return nn.Sequential(OrderedDict(layers)).double()


# Training -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainStep:
    """The result of one training step. Under a mesh, only the rank of the last stage counts correct digits."""

    loss: float
    grad_norm: float
    correct: int | None
    samples: int


class PlainRun:
    def __init__(self, settings: Settings) -> None:
        self.device = settings.device
        self.model = network(settings.seed).to(settings.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate)

    def step(self, x: Tensor, y: Tensor) -> TrainStep:
        x, y = x.to(self.device), y.to(self.device)
        outputs = self.model(x)
        loss = F.cross_entropy(outputs, y)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return TrainStep(loss.item(), norm.item(), _num_correct(outputs, y), len(y))


class PipelineRun:
    """The model as a pipeline of threads or, with a mesh, as one rank of a pipeline of processes."""

    def __init__(self, settings: Settings, mesh: ps.Mesh | None = None) -> None:
        devices = [settings.device_of(rank) for rank in range(settings.schedules().ranks)]
        self.pipe = ps.Pipeline(
            settings.plan(),
            loss_fn=F.cross_entropy,
            microbatches=settings.microbatches,
            schedule=settings.schedule,
            devices=devices if mesh is None else None,
            mesh=mesh,
            offload=ps.Offload(activations=False) if settings.offload else None,
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=settings.learning_rate)
        if settings.offload:
            self.optimizer = self.pipe.offload_optimizer(self.optimizer)

    def call(self, batches: list[tuple[Tensor, Tensor]]) -> list[TrainStep]:
        """Run one step per mini-batch, then read the results of all steps."""
        results = []
        for x, y in batches:
            result = self.pipe.step(x, y)
            norm = self.pipe.clip_grad_norm_(math.inf)  # the norm over all stages, without clipping
            self.optimizer.step()
            self.optimizer.zero_grad()
            results.append((result, norm, y))
        return [
            TrainStep(result.loss.item(), norm.item(), _num_correct(result.outputs, y), len(y))
            for result, norm, y in results
        ]


def _num_correct(outputs: Tensor | None, labels: Tensor) -> int | None:
    return None if outputs is None else int((outputs.argmax(1) == labels.to(outputs.device)).sum())


def difference(step: TrainStep, plain: TrainStep, where: str) -> float:
    """The relative difference of two steps; ``PenstockError`` if it is beyond rounding."""
    if not math.isfinite(plain.loss):
        raise PenstockError(f"{where}: the plain model's loss is {plain.loss}. Choose a smaller learning rate")
    largest = 0.0
    for name, a, b in (("loss", step.loss, plain.loss), ("gradient norm", step.grad_norm, plain.grad_norm)):
        relative = abs(a - b) / max(1.0, abs(b))
        if not relative <= TOLERANCE:
            raise PenstockError(
                f"{where}: the {name} is {a!r} in the pipeline, but {b!r} in the plain model. The difference is "
                f"{relative:.1e}, but rounding explains at most {TOLERANCE:.0e}"
            )
        largest = max(largest, relative)
    if step.correct not in (None, plain.correct):
        raise PenstockError(
            f"{where}: the pipeline classifies {step.correct} of {step.samples} digits correctly, but the plain model "
            f"{plain.correct}"
        )
    return largest


def train(settings: Settings, mesh: ps.Mesh | None = None) -> None:
    """Show plan and schedule, train and test both the pipeline and the plain model, write the report."""
    torch.set_num_threads(1)  # for the same order of summation in pipeline and plain model on every machine
    digits, test = load_mnist(settings.data)
    schedules = settings.schedules()
    schedule = schedules.training(settings.microbatches)
    simulation = simulate(schedule, Costs.per_rank(v=schedule.num_stages // schedule.num_ranks))
    plan = settings.plan().placed(schedules.placement, [settings.device_of(rank) for rank in schedules.placement])
    print(f"The plan\n\n{plan}\n\nThe schedule\n")
    print_schedule(simulation)
    if settings.debug:
        _print_details(plan, schedule, next(digits.batches(settings.batch_size))[0].double())
    print(f"\nPipeline and plain model, on {len(digits):,} digits from the same weights, in double precision\n")
    steps = settings.epochs * -(-len(digits) // settings.batch_size)
    run, plain = PipelineRun(settings, mesh), PlainRun(settings)
    with closing(run.pipe):
        # The first step is slower than the others. It is not recorded, unless it is the only one.
        with run.pipe.trace(steps=10, skip=int(steps > 1), quiet=True) as trace, progress_ui() as ui:
            largest = _compare(settings, run, plain, digits, ui)
        (accuracy,) = _sum_over_ranks(mesh, _accuracy(run.pipe, test, settings))
        expected = _accuracy(plain.model, test, settings, settings.device)
        bubble = _bubble(run, StepTotals())
    print(f"\ntest accuracy: pipeline {accuracy:.1%}, plain {expected:.1%}\n")
    if accuracy != expected:
        raise PenstockError(f"the test accuracy is {accuracy:.2%} in the pipeline, but {expected:.2%} in the plain one")
    if mesh is None or mesh.rank == 0:
        if settings.trace_dir is not None:
            trace.save(Path(settings.trace_dir, "trace.json"))
            trace.chrome(Path(settings.trace_dir, "perfetto.json"))
            print(f"{trace}\n")
        trace.report(settings.report)
    workers = count_noun(schedule.num_ranks, "thread" if mesh is None else "process")
    offloaded = ", with the optimiser's state on the host" if settings.offload else ""
    measured = "" if bubble is None else f", {bubble:.1%} as measured on {count_noun(usable_cores(), 'core')}"
    print(
        f"{count_noun(schedule.num_stages, 'stage')} on {workers} trained {count_noun(steps, 'step')} of "
        f"{count_noun(schedule.num_microbatches, 'micro-batch')} by {schedule.name}{offloaded}.\n"
        f"Loss and gradient norm were the plain model's at every step, but for rounding ({largest:.0e}).\n"
        f"The bubble of {schedule.name} is {simulation.bubble:.1%} with even stages{measured}. "
        f"The report is {settings.report}."
    )


def _compare(settings: Settings, run: PipelineRun, plain: PlainRun, digits: Digits, ui: ProgressUI) -> float:
    """Train both, and return the largest difference. Shows a line per epoch, with ``debug`` also one per call."""
    ui.line("epoch  loss: pipeline        plain  difference  accuracy  samples/s  bubble")
    steps_per_epoch, overall = -(-len(digits) // settings.batch_size), 0.0
    for epoch in range(1, settings.epochs + 1):
        ui.begin(f"epoch {epoch}/{settings.epochs}", steps_per_epoch)
        batches = ((x.double(), y) for x, y in digits.batches(settings.batch_size, shuffle=settings.seed + epoch - 1))
        before = replace(run.pipe.step_totals)
        loss = plain_loss = seconds = largest = 0.0
        at = samples = correct = 0
        while call := list(islice(batches, settings.device_iterations)):
            start = time.perf_counter()
            steps = run.call(call)
            seconds += time.perf_counter() - start
            for (x, y), step in zip(call, steps, strict=True):
                at += 1
                expected = plain.step(x, y)
                largest = max(largest, difference(step, expected, f"epoch {epoch}, step {at}"))
                samples, correct = samples + len(y), correct + (expected.correct or 0)
                loss, plain_loss = loss + step.loss * len(y), plain_loss + expected.loss * len(y)
            accuracy, speed = correct / samples, samples / seconds
            text = f"loss {loss / samples:.4f}  accuracy {accuracy:.1%}  {speed:,.0f} samples/s"
            ui.advance(text, len(call))
            if settings.debug:
                ui.line(f"epoch {epoch}, step {at}/{steps_per_epoch}: {text}")
        bubble = _bubble(run, before)
        ui.line(
            f"{epoch:5}  {loss / samples:14.9f}  {plain_loss / samples:11.9f}  {largest:10.1e}  {accuracy:8.1%}  "
            f"{speed:9,.0f}  {'-' if bubble is None else f'{bubble:.1%}':>6}"
        )
        overall = max(overall, largest)
    return overall


def _accuracy(model: Callable[[Tensor], Any], test: Digits, settings: Settings, device: str = "cpu") -> float:
    """The fraction of correct test digits; 0 on a rank without outputs."""
    with torch.no_grad():
        batches = test.batches(settings.test_batch_size)
        return sum(_num_correct(model(x.double().to(device)), y) or 0 for x, y in batches) / len(test)


def _bubble(run: PipelineRun, since: StepTotals) -> float | None:
    """The measured bubble of all ranks; None if it was not measured."""
    totals = run.pipe.step_totals.since(since)
    idle, measured = _sum_over_ranks(run.pipe.mesh, totals.idle, totals.measured)
    return idle / measured if measured else None


def _sum_over_ranks(mesh: ps.Mesh | None, *numbers: float) -> list[float]:
    sums = torch.tensor(numbers, dtype=torch.double)
    if mesh is not None:
        dist.all_reduce(sums)
    return sums.tolist()


def _print_details(plan: ps.Plan, schedule: ps.Schedule, batch: Tensor) -> None:
    """Print the shapes at each stage, for a micro-batch of ``batch``, and the order of each rank."""

    def shape(tensor: Tensor) -> str:
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    m = schedule.num_microbatches
    print(f"\nInput and output of each stage, for each of {m} micro-batches\n")
    value = batch[: -(-len(batch) // m)]
    with torch.no_grad():
        for index, stage in enumerate(plan.stages):
            before, value = value, plan.stage_module(index)(value)
            where = f"rank {schedule.placement[index]}" + (f" {plan.devices[index]}" if plan.devices else "")
            print(f"stage {index} on {where}: {shape(before)} -> {shape(value)}, by {' '.join(stage.layers)}")
    print(f"\nThe order of each rank: stage, kind and micro-batch\n\n{str(schedule).rstrip()}")


if __name__ == "__main__":  # a process of --processes
    options = Settings(**json.loads(sys.argv[1]))
    dist.init_process_group("gloo")
    mesh = ps.Mesh(pipe=dist.get_world_size(), device=options.device_of(dist.get_rank()))
    with nullcontext() if mesh.rank == 0 else redirect_stdout(StringIO()):
        train(options, mesh)
    dist.destroy_process_group()
