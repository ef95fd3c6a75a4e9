"""Times of GPUs: with devices whose events are known, and with a real one where there is one."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.engine.recorder import StepRecorder
from penstock.engine.runner import CallInfo, Runner
from penstock.profile.trace.recording import rank_records
from penstock.schedule.lower import Instruction
from tests.profile.test_trace import orders
from tests.support.models import batch, gradients, labels, mlp
from tests.support.ranks import run_ranks

GPU = torch.device("cuda:0")


class World:
    """A host and a device whose clock runs twice as fast; what the device is told takes as long as it is told to."""

    def __init__(self) -> None:
        self.now = 1_000_000  # the host's nanoseconds
        self.free = 0.0  # when the device has done what it was told, in its own milliseconds
        self.last = 0

    def clock(self) -> int:
        return self.now

    @property
    def device_now(self) -> float:
        return self.now / 1e6 * 2

    def launch(self, milliseconds: float, host: int = 1_000) -> None:
        self.free = max(self.free, self.device_now) + milliseconds
        self.now += host

    def synchronize(self, device: object = None) -> None:
        self.now = max(self.now, round(self.free * 1e6 / 2))

    def event(self, enable_timing: bool) -> Any:
        world = self

        class Event:
            def record(self, stream: object) -> None:
                world.free = max(world.free, world.device_now)
                self.at = world.free

            def query(self) -> bool:
                return self.at <= world.device_now

            def elapsed_time(self, other: Any) -> float:
                assert self.query()
                assert other.query(), "an event that has not happened must not be asked"
                return float(other.at - self.at)

        return Event()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    numbers = itertools.count(1_000, 1_000)
    stats = {"allocated_bytes": {"all": {}}}
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)

    def nested(device: object) -> Any:
        stats["allocated_bytes"]["all"]["current"] = next(numbers)
        return stats

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", nested)
    return made


def program(world: World) -> Runner:
    """A forward that is launched at once and takes a millisecond of the device's; a message that the device waits for,
    for another three; and a backward of two."""
    engine: Any = SimpleNamespace(index=1, device=GPU)
    work = CallInfo("work", engine, SimpleNamespace(roots=()))  # type: ignore[arg-type]
    calls = [
        (lambda: world.launch(1.0), Instruction("F", 1, 0), work),
        (lambda: world.launch(3.0), Instruction("RECV_B", 1, 0, 2), CallInfo("wait", peer=2)),
        (lambda: world.launch(2.0), Instruction("B", 1, 0), work),
    ]
    return Runner(*([piece[part] for piece in calls] for part in range(3)))  # type: ignore[arg-type]


def test_actions_are_timed_where_they_run(world: World) -> None:
    recorder = StepRecorder([GPU], None, 0, world.clock)
    runner = program(world)
    for _ in range(3):
        with recorder.run("step"):
            recorder.run_program(runner)
    programs = [program for run in recorder.runs[1:] for program in run.programs]
    assert all(program.events for program in programs), "nothing was waited for in a step"
    recorder.finish()
    for number, run in enumerate(recorder.runs):
        (part,) = rank_records(recorder, run, lambda at: (at - recorder.begin) / 1e6, (0, 0, 0), {0: 0})
        forward, backward = part.actions
        first = number * 3.0  # 6 of the device's milliseconds are 3 of the host's
        assert (forward.start, forward.end) == pytest.approx((first, first + 0.5), abs=0.01)
        assert (backward.start, backward.end) == pytest.approx((first + 2.0, first + 3.0), abs=0.01)
        assert backward.launched == pytest.approx(number * 0.003 + 0.002, abs=1e-4), "the host ran ahead"
        assert backward.waited == pytest.approx(1.5, abs=0.01)
        assert [wait.peer for wait in backward.waits] == [2]
        assert forward.memory is not None
        assert backward.memory == forward.memory + 1_000


def test_of_a_device_that_has_failed_the_hosts_times_are_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("the device has failed")

    recorder = StepRecorder([GPU], None, 0, world.clock)
    runner = program(world)
    for _ in range(2):
        with recorder.run("step"):
            recorder.run_program(runner)
        world.synchronize()
    monkeypatch.setattr(recorder.devices, "finish", fail)
    recorder.finish(RuntimeError("the device has failed"))
    for run in recorder.runs:
        (part,) = rank_records(recorder, run, lambda at: at / 1e6, (0, 0, 0), {0: 0})
        assert [done.launched for done in part.actions] == [None, None]
        assert [done.seconds for done in part.actions] == pytest.approx([0.001, 0.001])


def test_a_host_that_is_late_is_not_a_wait(world: World) -> None:
    recorder = StepRecorder([GPU], None, 0, world.clock)
    engine: Any = SimpleNamespace(index=0, device=GPU)
    work = CallInfo("work", engine, SimpleNamespace(roots=()))  # type: ignore[arg-type]
    calls = [
        (lambda: world.launch(1.0), Instruction("F", 0, 0), work),
        (lambda: world.launch(0.0, host=5_000_000), Instruction("RECV_F", 0, 1, 2), CallInfo("wait", peer=2)),
        (lambda: world.launch(1.0), Instruction("F", 0, 1), work),
    ]
    runner = Runner(*([piece[part] for piece in calls] for part in range(3)))  # type: ignore[arg-type]
    with recorder.run("step"):
        recorder.run_program(runner)
    recorder.finish()
    (part,) = rank_records(recorder, recorder.runs[0], lambda at: (at - recorder.begin) / 1e6, (0,), {0: 0})
    assert part.actions[1].start == pytest.approx(5.0, abs=0.01)
    assert part.actions[1].waited == pytest.approx(0.0, abs=0.01), "the device had nothing to wait for but the host"


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def check_device(trace: ps.Trace) -> None:
    assert trace.memory == "allocated"
    assert all(track.device.startswith("cuda:0 ") for track in trace.tracks)
    for step in trace.steps:
        for part in step.parts:
            for done in part.actions:
                assert done.launched is not None
                assert done.end > done.start
                assert done.start >= done.launched - 1e-3
                assert done.memory is not None
                assert done.memory > 0
            starts = [done.start for done in part.actions]
            assert starts == sorted(starts)
    assert trace.bubble is not None
    assert trace.costs().f


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_threads_on_a_gpu(schedule: str) -> None:
    plan, loss = ps.split(mlp(2, width=64), stages=2), nn.CrossEntropyLoss()
    found = []
    for traced in (False, True):
        with ps.Pipeline(plan, loss, microbatches=4, schedule=schedule, devices="cuda:0") as pipe:
            for parameter in pipe.parameters():
                parameter.grad = None
            with pipe.trace() if traced else contextlib.nullcontext() as trace:
                for _ in range(2):
                    pipe.step(batch(32, 64), labels(32))
            found.append(gradients(pipe.named_parameters()))
            if trace is not None:
                check_device(trace)
                assert trace.shared_gpus == [[0, 1]]
                assert tuple(map(tuple, orders(trace.steps[1]))) == pipe.schedule.orders
                with pipe.trace() as calls:
                    pipe(batch(32, 64)).sum().backward()
                assert [step.kind for step in calls.steps] == ["call", "backward"]
                assert [len(part.actions) for part in calls.steps[1].parts] == [4, 4]
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())  # type: ignore[arg-type]


def on_one_gpu(rank: int) -> ps.Trace:
    plan, mesh = ps.split(mlp(2, width=64), stages=2), ps.Mesh(pipe=2, device="cuda:0")
    with ps.Pipeline(plan, nn.CrossEntropyLoss(), microbatches=4, mesh=mesh) as pipe:
        with pipe.trace(steps=2, skip=1) as trace:
            for _ in range(3):
                pipe.step(batch(32, 64), labels(32))
        return trace


@pytest.mark.cuda
@on_a_gpu
def test_processes_on_a_gpu() -> None:
    traces = run_ranks(on_one_gpu, 2, timeout=120)
    for trace in traces:
        assert isinstance(trace, ps.Trace), trace
        check_device(trace)
        assert trace.shared_gpus == [[0, 1]]
    assert traces[0] == traces[1]
