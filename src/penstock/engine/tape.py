"""A tape: what the ranks of this process do, and when, while somebody wants to know.

Without a tape a program runs as it is. With one, the clock is read before each of its calls and after each action, and
nothing else is done that could be left until later: who waited for whom, and how long, is worked out from that.

On a GPU the clock says when work was launched. When it was done say two events for each action, which are looked at
once they have happened: nothing waits for them inside of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from penstock.engine.devicetime import DeviceTimes
from penstock.engine.message import Message
from penstock.engine.runner import Runner
from penstock.engine.saved import saved_bytes
from penstock.schedule.program import Instruction

__all__ = ["Run", "Tape", "Walk", "recorded", "spanned", "walking"]


class Walk:
    """One program, walked along: the clock's numbers, and what they belong to."""

    __slots__ = ("ends", "events", "instructions", "memory", "peers", "seconds", "sizes", "starts", "stop", "whats")

    def __init__(self, runner: Runner) -> None:
        count = len(runner.calls)
        self.instructions: Sequence[Instruction] = runner.instructions
        self.whats = [mark.what for mark in runner.marks]
        self.peers = [mark.peer for mark in runner.marks]
        self.starts = [0] * count  # before each call
        self.ends = [0] * count  # after each that is an action's work
        self.sizes = [0] * count  # bytes, of each send
        self.memory = [0] * count  # bytes that the device has given away, after an action's work
        self.stop = 0  # after the last call
        self.events: dict[int, tuple[torch.device, Any, Any]] = {}  # before and after an action's work, on a GPU
        self.seconds: dict[int, tuple[torch.device, float, float]] = {}  # when they happened, since the run began


@dataclass
class Run:
    """One mini-batch, or the backward of one that was begun before."""

    kind: str  # "step", "evaluate", "call" or "backward"
    begin: int
    end: int = 0
    failed: bool = False
    base: int = 0  # which of the devices' marks its events count from
    walks: list[Walk] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)  # what was done around the program


class Tape:
    """Records ``steps`` runs, all if that is None, after the first ``skip``. A backward belongs to its call."""

    def __init__(
        self,
        devices: Iterable[torch.device],
        steps: int | None,
        skip: int,
        clock: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self.clock = clock
        self.left = steps
        self.skip = skip
        self.runs: list[Run] = []
        self.now: Run | None = None  # what is recorded now
        self.saved: dict[int, int] = {}  # bytes that a stage's graph keeps of one micro-batch
        self.times = DeviceTimes(devices, clock)
        self.begin = clock()

    @contextmanager
    def run(self, kind: str) -> Iterator[None]:
        """Around one mini-batch: it is recorded, or not."""
        counts = kind != "backward"
        if counts and self.skip:
            self.skip -= 1
            yield
            return
        if self.now is not None or self.skip or (self.left == 0 if counts else not self.runs):
            yield
            return
        self._resolve(done=False)
        self.now = run = Run(kind, self.clock(), base=self.times.mark())
        self.runs.append(run)
        try:
            yield
        except BaseException:
            run.failed = True
            raise
        finally:
            run.end = self.clock()
            self.now = None
            if counts and self.left is not None:
                self.left -= 1

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Around something that a rank does before or after its program."""
        run, begin = self.now, self.clock()
        yield
        if run is not None:
            run.spans.append((name, begin, self.clock()))

    def walk(self, runner: Runner) -> None:
        """Do what ``runner.run`` does, and write it down."""
        run = self.now
        assert run is not None
        walk = Walk(runner)
        run.walks.append(walk)
        if any(mark.engine is not None and mark.engine.device.type == "cuda" for mark in runner.marks):
            self._walk_device(runner, walk)
        else:
            self._walk_host(runner, walk)
        runner.progress.at = -1
        walk.stop = self.clock()

    def _walk_host(self, runner: Runner, walk: Walk) -> None:
        starts, ends, sizes = walk.starts, walk.ends, walk.sizes
        clock, progress, saved = self.clock, runner.progress, self.saved
        for progress.at, (call, mark) in enumerate(zip(runner.named(), runner.marks, strict=True)):
            at = progress.at
            starts[at] = clock()
            _, engine, slot, _, cargo = mark
            if cargo is not None:
                sizes[at] = _bytes(cargo())
            call()
            if engine is not None:
                ends[at] = clock()
                if engine.index not in saved and slot is not None and slot.roots:
                    saved[engine.index] = saved_bytes(slot, engine)

    def _walk_device(self, runner: Runner, walk: Walk) -> None:
        """The same on a GPU, or on several devices of which one is."""
        starts, ends, sizes = walk.starts, walk.ends, walk.sizes
        clock, progress, saved = self.clock, runner.progress, self.saved
        for progress.at, (call, mark) in enumerate(zip(runner.named(), runner.marks, strict=True)):
            at = progress.at
            starts[at] = clock()
            _, engine, slot, _, cargo = mark
            if cargo is not None:
                sizes[at] = _bytes(cargo())
            if engine is None:
                call()
                continue
            before = self.times.stamp(engine.device)
            call()
            after = self.times.stamp(engine.device)
            ends[at] = clock()
            if before is not None:
                walk.events[at] = (engine.device, before, after)
                walk.memory[at] = self.times.allocated(engine.device)
            if engine.index not in saved and slot is not None and slot.roots:
                saved[engine.index] = saved_bytes(slot, engine)

    def finish(self) -> None:
        """Nothing more is recorded; on GPUs, wait for what was."""
        self.left = 0
        self.times.finish()
        self._resolve(done=True)

    def _resolve(self, *, done: bool) -> None:
        """Look at events that have happened, and let go of them; all have when it is ``done``."""
        for run in self.runs:
            for walk in run.walks:
                while walk.events:
                    at, (device, before, after) = next(iter(walk.events.items()))
                    if not done and not after.query():
                        return
                    start, end = self.times.since(device, run.base, before, after)
                    walk.seconds[at] = (device, start, end)
                    del walk.events[at]


def recorded(tape: Tape | None, kind: str) -> AbstractContextManager[None]:
    """Around one mini-batch, whether there is a tape or not."""
    return nullcontext() if tape is None else tape.run(kind)


def spanned(tape: Tape | None, name: str) -> AbstractContextManager[None]:
    """Around something outside of the program, whether there is a tape or not."""
    return nullcontext() if tape is None or tape.now is None else tape.span(name)


def walking(tape: Tape | None, runner: Runner) -> Callable[[], None]:
    """What runs a program: the runner itself, or a tape that records it."""
    return runner.run if tape is None or tape.now is None else partial(tape.walk, runner)


def _bytes(payload: Any) -> int:
    leaves = payload.leaves if isinstance(payload, Message) else payload
    total = 0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            total += leaf.nbytes
    return total
