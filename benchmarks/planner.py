"""(j) The planner: gain of its plans over torch's best schedule, and accuracy of its predictions.

*8B-like*: 32 equal layers, an embedding of 0.13 and a head of 2.4 of them, on 8 gloo ranks, 16 micro-batches, with
stages that sleep (see ``timed_stages``). torch's schedules have equally many layers in each stage; the planner cuts
between layers, or in their middle, and searches a schedule within the memory of 1F1B on the even cut. The simulated
case has a latency of 0.05 units; the measured one has gloo's.

*Uneven*: models of random layers, planned for straight, looped and V placement, and measured the same way.

*Transformer*: the model of ``transformer`` with two ranks on two cores: measured, planned and run by ``ps.plan``, five
times; with the peak bytes of each rank, measured with ``memory_tracker``.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

import penstock as ps
from benchmarks.common import interleave_one_at_a_time, medians, spawn, time_on_all_ranks
from benchmarks.memory_tracker import MemoryTracker
from benchmarks.report import check, table
from benchmarks.timed_stages import TimedStage, loss_fn
from benchmarks.transformer import SIZES, build_model
from benchmarks.transformer import loss_fn as token_loss
from penstock.profile.costs import Crossing, LayerCosts, Link, ModelCosts
from penstock.profile.planner.cuts import Ranks, Segments, stage_costs
from penstock.profile.planner.joint import JointResult, joint_search
from penstock.schedule import Schedule, build, simulate

__all__ = ["run", "show"]

RANKS, MICROBATCHES = 8, 16
UNIT = 0.02  # seconds of F, I and W each, for four layers
HOP = 0.0003  # seconds of a message between two processes here
PAPER = {"layers": 65.0, "half layers": 60.5}  # upper bound; torch's best takes 80.7
THEIRS: list[Any] = [Schedule1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble]


def like_8b(halves: bool, unit: float, latency: float) -> Segments:
    """Costs of the model; four layers take ``unit`` for each of F, I and W, and 1 unit of memory."""
    parts = 2 if halves else 1

    def one(name: str, layers: float, kept: float) -> LayerCosts:
        work = layers * unit / 4
        return LayerCosts(name, work, work, work, work, kept, 0.0, 0.0, 0.0)

    inner = [one(f"layer {i / parts:g}", 1 / parts, 0.25 / parts) for i in range(32 * parts)]
    return _segments([one("embedding", 0.13, 0.0), *inner, one("head", 2.4, 0.0)], latency)


def uneven(seed: int, unit: float) -> Segments:
    """A model of 24 to 40 different layers."""
    of = random.Random(seed)

    def one(i: int) -> LayerCosts:
        work = unit / 4 * of.uniform(0.3, 1.7)
        return LayerCosts(f"layer {i}", work, work, work, work, 0.25, 0.0, 0.0, 0.0)

    return _segments([one(i) for i in range(of.randint(24, 40))], HOP)


def _segments(layers: Sequence[LayerCosts], latency: float) -> Segments:
    crossings = tuple(Crossing(i, i + 1, 0.0) for i in range(len(layers) - 1))
    return Segments(ModelCosts(tuple(layers), crossings, link=Link(latency)))


def planned(segments: Segments, shape: str, v: int, seconds: float, memory: float = 8.0) -> JointResult:
    ranks = Ranks((1.0,) * RANKS, (memory,) * RANKS, (1.0,) * RANKS)
    found = joint_search(segments, ranks, MICROBATCHES, shape=shape, v=v, seconds=seconds)
    assert found is not None
    return found


class TimedPipelines:
    """Pipelines whose stages sleep for the time of their layers."""

    def __init__(self) -> None:
        self.data = torch.zeros(MICROBATCHES, 4)
        self.mesh = ps.Mesh(pipe=RANKS)

    @contextmanager
    def ours(self, chunks: Sequence[float], schedule: Schedule) -> Iterator[Callable[[], float]]:
        plan = ps.split(_model(chunks), balance=[1] * len(chunks))
        options: dict[str, Any] = {"microbatches": MICROBATCHES, "schedule": schedule, "outputs": None}
        with ps.Pipeline(plan, loss_fn, mesh=self.mesh, **options) as pipe:
            yield lambda: time_on_all_ranks(lambda: pipe.step(self.data, self.data))

    @contextmanager
    def theirs(self, kind: Any, chunks: Sequence[float]) -> Iterator[Callable[[], float]]:
        rank, count = dist.get_rank(), len(chunks)
        last = count - 1 - rank if kind is ScheduleZBVZeroBubble else rank + RANKS
        own = [rank] if count == RANKS else [rank, last]
        modules = _model(chunks)
        stages = [PipelineStage(modules[s], s, count, torch.device("cpu")) for s in own]
        schedule = kind(stages[0] if count == RANKS else stages, MICROBATCHES, loss_fn=loss_fn)
        inputs = (self.data,) if 0 in own else ()
        more: dict[str, Any] = {"target": self.data, "losses": []} if count - 1 in own else {}
        yield lambda: time_on_all_ranks(lambda: schedule.step(*inputs, return_outputs=False, **more))


def _model(chunks: Sequence[float]) -> nn.Sequential:
    return nn.Sequential(*(TimedStage(chunk, s == 0) for s, chunk in enumerate(chunks)))


Plans = dict[str, tuple[list[float], Schedule | Any]]


def measure(plans: Plans, rounds: int, repeats: int) -> dict[str, list[float]]:
    """On each rank: seconds per step of every plan."""
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: 1 ns instead of 50 µs
    sleeps = TimedPipelines()
    makers: dict[str, Any] = {}
    for name, (chunks, order) in plans.items():
        ours = isinstance(order, Schedule)
        makers[name] = partial(sleeps.ours, chunks, order) if ours else partial(sleeps.theirs, order, chunks)
    return interleave_one_at_a_time(makers, rounds, repeats=repeats)


def transformer(seconds: float, rounds: int) -> dict[str, Any]:
    """On both ranks: predicted and measured seconds of a step."""
    dim, tokens, batch = SIZES["d=256"]
    model = build_model(dim)
    data = torch.randint(64, (batch * 8, tokens + 1))
    x, y = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    mesh = ps.Mesh(pipe=2)
    found = ps.plan(
        model, x[:batch], mesh=mesh, batch=len(x), microbatches=8, loss_fn=token_loss, targets=y[:batch],
        measure_seconds=seconds, seconds=2.0,
    )  # fmt: skip
    with found.pipeline(token_loss, mesh=mesh, outputs=None) as pipe:
        times = [time_on_all_ranks(lambda: pipe.step(x, y)) for _ in range(rounds + 3)][3:]
        memory = _memory(pipe, list(model), lambda: pipe.step(x, y))
    return {
        "plan": str(found.configuration),
        "predicted": found.seconds,
        "measured": times,
        "predicted MiB": found.memory[dist.get_rank()] / 2**20,
        "measured MiB": memory / 2**20,
    }


def _memory(pipe: ps.Pipeline, layers: Sequence[nn.Module], step: Callable[[], object]) -> int:
    """Peak bytes of a rank in a step: permanent ones and those that the step allocates."""
    optimizer = torch.optim.AdamW(pipe.parameters())
    optimizer.step()
    own = [(parameter, parameter.grad, *optimizer.state[parameter].values()) for parameter in pipe.parameters()]
    held = sum(tensor.nbytes for tensors in own for tensor in tensors if isinstance(tensor, torch.Tensor))
    tracker = MemoryTracker(1)
    with tracker.watching([layers]):
        step()
    return held + tracker.most_total


def run(quick: bool = False) -> dict[str, Any]:
    search = 3.0 if quick else 20.0
    rows, targets = [], []
    for what, halves in (("layers", False), ("half layers", True)):
        paper = planned(like_8b(halves, 1.0, 0.05), "loop", 2, search)
        rows.append({"case": "8B-like on paper", "plan": what, "predicted": paper.result.makespan})
        rows[-1] |= {"lower bound": paper.result.lower_bound, "memory": max(paper.memory)}
        targets.append(check(f"8B-like on paper, {what}, units", paper.result.makespan, most=PAPER[what]))
    plans: Plans = {}
    predicted: dict[str, float] = {}

    def add(name: str, found: JointResult) -> None:
        chunks = found.costs.of_stages("f", len(found.cuts))
        plans[name], predicted[name] = (chunks, found.result.schedule), found.result.makespan

    even = like_8b(False, UNIT, HOP)
    ranks = Ranks((1.0,) * RANKS, (8.0,) * RANKS, (1.0,) * RANKS)
    for v in (1, 2):
        cuts = tuple(1 + 32 * (s + 1) // (RANKS * v) for s in range(RANKS * v - 1))
        schedule = build("1f1b" if v == 1 else "zbv", RANKS, MICROBATCHES)
        costs = stage_costs(even, ranks, schedule.placement, (*cuts, 34))
        chunks = costs.of_stages("f", RANKS * v)
        plans[f"ours {schedule.name}, even"] = chunks, schedule
        predicted[f"ours {schedule.name}, even"] = simulate(schedule, costs).makespan
        for kind in THEIRS[:1] if v == 1 else THEIRS[1:]:
            plans[f"torch {kind.__name__.removeprefix('Schedule')}, even"] = chunks, kind
    for what, halves in (("layers", False), ("half layers", True)):
        add(f"planned, {what}", planned(like_8b(halves, UNIT, HOP), "loop", 2, search))
    for seed in range(2 if quick else 6):
        shape, v = (("straight", 1), ("loop", 2), ("v", 2))[seed % 3]
        add(f"uneven {seed}, {shape}", planned(uneven(seed, UNIT), shape, v, 1.0))
    seconds = spawn(measure, RANKS, plans, *((1, 1) if quick else (3, 2)), deadline=900)[0]
    errors = []
    for name, value in medians(seconds).items():
        row: dict[str, Any] = {"case": "8 gloo ranks", "plan": name, "measured": value}
        if name in predicted:
            row |= {"predicted": predicted[name], "measured/predicted": value / predicted[name]}
            errors.append(abs(value / predicted[name] - 1))
        rows.append(row | {"seconds per step": seconds[name]})
    torchs = min(value for name, value in medians(seconds).items() if name.startswith("torch"))
    ours = min(value for name, value in medians(seconds).items() if name.startswith("planned"))
    targets.append(check("torch's best over the planned 8B-like step", torchs / ours, least=1.25))
    targets.append(check("mean error of the predictions, timed stages", mean(errors), most=0.03))
    errors = []
    for _ in range(1 if quick else 5):
        both = spawn(transformer, 2, 1.0 if quick else 5.0, 3 if quick else 15, deadline=300)
        real = both[0]
        value = medians({"": real["measured"]})[""]
        rows.append({"case": "transformer", "plan": real["plan"], "measured": value, "predicted": real["predicted"]})
        rows[-1] |= {"measured/predicted": value / real["predicted"], "seconds per step": real["measured"]}
        for number, rank in enumerate(both):
            rows[-1] |= {f"{what}, rank {number}": rank[what] for what in ("predicted MiB", "measured MiB")}
        errors.append(abs(value / real["predicted"] - 1))
    targets.append(check("mean error of the predictions, transformer", mean(errors), most=0.08))
    settings = {"ranks": RANKS, "microbatches": MICROBATCHES, "unit": UNIT, "hop": HOP, "search seconds": search}
    return {"settings": settings, "rows": rows, "targets": targets}


def show(result: dict[str, Any]) -> None:
    table("(j) plans, predicted and measured: units on paper, else seconds; medians", result["rows"])
