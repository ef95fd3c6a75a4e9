"""``penstock demo``: the MNIST network as a pipeline of four stages, beside the plain model on the same data."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from penstock.cli.arguments import unwritable
from penstock.data import mnist
from penstock.data.mnist import Digits
from penstock.demo.compare import compare
from penstock.demo.debug import details
from penstock.demo.network import network
from penstock.demo.processes import ProcessesRun
from penstock.demo.report import Finished, report
from penstock.demo.runs import (
    PERFETTO,
    STAGES,
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

__all__ = ["configure", "run"]

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


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("--epochs", type=_whole, default=10, metavar="N", help="how often to go over the data (default 10)")
    add("--batch-size", type=_whole, default=80, metavar="N", help="samples of a step (default 80)")
    add("--microbatches", type=_whole, default=8, metavar="N", help="what a step is cut into (default 8)")
    add(
        "--device-iterations",
        type=_whole,
        default=1,
        metavar="N",
        help="steps of a call: their results arrive, and are shown, together (default 1)",
    )
    add("--test-batch-size", type=_whole, default=100, metavar="N", help="samples at a time in the test (default 100)")
    add("--learning-rate", type=_rate, default=1e-3, metavar="X", help="of AdamW, at most 1 (default 0.001)")
    add("--stages", type=int, choices=STAGES, default=STAGES[-1], help="what the network is cut into (default 4)")
    add(
        "--strategy",
        choices=("pipelined", "sharded"),
        default="pipelined",
        help="pipelined: by the schedule (default); sharded: one micro-batch at a time, nothing overlaps",
    )
    add("--schedule", metavar="SCHEDULE", help="who works on what, when (default 1f1b; see 'penstock schedule --list')")
    add("--processes", action="store_true", help="a process for each rank, instead of a thread")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the stages are (default cpu)")
    add("--offload-optimiser", action="store_true", help="keep the optimiser's state on the host: for --device cuda")
    add("--profile", action="store_true", help="record some steps, and tell what their time went into")
    add("--report", default="penstock-demo.html", metavar="FILE", help="the page to write (default penstock-demo.html)")
    add("--profile-dir", default="profile", metavar="DIR", help=f"for {TRACE} and {PERFETTO} (default profile)")
    add("--debug", action="store_true", help="tell shapes and orders before, and how it goes after each call")
    add("--data", metavar="DIR", help="where MNIST's four files are (default: the extract in the package)")
    add("--seed", type=_seed, default=0, metavar="N", help="of the weights and the order of the data (default 0)")
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Do what ``args`` say."""
    if args.profile:
        return _train(args, args.profile_dir)
    with tempfile.TemporaryDirectory() as folder:  # for a trace that nobody has asked for but the report
        return _train(args, folder)


def _train(args: argparse.Namespace, folder: str) -> int:
    settings = _settings(args, folder)
    train, test = _digits(args, settings)
    source = _source(args, settings)
    simulation = _simulation(source)
    plan = plan_of(network(settings.seed), settings.stages)
    plan = plan.placed(source.placement, [device_of(settings, rank) for rank in source.placement])
    print_text(f"The plan\n\n{plan}\n\nThe schedule\n", sys.stdout)
    print_schedule(simulation)
    if args.debug:
        batch, _ = next(settings.batches(train))
        microbatch = batch[: -(-len(batch) // settings.microbatches)]
        print_text(f"\n{details(plan, simulation.schedule, microbatch)}", sys.stdout)
    steps_per_epoch = -(-len(train) // settings.batch_size)
    print_text(
        f"\nPipeline and plain model, on {len(train):,} digits from the same weights, in double precision\n", sys.stdout
    )
    with _one_thread(), closing(_pipeline(args, settings, source)) as pipeline:
        plain = PlainRun(settings)
        told_every = settings.device_iterations if args.debug else None
        with progress_ui() as shown:
            comparison = compare(
                pipeline.steps(train), plain.steps(train), settings.epochs, steps_per_epoch, shown, told_every
            )
        accuracy, expected = pipeline.accuracy(test), plain.accuracy(test)
    print_text(f"\ntest accuracy: pipeline {accuracy:.1%}, plain {expected:.1%}\n", sys.stdout)
    if accuracy != expected:
        raise PenstockError(f"{accuracy:.2%} of the test digits are right as a pipeline, but {expected:.2%} plain")
    steps = settings.epochs * steps_per_epoch
    finished = Finished(settings, plan, simulation, comparison, steps, accuracy, args.processes)
    if args.profile:
        print_text(f"{Trace.load(finished.trace)}\n", sys.stdout)
    _conclude(finished, report(finished, args.report))
    return 0


def _settings(args: argparse.Namespace, folder: str) -> Settings:
    if args.strategy == "sharded" and args.schedule is not None:
        args.usage_error("--strategy sharded is a schedule itself: leave out --schedule")
    if args.device == "cuda" and not torch.cuda.is_available():
        args.usage_error("--device cuda: there is no GPU here")
    for option, place in (("--profile-dir", Path(folder)), ("--report", Path(args.report).parent)):
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            args.usage_error(f"{option}: cannot write to {str(place)!r}: {error.strerror}")
    if reason := unwritable(args.report):
        args.usage_error(f"--report: cannot write {args.report!r}: {reason}")
    return Settings(
        epochs=args.epochs,
        batch_size=args.batch_size,
        test_batch_size=args.test_batch_size,
        learning_rate=args.learning_rate,
        schedule="sharded" if args.strategy == "sharded" else args.schedule or "1f1b",
        microbatches=args.microbatches,
        seed=args.seed,
        data=args.data,
        stages=args.stages,
        device_iterations=args.device_iterations,
        device=args.device,
        offload=args.offload_optimiser,
        profile=folder,
    )


def _digits(args: argparse.Namespace, settings: Settings) -> tuple[Digits, Digits]:
    try:
        train, test = mnist.load(settings.data)
    except PenstockError as error:
        args.usage_error(f"--data: {error}")
    samples = min(settings.batch_size, len(train))
    if settings.microbatches > samples:
        args.usage_error(f"--microbatches {settings.microbatches} is too many: a step has {samples} samples")
    return train, test


def _source(args: argparse.Namespace, settings: Settings) -> ScheduleProvider:
    try:
        source = schedules_of(settings)
    except ScheduleError as error:
        args.usage_error(f"--schedule: {error}")
    if not source.training(1).trains:
        args.usage_error(f"--schedule: {source.name!r} has no backward, and so does not train")
    return source


def _simulation(source: ScheduleProvider) -> Simulation:
    schedule = source.training(source.microbatches)
    return simulate(schedule, Costs.per_rank(v=schedule.num_stages // schedule.num_ranks))


def _pipeline(args: argparse.Namespace, settings: Settings, source: ScheduleProvider) -> PipelineRun | ProcessesRun:
    if args.processes:
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


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and at most 1")
    return rate
