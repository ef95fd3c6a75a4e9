"""``penstock demo``: the MNIST network as a pipeline of four stages, beside the plain model on the same data."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from penstock.data import mnist
from penstock.data.mnist import Digits
from penstock.demo.compare import compare
from penstock.demo.network import network
from penstock.demo.processes import ProcessesRun
from penstock.demo.runs import PipelineRun, PlainRun, Settings, plan_of, schedules_of
from penstock.draw import print_schedule, print_text
from penstock.errors import PenstockError, ScheduleError
from penstock.schedule.simulate import Costs, Simulation, simulate
from penstock.schedule.source import ScheduleSource
from penstock.screen import screen

__all__ = ["configure", "run"]

_EXAMPLES = """\
examples:
  penstock demo                        1f1b, four ranks, a thread for each
  penstock demo --schedule zbv         four stages on a V over two ranks
  penstock demo --processes            a process for each rank, over torch.distributed
  penstock demo --strategy sharded     one micro-batch at a time: to debug a model
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("--epochs", type=_whole, default=10, metavar="N", help="how often to go over the data (default 10)")
    add("--batch-size", type=_whole, default=80, metavar="N", help="samples of a step (default 80)")
    add("--microbatches", type=_whole, default=8, metavar="N", help="what a step is cut into (default 8)")
    add("--test-batch-size", type=_whole, default=100, metavar="N", help="samples at a time in the test (default 100)")
    add("--learning-rate", type=_rate, default=1e-3, metavar="X", help="of AdamW, at most 1 (default 0.001)")
    add(
        "--strategy",
        choices=("pipelined", "sharded"),
        default="pipelined",
        help="pipelined: by the schedule (default); sharded: one micro-batch at a time, nothing overlaps",
    )
    add("--schedule", metavar="NAME", help="who works on what, when (default 1f1b; see 'penstock schedule --list')")
    add("--processes", action="store_true", help="a process for each rank, instead of a thread")
    add("--data", metavar="DIR", help="where MNIST's four files are (default: the extract in the package)")
    add("--seed", type=_seed, default=0, metavar="N", help="of the weights and the order of the data (default 0)")
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Do what ``args`` say."""
    settings = _settings(args)
    train, test = _digits(args, settings)
    plan = plan_of(network(settings.seed))
    source = _source(args, settings)
    simulation = _simulation(source)
    print_text(f"The plan\n\n{plan.placed(source.placement, ['cpu'] * plan.num_stages)}\n\nThe schedule\n", sys.stdout)
    print_schedule(simulation)
    steps_per_epoch = -(-len(train) // settings.batch_size)
    print_text(
        f"\nPipeline and plain model, on {len(train):,} digits from the same weights, in double precision\n", sys.stdout
    )
    with _one_thread(), closing(_pipeline(args, settings, source)) as pipeline:
        plain = PlainRun(settings)
        with screen() as shown:
            difference = compare(pipeline.steps(train), plain.steps(train), settings.epochs, steps_per_epoch, shown)
        accuracy, expected = pipeline.accuracy(test), plain.accuracy(test)
    print_text(f"\ntest accuracy: pipeline {accuracy:.1%}, plain {expected:.1%}\n", sys.stdout)
    if accuracy != expected:
        raise PenstockError(f"{accuracy:.2%} of the test digits are right as a pipeline, but {expected:.2%} plain")
    _conclude(args, simulation, settings.epochs * steps_per_epoch, difference)
    return 0


def _settings(args: argparse.Namespace) -> Settings:
    if args.strategy == "sharded" and args.schedule is not None:
        args.usage_error("--strategy sharded is a schedule itself: leave out --schedule")
    return Settings(
        epochs=args.epochs,
        batch_size=args.batch_size,
        test_batch_size=args.test_batch_size,
        learning_rate=args.learning_rate,
        schedule="sharded" if args.strategy == "sharded" else args.schedule or "1f1b",
        microbatches=args.microbatches,
        seed=args.seed,
        data=args.data,
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


def _source(args: argparse.Namespace, settings: Settings) -> ScheduleSource:
    try:
        source = schedules_of(settings)
    except ScheduleError as error:
        args.usage_error(f"--schedule: {error}")
    if not source.training(1).trains:
        args.usage_error(f"--schedule: {source.name!r} has no backward, and so does not train")
    return source


def _simulation(source: ScheduleSource) -> Simulation:
    schedule = source.training(source.microbatches)
    return simulate(schedule, Costs.per_rank(v=schedule.num_stages // schedule.num_ranks))


def _pipeline(args: argparse.Namespace, settings: Settings, source: ScheduleSource) -> PipelineRun | ProcessesRun:
    if args.processes:
        return ProcessesRun(settings, source.ranks, source.placement[-1])
    return PipelineRun(settings)


def _conclude(args: argparse.Namespace, simulation: Simulation, steps: int, difference: float) -> None:
    """What happened, in three lines."""
    schedule = simulation.schedule
    workers = "processes" if args.processes else "threads"
    how_many = f"{steps:,} step{'s' * (steps > 1)}"
    parts = f"{schedule.num_microbatches} micro-batch{'es' * (schedule.num_microbatches > 1)}"
    print_text(
        f"{schedule.num_stages} stages on {schedule.num_ranks} {workers} trained {how_many} of {parts} by "
        f"{schedule.name}.\n"
        f"Loss and gradient norm were the plain model's at every step, but for rounding ({difference:.0e}).\n"
        f"The bubble of {schedule.name} is {simulation.bubble:.1%} with even stages: "
        f"'penstock schedule --list' has others to try.",
        sys.stdout,
    )


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
