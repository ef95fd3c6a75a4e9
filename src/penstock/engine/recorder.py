"""A tape: what the ranks of this process do, and when, while somebody wants to know.

Without a tape a program runs as it is. With one, the clock is read before each of its calls, what is sent is weighed,
and nothing else is done that could be left until later: who waited for whom, and how long, is worked out from that.

On a GPU the clock says when work was launched. When it was done say two events for each action, which are looked at
once they have happened: nothing waits for them inside of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock._torch import profiler_enabled, pytree, raw_saved_tensors
from penstock.engine.message import Message
from penstock.engine.runner import Call, CallInfo, Runner
from penstock.engine.stage import Slot, StageEngine
from penstock.schedule.lower import Instruction

__all__ = [
    "CallKey",
    "DeviceClock",
    "ProgramRecord",
    "ProgramRecorder",
    "RecordedRun",
    "StepRecorder",
    "deferred_bytes",
    "recorded_program",
    "recorded_run",
    "recorded_span",
    "saved_bytes",
]


# When GPUs did what they were told: events, on the host's clock.
#
#     host     begin ●──────────────────────────────────────● end       read when the device had nothing left to do
#     device         ●mark───e──e────●mark──e───e────●mark──● mark      a mark for each run
#
# An event's time is known only as a number of milliseconds since another event, in single precision: exact for as long
# as a step takes, but not for hours. So events count from the last mark, and marks from the one before.


class DeviceClock:
    """The marks of all GPUs of this process; without GPUs, of none."""

    def __init__(self, devices: Iterable[torch.device], clock: Callable[[], int]) -> None:
        self.clock = clock
        self.marks: dict[torch.device, list[Any]] = {d: [] for d in devices if d.type == "cuda"}
        self._at: dict[torch.device, list[float]] = {}  # of each mark, in seconds since the first one
        self._begin = self._read()
        self._end: dict[torch.device, int] = {}

    def mark(self) -> int:
        """Begin a run; its number among the marks."""
        for device, marks in self.marks.items():
            marks.append(self.stamp(device))
        return max((len(marks) - 1 for marks in self.marks.values()), default=0)

    def stamp(self, device: torch.device) -> Any:
        """An event that happens when the device has done all that it was told so far; None for a CPU."""
        if device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def allocated(self, device: torch.device) -> int:
        """Bytes of tensors there are on the device, as its allocator counts them; it is not waited for."""
        found: int = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]
        return found

    def since(self, device: torch.device, mark: int, *events: Any) -> list[float]:
        """When events happened, in seconds since a mark."""
        return [self.marks[device][mark].elapsed_time(event) / 1e3 for event in events]

    def finish(self) -> None:
        """Wait for all devices, and find out when their marks were."""
        self._end = self._read()
        for device, marks in self.marks.items():
            at = [0.0]
            for before, after in pairwise(marks):
                at.append(at[-1] + before.elapsed_time(after) / 1e3)
            self._at[device] = at

    def on_host(self, device: torch.device, mark: int, seconds: float) -> int:
        """The host's clock, so many seconds after a mark."""
        at, begin, end = self._at[device], self._begin[device], self._end[device]
        share = (at[mark] + seconds) / at[-1] if at[-1] > 0 else 0.0
        return begin + round(share * (end - begin))

    def _read(self) -> dict[torch.device, int]:
        """The host's clock at a new mark on each device."""
        found = {}
        for device, marks in self.marks.items():
            torch.cuda.synchronize(device)
            marks.append(self.stamp(device))
            torch.cuda.synchronize(device)
            found[device] = self.clock()
        return found


# How much a stage keeps of a micro-batch between its forward and its backward.


def saved_bytes(slot: Slot, engine: StageEngine) -> int:
    """The bytes of all tensors that a graph keeps for its backward, parameters and buffers apart.

    What was packed away by hooks, as checkpoints do it, is not unpacked, and does not count. Neither does what a
    function of the user's keeps as attributes, nor tensors that are not dense.
    """
    seen: set[Any] = set()
    kept: list[Tensor] = list(slot.inputs)
    ahead: list[Any] = [edge.node for edge in slot.roots]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        ahead += [following for following, _ in node.next_functions]
        kept += _saved_tensors(node)
    return _unique_bytes(kept, engine)


def deferred_bytes(slot: Slot, engine: StageEngine) -> int:
    """The bytes of all tensors that weight gradients wait with, between I and W: parameters and buffers apart."""
    entries = () if slot.queue is None else slot.queue.entries
    leaves = pytree.tree_leaves([arguments for _, arguments in entries])
    return _unique_bytes([leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided], engine)


def _unique_bytes(kept: Sequence[Tensor], engine: StageEngine) -> int:
    """What overlaps counts once."""
    own = {_memory_of(tensor)[0] for tensor in (*engine.module.parameters(), *engine.module.buffers())}
    sizes: dict[object, dict[int, int]] = {}  # by memory, and where in it
    room: dict[object, int] = {}
    for tensor in kept:
        place, size = _memory_of(tensor)
        if place not in own:
            views, at = sizes.setdefault(place, {}), int(tensor.storage_offset())
            views[at] = max(views.get(at, 0), tensor.nbytes)
            room[place] = size
    return sum(min(room[place], sum(views.values())) for place, views in sizes.items())


def _saved_tensors(node: Any) -> list[Tensor]:
    return [tensor for tensor in raw_saved_tensors(node) if tensor.layout is torch.strided]


def _memory_of(tensor: Tensor) -> tuple[object, int]:
    """The memory that a tensor is a view of, and its size: views that overlap count once."""
    try:
        memory = tensor.untyped_storage()
        return (str(tensor.device), memory.data_ptr()), memory.nbytes()
    except (RuntimeError, NotImplementedError):  # tensors without memory of their own
        return id(tensor), tensor.nbytes


# A program as a tape runs it: the same calls, some of which write down more than the time.


class CallKey(NamedTuple):
    """What a call is."""

    instruction: Instruction
    what: str  # see ``Mark``
    peer: int


class ProgramRecorder:
    """The calls of a runner, made once for a tape; ``curious`` about what its stages save, for its first walk."""

    def __init__(
        self, runner: Runner, clock: Callable[[], int], saved: dict[int, int], times: DeviceClock, *, curious: bool
    ) -> None:
        self.clock, self.saved, self.times, self.curious = clock, saved, times, curious
        self.lines = [
            CallKey(instruction, mark.what, mark.peer)
            for instruction, mark in zip(runner.instructions, runner.marks, strict=True)
        ]
        self.walk: ProgramRecord | None = None  # under way
        self.calls = [
            self._call(at, call, mark) for at, (call, mark) in enumerate(zip(runner.named(), runner.marks, strict=True))
        ]

    def _call(self, at: int, call: Call, mark: CallInfo) -> Call:
        if mark.cargo is not None:
            return partial(self._send, at, call, mark.cargo)
        if mark.engine is not None and mark.engine.device.type == "cuda":
            call = partial(self._launch, at, call, mark.engine.device)
        if mark.engine is not None and self.curious and mark.engine.index not in self.saved:
            return partial(self._look, at, call, mark)
        return call

    def _send(self, at: int, call: Call, cargo: Callable[[], Any]) -> None:
        assert self.walk is not None
        self.walk.sizes[at] = _payload_bytes(cargo())
        call()

    def _launch(self, at: int, call: Call, device: torch.device) -> None:
        assert self.walk is not None
        before = self.times.stamp(device)
        call()
        self.walk.events[at] = (device, before, self.times.stamp(device))
        self.walk.memory[at] = self.times.allocated(device)

    def _look(self, at: int, call: Call, mark: CallInfo) -> None:
        """The first of a stage's graphs is looked at, after its end."""
        assert self.walk is not None
        assert mark.engine is not None
        assert mark.slot is not None
        call()
        if mark.slot.roots and mark.engine.index not in self.saved:
            self.walk.ends[at] = self.clock()
            self.saved[mark.engine.index] = 0
            with suppress(Exception):  # tensors of kinds that nobody has thought of must not end a step
                self.saved[mark.engine.index] = saved_bytes(mark.slot, mark.engine)


class ProgramRecord:
    """One program, walked along: the clock's numbers, and what they belong to."""

    __slots__ = ("ends", "events", "lines", "memory", "seconds", "sizes", "stamps")

    def __init__(self, lines: Sequence[CallKey]) -> None:
        self.lines = lines
        self.stamps = [0] * (len(lines) + 1)  # before each call, and after the last
        self.ends: dict[int, int] = {}  # of calls that something else was done after
        self.sizes: dict[int, int] = {}  # bytes, of each send
        self.memory: dict[int, int] = {}  # bytes of tensors on the device, after an action's work
        self.events: dict[int, tuple[torch.device, Any, Any]] = {}  # before and after an action's work, on a GPU
        self.seconds: dict[int, tuple[torch.device, float, float]] = {}  # when they happened, since the run began

    def end(self, at: int) -> int:
        """When a call was over; 0 if it never was."""
        return self.ends.get(at, self.stamps[at + 1])


def _payload_bytes(payload: Any) -> int:
    leaves = payload[0] if type(payload) is Message else payload
    total = 0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            total += leaf.nbytes
    return total


@dataclass
class RecordedRun:
    """One mini-batch, or the backward of one that was begun before."""

    kind: str  # "step", "evaluate", "call" or "backward"
    begin: int
    end: int = 0
    failed: bool = False
    base: int = 0  # which of the devices' marks its events count from
    walks: list[ProgramRecord] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)  # what was done around the program


class StepRecorder:
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
        self.runs: list[RecordedRun] = []
        self.now: RecordedRun | None = None  # what is recorded now
        self.saved: dict[int, int] = {}  # bytes that a stage's graph keeps of one micro-batch
        self.times = DeviceClock(devices, clock)
        self._pending: deque[tuple[RecordedRun, ProgramRecord]] = deque()  # whose events have not been looked at
        self.begin = clock()

    @contextmanager
    def run(self, kind: str) -> Iterator[None]:
        """Around one mini-batch: it is recorded, or not."""
        counts = kind != "backward"
        if counts and self.skip:
            self.skip -= 1
            yield
            return
        if self.now is not None or (counts and self.left == 0):
            yield
            return
        self._resolve(done=False)
        self.now = run = RecordedRun(kind, self.clock(), base=self.times.mark())
        self.runs.append(run)
        try:
            yield
        except BaseException:
            run.failed = True
            raise
        finally:
            run.end = self.clock()
            self.now = None
            self._pending.extend((run, walk) for walk in run.walks if walk.events)
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
        script = self._script(runner)
        walk = script.walk = ProgramRecord(script.lines)
        run.walks.append(walk)
        stamps, clock, progress = walk.stamps, self.clock, runner.progress
        for progress.at, call in enumerate(script.calls):
            stamps[progress.at] = clock()
            call()
        stamps[-1] = clock()
        progress.at = -1

    def _script(self, runner: Runner) -> ProgramRecorder:
        """The runner's calls: made for its first walk, for its second, when less is to be found out, and then kept."""
        script = runner.script
        known = isinstance(script, ProgramRecorder) and script.saved is self.saved
        if isinstance(script, ProgramRecorder) and known and not script.curious and not profiler_enabled():
            return script
        made = ProgramRecorder(runner, self.clock, self.saved, self.times, curious=not known)
        runner.script = None if profiler_enabled() else made
        return made

    def finish(self) -> None:
        """Nothing more is recorded; on GPUs, wait for what was."""
        self.left = 0
        self.times.finish()
        self._resolve(done=True)

    def forget_devices(self) -> None:
        """Leave what the host's clock says, and nothing of the GPUs'."""
        self._pending.clear()
        for run in self.runs:
            for walk in run.walks:
                walk.events.clear()
                walk.seconds.clear()

    def _resolve(self, *, done: bool) -> None:
        """Look at events that have happened, and let go of them; all have when it is ``done``."""
        while self._pending:
            run, walk = self._pending[0]
            if not done and not all(after.query() for _, _, after in walk.events.values()):
                return
            for at, (device, before, after) in walk.events.items():
                start, end = self.times.since(device, run.base, before, after)
                walk.seconds[at] = (device, start, end)
            walk.events.clear()
            self._pending.popleft()


def recorded_run(tape: StepRecorder | None, kind: str) -> AbstractContextManager[None]:
    """Around one mini-batch, whether there is a tape or not."""
    return nullcontext() if tape is None else tape.run(kind)


def recorded_span(tape: StepRecorder | None, name: str) -> AbstractContextManager[None]:
    """Around something outside of the program, whether there is a tape or not."""
    return nullcontext() if tape is None or tape.now is None else tape.span(name)


def recorded_program(tape: StepRecorder | None, runner: Runner) -> Callable[[], None]:
    """What runs a program: the runner itself, or a tape that records it."""
    return runner.run if tape is None or tape.now is None else partial(tape.walk, runner)
