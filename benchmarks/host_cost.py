"""(a) Host time per action, without communication or computation.

One of 4 ranks runs its part of a step of 32 micro-batches. It uses torch's fake process groups, on which sends and
receives complete at once, and each of its stages is one small linear layer: the time is the cost of the executor, plus
the module's own forward and backward, which is measured separately.

The actions are a receive, a forward, a send, a receive, a backward (or I and W) and a send: 6, or 7, per stage and
micro-batch. The time per action is that of the whole step over their number, so it includes the module's own time;
"beyond the module" excludes the time of a bare forward and backward in autograd's engine. A run with a trace shows the
cost of recording an action. Steps of Penstock and torch.distributed.pipelining are interleaved, one each per round;
medians and minima over the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common import interleave, medians, spawn
from benchmarks.report import check, table
from penstock.engine.channel.base import Channel, Endpoint
from penstock.engine.channel.process import BackwardChannel, ForwardChannel
from penstock.engine.message import MessageMeta, TensorMeta
from penstock.engine.recorder import StepRecorder
from penstock.engine.runner import Bindings, PipelineIO, Runner, compile_program
from penstock.engine.stage import StageEngine, make_slots
from penstock.schedule import Schedule, build
from penstock.schedule.lower import lower
from penstock.schedule.schedule import edges_of

__all__ = ["run", "show"]

RANKS, MICROBATCHES, RANK = 4, 32, 1
WIDTH, BATCH = 8, 4
BARE = "bare, autograd's engine"
TRACED = ", traced"
TARGET = 10.0  # µs per action
CPU = torch.device("cpu")

# Penstock's schedule, its stages per rank, and the equivalent schedule of torch
PAIRS: list[tuple[str, int, Any]] = [
    ("1f1b", 1, Schedule1F1B),
    ("interleaved", 2, ScheduleInterleaved1F1B),
    ("zb_h1", 1, None),
    ("zbv", 2, ScheduleZBVZeroBubble),
    ("interleaved zero bubble", 2, ScheduleInterleavedZeroBubble),
]


def small_module() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def our_runner(schedule: Schedule, rank: int = RANK) -> Runner:
    """The program of one rank, compiled as by ``DistributedExecutor``, over fake groups."""
    edges = edges_of(schedule)
    program = lower(schedule, edges)[rank]
    stages = {s: StageEngine(s, small_module(), CPU) for s in schedule.stages_of(rank)}
    meta = MessageMeta((TensorMeta((BATCH, WIDTH), torch.float32),), None, (0,))
    forward: dict[tuple[int, int], Channel] = {}
    backward: dict[tuple[int, int], Channel] = {}
    endpoints: dict[tuple[int, int, str], Endpoint] = {}

    def endpoint(sender: int, receiver: int, direction: str) -> Endpoint:
        key = (sender, receiver, direction)
        if key not in endpoints:
            group = FakeProcessGroup._create_internal(0 if rank == sender else 1, 2, FakeProcessGroup.Options())
            endpoints[key] = Endpoint(group, receiver if rank == sender else sender, CPU)
        return endpoints[key]

    for src, dst in edges:
        a, b = schedule.placement[src], schedule.placement[dst]
        if rank in (a, b):
            assert a != b, "the middle of a pipeline has no edge within a rank"
            metas, present = [meta] * schedule.num_microbatches, [[True]] * schedule.num_microbatches
            forward[src, dst] = ForwardChannel(endpoint(a, b, "F"), f"stage {src}", metas)
            backward[dst, src] = BackwardChannel(endpoint(b, a, "B"), metas, present)
    wiring = Bindings(stages, make_slots(program, stages), forward, backward, PipelineIO())
    return compile_program(program.instructions, wiring)


def torch_step(kind: Any, per_rank: int) -> Callable[[], object]:
    """A step of the same rank in torch's runtime."""
    count = RANKS * per_rank
    indices = [RANK] if per_rank == 1 else [RANK, count - 1 - RANK if kind is ScheduleZBVZeroBubble else RANK + RANKS]
    example = torch.zeros(BATCH, WIDTH, requires_grad=True)
    stages = [PipelineStage(small_module(), s, count, CPU, input_args=example, output_args=example) for s in indices]
    schedule = kind(stages[0] if per_rank == 1 else stages, MICROBATCHES, loss_fn=lambda output, target: output.sum())
    for stage in stages:  # all stages have their shapes, which ranks cannot exchange over a fake group
        stage._inference_mode = InferenceMode.STATIC
    schedule._warmup_p2p = lambda *_: None
    step: Callable[[], object] = schedule.step
    return step


def traced(runner: Runner) -> Callable[[], None]:
    """A step with a recorder, as under ``pipe.trace()``; the records are dropped."""
    recorder = StepRecorder([], None, 0)

    def step() -> None:
        with recorder.run("step"):
            recorder.run_program(runner)
        recorder.runs.clear()

    return step


def bare_step(backward: Callable[[Tensor, Tensor], object]) -> Callable[[], None]:
    """The forwards and backwards of one stage in a step, without an executor."""
    module = small_module()
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    grad = torch.randn(BATCH, WIDTH)

    def step() -> None:
        for _ in range(MICROBATCHES):
            backward(module(x), grad)
            x.grad = None

    return step


def timed(step: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return measure


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds per step of every variant; runs in a new process."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    engine = torch.autograd.Variable._execution_engine.run_backward
    variants: dict[str, Callable[[], float]] = {
        BARE: timed(bare_step(lambda y, g: engine((y,), (g,), False, False, (), True, True))),
        "bare, autograd.backward": timed(bare_step(torch.autograd.backward)),
    }
    for name, per_rank, theirs in PAIRS:
        if " " not in name:
            variants[f"ours {name}"] = timed(our_runner(build(name, RANKS, MICROBATCHES, per_rank)).run)
            variants[f"ours {name}{TRACED}"] = timed(traced(our_runner(build(name, RANKS, MICROBATCHES, per_rank))))
        if theirs is not None:
            variants[f"torch {theirs.__name__.removeprefix('Schedule')}"] = timed(torch_step(theirs, per_rank))
    return interleave(variants, rounds, warmup=max(3, rounds // 10))


def run(quick: bool = False) -> dict[str, Any]:
    (found,) = spawn(measure, 1, 15 if quick else 300, deadline=300, gloo=False)
    middle = medians(found)
    per_rank = {f"ours {name}{how}": v for name, v, _ in PAIRS for how in ("", TRACED)}
    per_rank |= {f"torch {kind.__name__.removeprefix('Schedule')}": v for _, v, kind in PAIRS if kind is not None}
    bare = middle[BARE] / MICROBATCHES
    rows, targets = [], []
    for name, seconds in middle.items():
        pairs = per_rank.get(name, 1) * MICROBATCHES  # (stage, micro-batch)
        each = seconds / pairs * 1e6
        row: dict[str, Any] = {"variant": name, "µs per (stage, micro-batch)": each}
        if name in per_rank:
            row["actions"] = actions = 7 if "zb" in name.lower() or "ZeroBubble" in name else 6
            row["µs per action"] = each / actions
            row["least"] = min(found[name]) / pairs / actions * 1e6
            row["beyond the module"] = (each - bare * 1e6) / actions
        if name.startswith("ours"):
            targets.append(check(f"{name}, µs per action", row["µs per action"], most=TARGET))
        rows.append(row | {"seconds per step": found[name]})
    settings = {"ranks": RANKS, "microbatches": MICROBATCHES, "rank": RANK, "width": WIDTH, "batch": BATCH}
    return {"settings": settings, "rows": rows, "targets": targets}


def show(result: dict[str, Any]) -> None:
    table(f"(a) host cost, fake process group, p={RANKS} m={MICROBATCHES}, rank {RANK}, medians", result["rows"])
