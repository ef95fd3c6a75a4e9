"""``penstock demo``: the MNIST network as a pipeline of stages, beside the plain model on the same data.

Both train step by step from the same weights. Loss, gradient norm and the number of correct digits are compared at
every step; a difference beyond rounding is an error.

    PlainRun      the plain model, in this process       ┐
    PipelineRun   the pipeline of threads, or one rank   ├─ steps() ──▶ compare ──▶ report
    ProcessesRun  the pipeline with a process per rank   ┘
"""

from __future__ import annotations

import math
import queue
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, multiprocessing, nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

import penstock as ps
from penstock.cli import UsageError, complete_schedule, count, flag, unwritable, value
from penstock.data import Digits, load_mnist
from penstock.errors import PenstockError, ScheduleError
from penstock.progress_ui import ProgressUI, progress_ui
from penstock.schedule.provider import ScheduleProvider
from penstock.schedule.simulate import Costs, simulate
from penstock.schedule.text import to_text
from penstock.train.launch import usable_cores
from penstock.viz import count_noun, print_schedule, print_text

_EXAMPLES = """\
Examples:
  penstock demo                      1f1b, four ranks, a thread for each
  penstock demo --schedule zbv       four stages on a V over two ranks
  penstock demo --processes          a process per rank, torch.distributed
  penstock demo --strategy sharded   one micro-batch at a time
  penstock demo --stages 2 --debug   two stages, with shapes and orders
  penstock demo --profile            with a trace of some steps:
                                     ps.Trace.load reads profile/trace.json,
                                     ui.perfetto.dev profile/perfetto.json
"""

# Layers of each stage, for each number of stages. The second layer computes more than all others together.
_BALANCES = {1: [4], 2: [1, 3], 3: [1, 1, 2], 4: [1, 1, 1, 1]}
_TRACED_STEPS = 10
_TRACE, _PERFETTO = "trace.json", "perfetto.json"
_SILENCE_TIMEOUT = 120  # seconds without a message from any rank; starting them on a busy machine takes ten
_EXIT_TIMEOUT = 10.0  # seconds that a rank has to exit by itself


def _learning_rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate <= 1:
        raise typer.BadParameter(f"{text!r} is not a number above 0 and at most 1")
    return rate


app = typer.Typer(add_completion=False)


@app.command(epilog=_EXAMPLES)
def demo(
    epochs: Annotated[int, count("Passes over the data.")] = 10,
    batch_size: Annotated[int, count("Samples of a step.")] = 80,
    microbatches: Annotated[int, count("Micro-batches of a step.")] = 8,
    device_iterations: Annotated[int, count("Steps of a call: their results arrive together.")] = 1,
    test_batch_size: Annotated[int, count("Samples at a time in the test.")] = 100,
    learning_rate: Annotated[float, value("X", "Of AdamW, at most 1.", parser=_learning_rate)] = 1e-3,
    stages: Annotated[Literal[1, 2, 3, 4], typer.Option(help="Stages of the network.")] = 4,
    strategy: Annotated[
        Literal["pipelined", "sharded"],
        typer.Option(help="pipelined: by the schedule; sharded: one micro-batch at a time, nothing overlaps."),
    ] = "pipelined",
    schedule: Annotated[
        str | None,
        typer.Option(help="By default 1f1b; see 'penstock schedule --list'.", autocompletion=complete_schedule),
    ] = None,
    processes: Annotated[bool, flag("--processes", "A process for each rank, not a thread.")] = False,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the stages are.")] = "cpu",
    offload_optimiser: Annotated[bool, flag("--offload-optimiser", "Keep the optimiser's state on the host.")] = False,
    profile: Annotated[bool, flag("--profile", "Record some steps, and explain their time.")] = False,
    report: Annotated[str, value("FILE", "The page to write.")] = "penstock-demo.html",
    profile_dir: Annotated[str, value("DIR", f"For {_TRACE} and {_PERFETTO}.")] = "profile",
    debug: Annotated[bool, flag("--debug", "Show shapes and orders before, and progress after each call.")] = False,
    data: Annotated[str | None, value("DIR", "MNIST's four files (default: the extract in the package).")] = None,
    seed: Annotated[int, count("Of the weights and the order of the data.", minimum=0)] = 0,
) -> None:
    """Train the MNIST network as a pipeline of stages, beside the plain model on the same data."""
    if strategy == "sharded" and schedule is not None:
        raise UsageError("--strategy sharded is a schedule itself: leave out --schedule")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no GPU here")
    with ExitStack() as stack:
        # Without --profile, the trace is for the report only.
        folder = profile_dir if profile else stack.enter_context(tempfile.TemporaryDirectory())
        for option, place in (("--profile-dir", Path(folder)), ("--report", Path(report).parent)):
            try:
                place.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"{option}: cannot write to {str(place)!r}: {error.strerror}") from None
        if reason := unwritable(report):
            raise UsageError(f"--report: cannot write {report!r}: {reason}")
        settings = Settings(
            epochs, batch_size, test_batch_size, learning_rate,
            "sharded" if strategy == "sharded" else schedule or "1f1b",
            microbatches, seed, data, stages, device_iterations, device, offload_optimiser, folder,
        )  # fmt: skip
        _train(settings, processes=processes, debug=debug, profile=profile, page=report)


@dataclass(frozen=True)
class Settings:
    """Options that both runs share. ``data`` is a directory of MNIST's files; None is the extract in the package.

    A call makes ``device_iterations`` steps before their results are read. ``trace_dir`` is the directory for a trace
    of some steps; None: no trace.
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

    def batches(self, digits: Digits) -> Iterator[tuple[Tensor, Tensor]]:
        """The mini-batches of all epochs, in the order of training."""
        return chain.from_iterable(self.calls(digits))

    def calls(self, digits: Digits) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """The mini-batches in groups, one for each call: smaller at the end of an epoch."""
        for epoch in range(self.epochs):
            batches = digits.batches(self.batch_size, shuffle=self.seed + epoch)
            while call := [(x.double(), y) for x, y in islice(batches, self.device_iterations)]:
                yield call

    def plan(self) -> ps.Plan:
        """The network's four layers as stages."""
        return ps.split(network(self.seed), balance=_BALANCES[self.stages])

    def schedules(self) -> ScheduleProvider:
        """The schedules of the pipeline, with its number of ranks and its placement."""
        plan = self.plan()
        edges = [(edge.src, edge.dst) for edge in plan.edges]
        return ScheduleProvider(self.schedule, plan.num_stages, edges, self.microbatches)

    def device_of(self, rank: int) -> str:
        """The device of a rank: GPUs are assigned round-robin."""
        return f"cuda:{rank % torch.cuda.device_count()}" if self.device == "cuda" else self.device

    def accuracy(self, model: Callable[[Tensor], Any], test: Digits) -> float:
        with torch.no_grad():
            batches = test.batches(self.test_batch_size)
            return sum(_num_correct(model(x.double()), y) for x, y in batches) / len(test)


def _conv_layer(channels: int, filters: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, filters, kernel_size=5), nn.MaxPool2d(2), nn.ReLU())


def network(seed: int = 0) -> nn.Sequential:
    """The MNIST network of Graphcore's tutorial on pipelining, with the weights of ``seed``. Keeps torch's RNG state.

    Double precision: in single precision two runs diverge after a few hundred steps, because rounding switches a ReLU
    here and there and training amplifies it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: dict[str, nn.Module] = {
            "conv1": _conv_layer(1, 10),  # [n, 1, 28, 28] -> [n, 10, 12, 12]
            "conv2": _conv_layer(10, 20),  # -> [n, 20, 4, 4]
            "hidden": nn.Sequential(nn.Flatten(), nn.Linear(320, 256), nn.ReLU()),  # -> [n, 256]
            "digit": nn.Linear(256, 10),  # -> [n, 10]
        }
    return nn.Sequential(OrderedDict(layers)).double()


# Training -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainStep:
    """The result of one training step; ``bubble`` is measured, None where it is unknown."""

    loss: float
    grad_norm: float
    correct: int
    samples: int
    seconds: float
    bubble: float | None = None


class PlainRun:
    """The plain model."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = network(settings.seed).to(settings.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate)

    def steps(self, train: Digits) -> Iterator[TrainStep]:
        for x, y in self.settings.batches(train):
            start = time.perf_counter()
            x, y = x.to(self.settings.device), y.to(self.settings.device)
            outputs = self.model(x)
            loss = F.cross_entropy(outputs, y)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), math.inf)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield TrainStep(loss.item(), norm.item(), _num_correct(outputs, y), len(y), time.perf_counter() - start)

    def accuracy(self, test: Digits) -> float:
        return self.settings.accuracy(lambda x: self.model(x.to(self.settings.device)), test)


class PipelineRun:
    """The model as a pipeline of threads or, with a mesh, one rank of a pipeline of processes."""

    def __init__(self, settings: Settings, mesh: ps.Mesh | None = None) -> None:
        self.settings = settings
        self.rank = 0 if mesh is None else mesh.pipe_rank
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

    def steps(self, train: Digits) -> Iterator[TrainStep]:
        """The steps of one call after the other: their results arrive together."""
        with self._traced(only_step=len(train) <= self.settings.batch_size and self.settings.epochs == 1):
            for batches in self.settings.calls(train):
                start = time.perf_counter()
                results = [self._step(x, y) for x, y in batches]
                seconds = (time.perf_counter() - start) / len(batches)
                for (_, y), (result, norm) in zip(batches, results, strict=True):
                    correct = _num_correct(result.outputs, y)
                    yield TrainStep(result.loss.item(), norm.item(), correct, len(y), seconds, result.bubble)

    @contextmanager
    def _traced(self, only_step: bool) -> Iterator[None]:
        """Trace some steps. The first one is slower than the others: it is left out, unless it is the only one."""
        if self.settings.trace_dir is None:
            yield
            return
        with self.pipe.trace(steps=_TRACED_STEPS, skip=0 if only_step else 1, quiet=True) as trace:
            yield
        if self.rank == 0:
            trace.save(Path(self.settings.trace_dir, _TRACE))
            trace.chrome(Path(self.settings.trace_dir, _PERFETTO))

    def _step(self, x: Tensor, y: Tensor) -> tuple[ps.StepResult, Tensor]:
        result = self.pipe.step(x, y)
        norm = self.pipe.clip_grad_norm_(math.inf)  # the norm over all stages; nothing is clipped
        self.optimizer.step()
        self.optimizer.zero_grad()
        return result, norm

    def accuracy(self, test: Digits) -> float:
        return self.settings.accuracy(self.pipe, test)

    def close(self) -> None:
        self.pipe.close()


def _num_correct(outputs: Tensor | None, labels: Tensor) -> int:
    """Only the rank of the last stage has outputs; the others count none."""
    return 0 if outputs is None else int((outputs.argmax(1) == labels.to(outputs.device)).sum())


class ProcessesRun:
    """A pipeline with a process for each rank, started from here. ``last`` is the rank of the last stage.

    Each rank puts ``(rank, message)`` into one queue. A message is a ``TrainStep``, the test accuracy at the end
    (a float, from the last rank), or the text of an error.
    """

    def __init__(self, settings: Settings, ranks: int, last: int) -> None:
        self.last = last
        self._accuracy: float | None = None  # received at the end
        # The store listens on a port that the system chose: no other program can take it in between.
        self.store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self.messages: Any = multiprocessing.get_context("spawn").Queue()
        args = (settings, ranks, self.store.port, last, self.messages)
        self.processes = spawn(_run_rank, args, ranks, join=False, daemon=True)  # type: ignore[no-untyped-call]

    def steps(self, train: Digits) -> Iterator[TrainStep]:
        """The steps of the last rank, each with the mean of the bubbles that the ranks sent last."""
        bubbles: dict[int, float] = {}
        while True:
            rank, message = self._receive()
            if isinstance(message, str):
                raise PenstockError(message)
            if isinstance(message, float):
                self._accuracy = message
                return
            if message.bubble is not None:
                bubbles[rank] = message.bubble
            if rank == self.last:
                yield replace(message, bubble=fmean(bubbles.values()) if bubbles else None)

    def _receive(self) -> tuple[int, Any]:
        """The next message. A process that failed, or a long silence, is an error."""
        for _ in range(_SILENCE_TIMEOUT):
            try:
                rank, message = self.messages.get(timeout=1)
                return rank, message
            except queue.Empty:
                try:
                    self.processes.join(0)
                except (ProcessRaisedException, ProcessExitedException) as error:
                    raise PenstockError(f"rank {error.error_index}: {error}") from None
        raise PenstockError(f"no rank has sent a message for {_SILENCE_TIMEOUT} seconds")

    def accuracy(self, test: Digits) -> float:
        assert self._accuracy is not None
        return self._accuracy

    def close(self) -> None:
        """Wait for the processes if all went well; end those that remain."""
        for process in self.processes.processes:
            process.join(0 if self._accuracy is None else _EXIT_TIMEOUT)
            process.terminate()
            process.join(_EXIT_TIMEOUT)
            process.kill()
            process.join()
        self.messages.close()


def _run_rank(rank: int, settings: Settings, ranks: int, port: int, last: int, messages: Any) -> None:
    """The program of one rank's process."""
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
        timeout = timedelta(seconds=_SILENCE_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
        train, test = load_mnist(settings.data)
        with closing(PipelineRun(settings, ps.Mesh(pipe=ranks, device=settings.device_of(rank)))) as run:
            for step in run.steps(train):
                messages.put((rank, step))
            accuracy = run.accuracy(test)
        if rank == last:
            messages.put((rank, accuracy))
        dist.destroy_process_group()
    except PenstockError as error:
        messages.put((rank, str(error)))


# Comparison ---------------------------------------------------------------------------------------------------

TOLERANCE = 1e-9
"""Largest accepted difference of losses and gradient norms, relative to the plain model's where that is above 1.

Regrouped sums of doubles differ by about 1e-15. A wrong gradient shows at once in its norm, and then in the losses.
"""


@dataclass
class _Totals:
    """Sums over steps."""

    loss_sum: float = 0.0
    correct: int = 0
    samples: int = 0
    seconds: float = 0.0
    measured: float = 0.0  # the seconds whose bubble is known
    idle: float = 0.0

    def add(self, step: TrainStep) -> None:
        if step.bubble is not None:
            self.measured += step.seconds
            self.idle += step.bubble * step.seconds
        self.loss_sum += step.loss * step.samples
        self.correct += step.correct
        self.samples += step.samples
        self.seconds += step.seconds

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples

    @property
    def bubble(self) -> float | None:
        return self.idle / self.measured if self.measured else None

    def __str__(self) -> str:
        accuracy, speed = self.correct / self.samples, self.samples / self.seconds
        bubble = "" if self.bubble is None else f"  bubble {self.bubble:.0%}"
        return f"loss {self.loss:.4f}  accuracy {accuracy:.1%}  {speed:,.0f} samples/s{bubble}"

    def row(self, epoch: int, plain: _Totals, difference: float) -> str:
        bubble = "-" if self.bubble is None else f"{self.bubble:.1%}"
        return (
            f"{epoch:5}  {self.loss:14.9f}  {plain.loss:11.9f}  {difference:10.1e}  "
            f"{self.correct / self.samples:8.1%}  {self.samples / self.seconds:9,.0f}  {bubble:>6}"
        )


def compare(
    pipeline: Iterable[TrainStep],
    plain: Iterable[TrainStep],
    epochs: int,
    steps_per_epoch: int,
    ui: ProgressUI,
    line_every: int | None = None,
) -> tuple[float, float | None]:
    """Take a step of each in turn, to the end. Returns the largest difference and the measured bubble.

    Shows a line for each epoch, and one every ``line_every`` steps. A difference beyond rounding is an error.
    """
    ui.line("epoch  loss: pipeline        plain  difference  accuracy  samples/s  bubble")
    total, overall = _Totals(), 0.0
    for number, (step, plain_step) in enumerate(zip(pipeline, plain, strict=True)):
        epoch, at = number // steps_per_epoch + 1, number % steps_per_epoch + 1
        if at == 1:
            ours, theirs, largest = _Totals(), _Totals(), 0.0
            ui.begin(f"epoch {epoch}/{epochs}", steps_per_epoch)
        for totals, result in ((ours, step), (total, step), (theirs, plain_step)):
            totals.add(result)
        largest = max(largest, _difference(step, plain_step, f"epoch {epoch}, step {at}"))
        ui.advance(str(ours))
        if line_every is not None and (at % line_every == 0 or at == steps_per_epoch):
            ui.line(f"epoch {epoch}, step {at}/{steps_per_epoch}: {ours}")
        if at == steps_per_epoch:
            overall = max(overall, largest)
            ui.line(ours.row(epoch, theirs, largest))
    return overall, total.bubble


def _difference(step: TrainStep, plain: TrainStep, where: str) -> float:
    """The relative difference of two steps, or an error if it is beyond rounding."""
    if not math.isfinite(plain.loss):
        raise PenstockError(f"{where}: the plain model's loss is {plain.loss}. Choose a smaller learning rate")
    largest = 0.0
    for name, a, b in (("loss", step.loss, plain.loss), ("gradient norm", step.grad_norm, plain.grad_norm)):
        difference = abs(a - b) / max(1.0, abs(b))
        if not difference <= TOLERANCE:
            raise PenstockError(
                f"{where}: the {name} is {a!r} as a pipeline, but {b!r} in the plain model. They differ by "
                f"{difference:.1e}, and rounding explains {TOLERANCE:.0e} at most"
            )
        largest = max(largest, difference)
    if step.correct != plain.correct:
        raise PenstockError(
            f"{where}: {step.correct} of {step.samples} digits are right as a pipeline, but {plain.correct} in the "
            "plain model"
        )
    return largest


# The command --------------------------------------------------------------------------------------------------


def _train(settings: Settings, *, processes: bool, debug: bool, profile: bool, page: str) -> None:
    try:
        train, test = load_mnist(settings.data)
    except PenstockError as error:
        raise UsageError(f"--data: {error}") from None
    samples = min(settings.batch_size, len(train))
    if settings.microbatches > samples:
        raise UsageError(f"--microbatches {settings.microbatches} is too many: a step has {samples} samples")
    try:
        schedules = settings.schedules()
    except ScheduleError as error:
        raise UsageError(f"--schedule: {error}") from None
    if not schedules.training(1).trains:
        raise UsageError(f"--schedule: {schedules.name!r} has no backward, and so does not train")

    schedule = schedules.training(settings.microbatches)
    simulation = simulate(schedule, Costs.per_rank(v=schedule.num_stages // schedule.num_ranks))
    plan = settings.plan().placed(schedules.placement, [settings.device_of(rank) for rank in schedules.placement])
    print_text(f"The plan\n\n{plan}\n\nThe schedule\n", sys.stdout)
    print_schedule(simulation)
    if debug:
        batch, _ = next(settings.batches(train))
        microbatch = batch[: -(-len(batch) // settings.microbatches)]
        print_text(_details(plan, schedule, microbatch), sys.stdout)
    print_text(
        f"\nPipeline and plain model, on {len(train):,} digits from the same weights, in double precision\n", sys.stdout
    )
    steps_per_epoch = -(-len(train) // settings.batch_size)
    run = ProcessesRun(settings, schedules.ranks, schedules.placement[-1]) if processes else PipelineRun(settings)
    with _one_thread(), closing(run), progress_ui() as ui:
        plain = PlainRun(settings)
        line_every = settings.device_iterations if debug else None
        difference, bubble = compare(
            run.steps(train), plain.steps(train), settings.epochs, steps_per_epoch, ui, line_every
        )
        accuracy, expected = run.accuracy(test), plain.accuracy(test)
    print_text(f"\ntest accuracy: pipeline {accuracy:.1%}, plain {expected:.1%}\n", sys.stdout)
    if accuracy != expected:
        raise PenstockError(f"{accuracy:.2%} of the test digits are right as a pipeline, but {expected:.2%} plain")
    trace = ps.Trace.load(Path(settings.trace_dir or "", _TRACE))
    if profile:
        print_text(f"{trace}\n", sys.stdout)
    trace.report(page)

    workers = count_noun(schedule.num_ranks, "process" if processes else "thread")
    offloaded = ", with the optimiser's state on the host" if settings.offload else ""
    measured = "" if bubble is None else f", {bubble:.1%} as measured"
    if measured and usable_cores() < schedule.num_ranks:
        measured += f" on {count_noun(usable_cores(), 'core')}"
    print_text(
        f"{count_noun(schedule.num_stages, 'stage')} on {workers} trained "
        f"{count_noun(settings.epochs * steps_per_epoch, 'step')} of "
        f"{count_noun(schedule.num_microbatches, 'micro-batch')} by {schedule.name}{offloaded}.\n"
        f"Loss and gradient norm were the plain model's at every step, but for rounding ({difference:.0e}).\n"
        f"The bubble of {schedule.name} is {simulation.bubble:.1%} with even stages{measured}. The report is {page}.",
        sys.stdout,
    )


def _details(plan: ps.Plan, schedule: ps.Schedule, value: Tensor) -> str:
    """The shapes at each stage, for the micro-batch ``value``, and the order of each rank."""

    def shape(tensor: Tensor) -> str:
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    lines = ["", f"Input and output of each stage, for each of {schedule.num_microbatches} micro-batches", ""]
    with torch.no_grad():
        for index, stage in enumerate(plan.stages):
            before, value = value, plan.stage_module(index)(value)
            where = f"rank {schedule.placement[index]}" + (f" {plan.devices[index]}" if plan.devices else "")
            lines.append(f"stage {index} on {where}: {shape(before)} -> {shape(value)}, by {' '.join(stage.layers)}")
    return "\n".join(
        [*lines, "", "The order of each rank: stage, kind and micro-batch", "", to_text(schedule).rstrip()]
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread per operator, so that pipeline and plain model add in the same order on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
