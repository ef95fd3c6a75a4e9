"""``penstock demo``: the MNIST network as a pipeline of four stages, beside the plain model on the same data."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from penstock.cli import UsageError, complete_schedule, integer, unwritable
from penstock.data import mnist
from penstock.data.mnist import Digits
from penstock.demo.compare import compare
from penstock.demo.debug import details
from penstock.demo.network import network
from penstock.demo.processes import ProcessesRun
from penstock.demo.report import Finished, report
from penstock.demo.runs import (
    PERFETTO,
    TRACE,
    PipelineRun,
    PlainRun,
    Settings,
    device_of,
    plan_of,
    schedules_of,
)
from penstock.errors import PenstockError, ScheduleError
from penstock.profile.trace import Trace
from penstock.progress_ui import progress_ui
from penstock.schedule.provider import ScheduleProvider
from penstock.schedule.simulate import Costs, Simulation, simulate
from penstock.train.launch import usable_cores
from penstock.viz import print_schedule, print_text

__all__ = ["app"]

_EXAMPLES = """\
examples:
  penstock demo                        1f1b, four ranks, a thread for each
  penstock demo --schedule zbv         four stages on a V over two ranks
  penstock demo --processes            a process for each rank, over torch.distributed
  penstock demo --strategy sharded     one micro-batch at a time: to debug a model
  penstock demo --stages 2 --debug     two stages, with shapes and orders
  penstock demo --profile              with a trace of some steps: ps.Trace.load reads profile/trace.json, and
                                       https://ui.perfetto.dev shows profile/perfetto.json
"""


def _rate(text: str) -> float:
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
    epochs: Annotated[int, typer.Option(parser=integer(1), metavar="N", help="Passes over the data.")] = 10,
    batch_size: Annotated[int, typer.Option(parser=integer(1), metavar="N", help="Samples of a step.")] = 80,
    microbatches: Annotated[int, typer.Option(parser=integer(1), metavar="N", help="Micro-batches of a step.")] = 8,
    device_iterations: Annotated[
        int,
        typer.Option(parser=integer(1), metavar="N", help="Steps of a call: their results arrive together."),
    ] = 1,
    test_batch_size: Annotated[
        int, typer.Option(parser=integer(1), metavar="N", help="Samples at a time in the test.")
    ] = 100,
    learning_rate: Annotated[float, typer.Option(parser=_rate, metavar="X", help="Of AdamW, at most 1.")] = 1e-3,
    stages: Annotated[Literal[1, 2, 3, 4], typer.Option(help="Stages of the network.")] = 4,
    strategy: Annotated[
        Literal["pipelined", "sharded"],
        typer.Option(help="pipelined: by the schedule; sharded: one micro-batch at a time, nothing overlaps."),
    ] = "pipelined",
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEDULE",
            autocompletion=complete_schedule,
            help="The order of work (default: 1f1b; see 'penstock schedule --list').",
        ),
    ] = None,
    processes: Annotated[bool, typer.Option("--processes", help="A process for each rank, not a thread.")] = False,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the stages are.")] = "cpu",
    offload_optimiser: Annotated[
        bool, typer.Option("--offload-optimiser", help="Keep the optimiser's state on the host: for --device cuda.")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Record some steps, and explain their time.")] = False,
    report: Annotated[str, typer.Option(metavar="FILE", help="The page to write.")] = "penstock-demo.html",
    profile_dir: Annotated[str, typer.Option(metavar="DIR", help=f"For {TRACE} and {PERFETTO}.")] = "profile",
    debug: Annotated[
        bool, typer.Option("--debug", help="Show shapes and orders before, and progress after each call.")
    ] = False,
    data: Annotated[
        str | None, typer.Option(metavar="DIR", help="MNIST's four files (default: the extract in the package).")
    ] = None,
    seed: Annotated[
        int, typer.Option(parser=integer(0), metavar="N", help="Of the weights and the order of the data.")
    ] = 0,
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
            epochs=epochs,
            batch_size=batch_size,
            test_batch_size=test_batch_size,
            learning_rate=learning_rate,
            schedule="sharded" if strategy == "sharded" else schedule or "1f1b",
            microbatches=microbatches,
            seed=seed,
            data=data,
            stages=stages,
            device_iterations=device_iterations,
            device=device,
            offload=offload_optimiser,
            profile=folder,
        )
        _train(settings, processes=processes, debug=debug, profile=profile, page=report)


def _train(settings: Settings, *, processes: bool, debug: bool, profile: bool, page: str) -> None:
    train, test = _digits(settings)
    source = _source(settings)
    simulation = _simulation(source)
    plan = plan_of(network(settings.seed), settings.stages)
    plan = plan.placed(source.placement, [device_of(settings, rank) for rank in source.placement])
    print_text(f"The plan\n\n{plan}\n\nThe schedule\n", sys.stdout)
    print_schedule(simulation)
    if debug:
        batch, _ = next(settings.batches(train))
        microbatch = batch[: -(-len(batch) // settings.microbatches)]
        print_text(f"\n{details(plan, simulation.schedule, microbatch)}", sys.stdout)
    steps_per_epoch = -(-len(train) // settings.batch_size)
    print_text(
        f"\nPipeline and plain model, on {len(train):,} digits from the same weights, in double precision\n", sys.stdout
    )
    with _one_thread(), closing(_pipeline(processes, settings, source)) as pipeline:
        plain = PlainRun(settings)
        told_every = settings.device_iterations if debug else None
        with progress_ui() as shown:
            comparison = compare(
                pipeline.steps(train), plain.steps(train), settings.epochs, steps_per_epoch, shown, told_every
            )
        accuracy, expected = pipeline.accuracy(test), plain.accuracy(test)
    print_text(f"\ntest accuracy: pipeline {accuracy:.1%}, plain {expected:.1%}\n", sys.stdout)
    if accuracy != expected:
        raise PenstockError(f"{accuracy:.2%} of the test digits are right as a pipeline, but {expected:.2%} plain")
    steps = settings.epochs * steps_per_epoch
    finished = Finished(settings, plan, simulation, comparison, steps, accuracy, processes)
    if profile:
        print_text(f"{Trace.load(finished.trace)}\n", sys.stdout)
    _conclude(finished, report(finished, page))


def _digits(settings: Settings) -> tuple[Digits, Digits]:
    try:
        train, test = mnist.load(settings.data)
    except PenstockError as error:
        raise UsageError(f"--data: {error}") from None
    samples = min(settings.batch_size, len(train))
    if settings.microbatches > samples:
        raise UsageError(f"--microbatches {settings.microbatches} is too many: a step has {samples} samples")
    return train, test


def _source(settings: Settings) -> ScheduleProvider:
    try:
        source = schedules_of(settings)
    except ScheduleError as error:
        raise UsageError(f"--schedule: {error}") from None
    if not source.training(1).trains:
        raise UsageError(f"--schedule: {source.name!r} has no backward, and so does not train")
    return source


def _simulation(source: ScheduleProvider) -> Simulation:
    schedule = source.training(source.microbatches)
    return simulate(schedule, Costs.per_rank(v=schedule.num_stages // schedule.num_ranks))


def _pipeline(processes: bool, settings: Settings, source: ScheduleProvider) -> PipelineRun | ProcessesRun:
    if processes:
        return ProcessesRun(settings, source.ranks, source.placement[-1])
    return PipelineRun(settings)


def _conclude(finished: Finished, page: Path) -> None:
    """What happened, and where the report is, in three lines."""
    schedule, settings = finished.simulation.schedule, finished.settings
    workers = _count(schedule.num_ranks, "process" if finished.processes else "thread")
    offloaded = ", with the optimiser's state on the host" if settings.offload else ""
    measured = finished.comparison.bubble
    bubble = f"{finished.simulation.bubble:.1%} with even stages"
    if measured is not None:
        cores = usable_cores()
        bubble += f", {measured:.1%} as measured" + f" on {_count(cores, 'core')}" * (cores < schedule.num_ranks)
    print_text(
        f"{_count(schedule.num_stages, 'stage')} on {workers} trained {_count(finished.steps, 'step')} of "
        f"{_count(schedule.num_microbatches, 'micro-batch')} by {schedule.name}{offloaded}.\n"
        "Loss and gradient norm were the plain model's at every step, but for rounding "
        f"({finished.comparison.difference:.0e}).\n"
        f"The bubble of {schedule.name} is {bubble}. The report is {page}.",
        sys.stdout,
    )


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number:,} {noun}{plural if number != 1 else ''}"


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for each operator: pipeline and plain model do the same sums, the same on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
