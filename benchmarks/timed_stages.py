"""(c) Step time over simulated time: stages that sleep, 8 gloo ranks, 16 micro-batches.

A stage sleeps one chunk in F, one in I and one in W, so 8 ranks fit on 2 cores and everything beyond the simulated
makespan (same costs, no communication) is overhead of the executor: posting, waiting, sending, autograd, Python. W is a
separate node beside the path of the input gradient, so that torch's split backward finds it in the graph; it defers its
sleep with ``penstock.hooks.defer_weight_grad``, which takes effect in Penstock only and sleeps at once elsewhere.

A step lasts from a common start on all ranks until the last one is done. The variants are interleaved in one set of
processes, and only one exists at a time. Sleeps end with a short spin, and the kernel's timer slack is off; their
overshoot is measured and shown. torch's schedules are simulated from the orders that torch generates.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import penstock as ps
from benchmarks.common import interleave_one_at_a_time, medians, spawn, time_on_all_ranks
from benchmarks.report import check, table
from penstock.hooks import defer_weight_grad
from penstock.schedule import Costs, Schedule, build, from_csv, simulate

__all__ = ["run", "show"]

RANKS, MICROBATCHES = 8, 16
TARGETS = {0.015: 1.02, 0.005: 1.04}  # measured over simulated, by chunk
SPIN = 40e-6  # seconds
# names, stages per rank
OURS = {
    "1f1b": 1, "gpipe": 1, "interleaved": 2, "looped_bfs": 2, "zb_h1": 1,
    "zb_h2": 1, "zbv": 2, "v_half": 2, "v_min": 2, "dualpipev": 2,
}  # fmt: skip
THEIRS: list[Any] = [Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble]

overshoots: list[float] = []


def sleep_until(since: float, seconds: float) -> None:
    """Sleep until ``seconds`` after ``since``; spin for the last microseconds."""
    end = since + seconds
    time.sleep(max(0.0, end - time.monotonic() - SPIN))
    while (now := time.monotonic()) < end:
        pass
    overshoots.append(now - end)


class InputPath(torch.autograd.Function):
    """Path from the input to the output: sleeps in F, which began at ``since``, and in I."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunk: float, since: float) -> Tensor:
        ctx.chunk = chunk
        y = x.clone()
        sleep_until(since, chunk)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        sleep_until(time.monotonic(), ctx.chunk)
        return g, None, None


class WeightPath(torch.autograd.Function):
    """Path from the parameter to the output: sleeps in W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, chunk: float) -> Tensor:
        ctx.weight, ctx.chunk = weight, chunk
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        weight, chunk = ctx.weight, ctx.chunk

        def work() -> Tensor:
            since = time.monotonic()
            grad = torch.zeros_like(weight)
            sleep_until(since, chunk)
            return grad

        return defer_weight_grad(weight, work), None


class TimedStage(nn.Module):
    """``x + weight`` in a given time: the sleep is shortened by the time of the computation."""

    def __init__(self, chunk: float, first: bool) -> None:
        super().__init__()
        self.chunk, self.first = chunk, first
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        since = time.monotonic()
        if self.first:
            x = x.detach().requires_grad_()  # gives the first stage an I, like all others
        y: Tensor = InputPath.apply(x + WeightPath.apply(self.weight, self.chunk), self.chunk, since)
        return y


def model(stages: int, chunk: float) -> nn.Sequential:
    return nn.Sequential(*(TimedStage(chunk, s == 0) for s in range(stages)))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


class TimedPipelines:
    """State common to all variants on this rank: chunk, data, mesh, and simulated times."""

    def __init__(self, chunk: float) -> None:
        self.chunk = chunk
        self.data = torch.zeros(MICROBATCHES, 4)
        self.mesh = ps.Mesh(pipe=RANKS)
        self.simulated: dict[str, float] = {}

    def simulate(self, name: str, schedule: Schedule) -> None:
        self.simulated[name] = simulate(schedule, Costs(f=self.chunk, i=self.chunk, w=self.chunk)).makespan

    @contextmanager
    def ours(self, name: str, shown: str) -> Iterator[Callable[[], float]]:
        stages = RANKS * OURS[name]
        plan = ps.split(model(stages, self.chunk), balance=[1] * stages)
        pipe = ps.Pipeline(plan, loss_fn, microbatches=MICROBATCHES, schedule=name, mesh=self.mesh, outputs=None)
        self.simulate(shown, pipe.schedule)
        with pipe:
            yield lambda: time_on_all_ranks(lambda: pipe.step(self.data, self.data))

    @contextmanager
    def theirs(self, kind: Any, shown: str) -> Iterator[Callable[[], float]]:
        rank, per_rank = dist.get_rank(), 1 if kind is Schedule1F1B else 2
        count = RANKS * per_rank
        own = [rank] if per_rank == 1 else [rank, count - 1 - rank if kind is ScheduleZBVZeroBubble else rank + RANKS]
        modules = model(count, self.chunk)
        stages = [PipelineStage(modules[s], s, count, torch.device("cpu")) for s in own]
        schedule = kind(stages[0] if per_rank == 1 else stages, MICROBATCHES, loss_fn=loss_fn)
        inputs = (self.data,) if 0 in own else ()
        last: dict[str, Any] = {"target": self.data, "losses": []} if count - 1 in own else {}
        if kind is Schedule1F1B:  # torch's record of its order is wrong on the last rank
            self.simulate(shown, build("1f1b", RANKS, MICROBATCHES))
        else:
            with tempfile.NamedTemporaryFile("r", suffix=".csv") as file:
                schedule._dump_csv(file.name, format="compute_only")
                self.simulate(shown, from_csv(file.read()))
        yield lambda: time_on_all_ranks(lambda: schedule.step(*inputs, return_outputs=False, **last))


def measure(chunk: float, rounds: int, repeats: int) -> dict[str, Any]:
    """On each rank: seconds per step of every variant, simulated seconds, and the overshoot of sleeps."""
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: 1 ns instead of 50 µs
    sleeps = TimedPipelines(chunk)
    makers = {f"ours {name}": partial(sleeps.ours, name, f"ours {name}") for name in OURS}
    for kind in THEIRS:
        shown = f"torch {kind.__name__.removeprefix('Schedule')}"
        makers[shown] = partial(sleeps.theirs, kind, shown)
    seconds = interleave_one_at_a_time(makers, rounds, repeats=repeats)
    ordered = sorted(overshoots)
    late = {"median": median(ordered), "90 %": ordered[len(ordered) * 9 // 10], "most": ordered[-1]}
    return {"seconds": seconds, "simulated": sleeps.simulated, "overshoot": late}


def run(quick: bool = False) -> dict[str, Any]:
    rows, targets, late = [], [], {}
    for chunk, target in TARGETS.items():
        found = spawn(measure, RANKS, chunk, *((1, 1) if quick else (4, 2)), deadline=900)
        seconds, simulated = found[0]["seconds"], found[0]["simulated"]
        for name, value in medians(seconds).items():
            ratio = value / simulated[name]
            row = {"chunk": f"{chunk * 1e3:g} ms", "variant": name, "simulated ms": simulated[name] * 1e3}
            row |= {"measured ms": value * 1e3, "measured/simulated": ratio}
            row["least"] = min(seconds[name]) / simulated[name]
            rows.append(row | {"seconds per step": seconds[name]})
            if name.startswith("ours"):
                targets.append(check(f"{chunk * 1e3:g} ms, {name}, measured over simulated", ratio, most=target))
        late[f"{chunk * 1e3:g} ms"] = {
            key: max(rank["overshoot"][key] for rank in found) * 1e6 for key in found[0]["overshoot"]
        }
    settings = {"ranks": RANKS, "microbatches": MICROBATCHES, "worst rank's overshoot of a sleep, µs": late}
    return {"settings": settings, "rows": rows, "targets": targets}


def show(result: dict[str, Any]) -> None:
    table(f"(c) stages that sleep, {RANKS} gloo ranks, m={MICROBATCHES}, medians", result["rows"])
    for chunk, late in result["settings"]["worst rank's overshoot of a sleep, µs"].items():
        print(f"{chunk}: overshoot of sleeps: " + ", ".join(f"{key} {value:.0f} µs" for key, value in late.items()))
