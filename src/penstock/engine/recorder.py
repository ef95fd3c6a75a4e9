"""Records the calls of this process's programs, with timestamps, for `Pipeline.trace`.

Without a recorder a program runs unchanged. With a recorder, the clock is read before each call, and the bytes of each
send are counted. Waiting times are computed from these records after the step.

On a GPU the host clock gives the launch times of work. Two events per action give its execution times. They are read at
the end of the recording: no step waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock._torch import profiler_enabled, pytree, raw_saved_tensors
from penstock.engine.channel.control import ControlChannel
from penstock.engine.message import Message
from penstock.engine.runner import Call, CallInfo, Runner
from penstock.engine.stage import Slot, StageEngine
from penstock.schedule.lower import Instruction

# ── clocks ───────────────────────────────────────────────────────────────────────────────────────────────────────


class DeviceClock:
    """Converts the times of CUDA events to the host's clock.

        host     begin ●──────────────────────────────────────● end       read when the device is idle
        device         ●mark───e──e────●mark──e───e────●mark──● mark      a mark for each run

    CUDA measures the time between two events in milliseconds, in single precision: precise for a step, but not for
    hours. So the time of an event is measured from the last mark, and that of a mark from the mark before.
    """

    def __init__(self, devices: Iterable[torch.device], clock: Callable[[], int]) -> None:
        self.clock = clock
        self.marks: dict[torch.device, list[Any]] = {d: [] for d in devices if d.type == "cuda"}
        self._at: dict[torch.device, list[float]] = {}  # of each mark, in seconds since the first one
        self._begin = self._read()
        self._end: dict[torch.device, int] = {}

    def mark(self) -> int:
        """Begin a run; returns the index of its mark."""
        for device, marks in self.marks.items():
            marks.append(self.stamp(device))
        return max((len(marks) - 1 for marks in self.marks.values()), default=0)

    def stamp(self, device: torch.device) -> Any:
        """An event after all work launched so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def finish(self) -> None:
        """Wait for all devices, and read the time of their marks."""
        self._end = self._read()
        for device, marks in self.marks.items():
            at = [0.0]
            for before, after in pairwise(marks):
                at.append(at[-1] + before.elapsed_time(after) / 1e3)
            self._at[device] = at

    def on_host(self, device: torch.device, mark: int, seconds: float) -> int:
        """The time on the host's clock that is ``seconds`` after a mark."""
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


class ClockOffset(NamedTuple):
    """The difference to the first rank's clock, and the maximum error of the difference, in nanoseconds."""

    value: float = 0.0
    error: float = 0.0

    def __add__(self, other: object) -> ClockOffset:
        assert isinstance(other, ClockOffset)
        return ClockOffset(self.value + other.value, self.error + other.error)


class AlignedClock:
    """A clock whose offset is measured at the beginning and at the end, and interpolated in between."""

    def __init__(self, at: int = 0, offset: ClockOffset | None = None) -> None:
        self.begin = self.end = (at, offset or ClockOffset())

    def __call__(self, at: int) -> float:
        """Seconds on the first rank's clock."""
        (first, before), (last, after) = self.begin, self.end
        share = (at - first) / (last - first) if last > first else 0.0
        return round((at + before.value + share * (after.value - before.value)) / 1e9, 9)

    @property
    def error(self) -> float:
        """The maximum error in seconds."""
        return max(self.begin[1].error, self.end[1].error) / 1e9


CLOCK_ROUNDS = 24


def measure_clock_offset(
    pipe: ControlChannel, data: ControlChannel | None, tensor: ControlChannel | None, clock: Callable[[], int]
) -> ClockOffset:
    """This rank's offset from the first rank of the mesh. All ranks call it.

    The ranks of a pipeline measure the offset from their first rank; the first ranks, from that of the first replica.
    """
    offset = _offset_in_group(pipe, clock)
    if data is not None:
        offset += pipe.gather(_offset_in_group(data, clock))[0]
    if tensor is not None:
        first = pipe.gather(_offset_in_group(tensor, clock))[0]
        offset += first if data is None else data.gather(first)[0]
    return offset


def _offset_in_group(control: ControlChannel, clock: Callable[[], int]) -> ClockOffset:
    """The offset from the first rank of a group, which replies to the other ranks one after the other.

    rank 1    sent ●───────────────● received       rank 0 reads its clock in the middle of the round trip, with an
                    ╲             ╱                 error of at most half the round trip: the shortest one is used
    rank 0           ●────────────
    """
    best = ClockOffset(0.0, float("inf"))
    if control.group.rank() == 0:
        for rank in range(1, len(control.ranks)):
            for _ in range(CLOCK_ROUNDS):
                control.recv_row(rank, 1)
                control.send_row(rank, [float(clock())])
        control.wait_sends()
        return ClockOffset()
    for _ in range(CLOCK_ROUNDS):
        sent = clock()
        control.send_row(0, [0.0])
        (remote,) = control.recv_row(0, 1)
        received = clock()
        half = (received - sent) / 2
        if half < best.error:
            best = ClockOffset(remote - sent - half, half)
    control.wait_sends()
    return best


# ── saved memory ─────────────────────────────────────────────────────────────────────────────────────────────────


def saved_bytes(slot: Slot, engine: StageEngine) -> int:
    """The bytes of all tensors that a graph saves for its backward, without parameters and buffers.

    Tensors packed by saved-tensor hooks (such as those of checkpoints), attributes of user-defined functions and
    tensors that are not dense are not counted.
    """
    seen: set[Any] = set()
    tensors: list[Tensor] = list(slot.inputs)
    pending: list[Any] = [edge.node for edge in slot.roots]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [next_node for next_node, _ in node.next_functions]
        tensors += [tensor for tensor in raw_saved_tensors(node) if tensor.layout is torch.strided]
    return _unique_bytes(tensors, engine)


def deferred_bytes(slot: Slot, engine: StageEngine) -> int:
    """The bytes of all tensors that deferred weight gradients hold between I and W, without parameters and buffers."""
    entries = () if slot.queue is None else slot.queue.entries
    leaves = pytree.tree_leaves([arguments for _, arguments in entries])
    return _unique_bytes([leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided], engine)


def _unique_bytes(tensors: Sequence[Tensor], engine: StageEngine) -> int:
    """The bytes of these tensors. Overlapping views count once."""
    own = {_memory_of(tensor)[0] for tensor in (*engine.module.parameters(), *engine.module.buffers())}
    sizes: dict[object, dict[int, int]] = {}  # by memory and offset
    capacity: dict[object, int] = {}
    for tensor in tensors:
        place, size = _memory_of(tensor)
        if place not in own:
            views, at = sizes.setdefault(place, {}), int(tensor.storage_offset())
            views[at] = max(views.get(at, 0), tensor.nbytes)
            capacity[place] = size
    return sum(min(capacity[place], sum(views.values())) for place, views in sizes.items())


def _memory_of(tensor: Tensor) -> tuple[object, int]:
    """The memory that a tensor is a view of, and its size."""
    try:
        memory = tensor.untyped_storage()
        return (str(tensor.device), memory.data_ptr()), memory.nbytes()
    except (RuntimeError, NotImplementedError):  # a tensor without a storage
        return id(tensor), tensor.nbytes


# ── recorded programs ────────────────────────────────────────────────────────────────────────────────────────────


CallKey = tuple[Instruction, str, int]  # the instruction, kind and peer of a call: see ``CallInfo``


@dataclass(slots=True, eq=False)
class ProgramRecord:
    """One run of a program: timestamps of its calls, and further measurements by the index of the call."""

    calls: Sequence[CallKey]
    stamps: list[int] = field(init=False)  # before each call, and after the last
    ends: dict[int, int] = field(default_factory=dict)  # of calls that the recorder's own measurements follow
    sizes: dict[int, int] = field(default_factory=dict)  # bytes of each send
    memory: dict[int, int] = field(default_factory=dict)  # allocated bytes on the device after each action
    # On a GPU: events before and after each action, and their times since the start of the run.
    events: dict[int, tuple[torch.device, Any, Any]] = field(default_factory=dict)
    seconds: dict[int, tuple[torch.device, float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stamps = [0] * (len(self.calls) + 1)

    def end(self, at: int) -> int:
        """The time at which a call returned; 0 if it did not."""
        return self.ends.get(at, self.stamps[at + 1])


class RecordedProgram:
    """The calls of a runner, wrapped to record sends and GPU work; in its first run also the bytes that graphs save."""

    def __init__(
        self, runner: Runner, clock: Callable[[], int], saved: dict[int, int], devices: DeviceClock, measure_saved: bool
    ) -> None:
        self.clock, self.saved, self.devices, self.measure_saved = clock, saved, devices, measure_saved
        pairs = zip(runner.instructions, runner.infos, strict=True)
        self.keys = [(instruction, info.kind, info.peer) for instruction, info in pairs]
        self.record = ProgramRecord(())  # of the current run
        self.calls = list(runner.named_calls())
        for at, info in enumerate(runner.infos):
            if info.payload is not None:
                self.calls[at] = partial(self._send, at, self.calls[at], info.payload)
            if info.engine is not None and info.engine.device.type == "cuda":
                self.calls[at] = partial(self._launch, at, self.calls[at], info.engine.device)
            if info.engine is not None and measure_saved and info.engine.index not in saved:
                self.calls[at] = partial(self._measure_saved, at, self.calls[at], info)

    def _send(self, at: int, call: Call, payload: Callable[[], Any]) -> None:
        value = payload()
        leaves = value[0] if type(value) is Message else value
        self.record.sizes[at] = sum([leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)])
        call()

    def _launch(self, at: int, call: Call, device: torch.device) -> None:
        before = self.devices.stamp(device)
        call()
        self.record.events[at] = (device, before, self.devices.stamp(device))
        # Without waiting for the device.
        self.record.memory[at] = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]

    def _measure_saved(self, at: int, call: Call, info: CallInfo) -> None:
        """Measure the first graph of a stage, after the call."""
        assert info.engine is not None
        assert info.slot is not None
        call()
        if info.slot.roots and info.engine.index not in self.saved:
            self.record.ends[at] = self.clock()
            self.saved[info.engine.index] = 0
            with suppress(Exception):  # an unknown kind of tensor must not fail the step
                self.saved[info.engine.index] = saved_bytes(info.slot, info.engine)


@dataclass
class RecordedRun:
    """One mini-batch, or the backward of an earlier call."""

    kind: str  # "step", "evaluate", "call" or "backward"
    begin: int
    end: int = 0
    failed: bool = False
    mark: int = 0  # the mark of the device clock from which its events are measured
    programs: list[ProgramRecord] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)  # phases before and after the program


class StepRecorder:
    """Records ``steps`` runs (None: all) after the first ``skip``. A backward counts as a part of its call."""

    def __init__(
        self, devices: Iterable[torch.device], steps: int | None, skip: int, clock: Callable[[], int] = perf_counter_ns
    ) -> None:
        self.clock = clock
        self.remaining = steps
        self.skip = skip
        self.runs: list[RecordedRun] = []
        self.now: RecordedRun | None = None  # the current run, if it is recorded
        self.saved: dict[int, int] = {}  # bytes that a stage's graph saves of one micro-batch
        self.devices = DeviceClock(devices, clock)
        self.begin = clock()
        self.aligned = AlignedClock()

    def elapsed(self) -> int:
        return self.clock() - self.begin

    @contextmanager
    def run(self, kind: str) -> Iterator[None]:
        """A context for one mini-batch, which records it unless it is skipped or after the last one."""
        counts = kind != "backward"
        skipped = counts and (self.skip > 0 or self.remaining == 0)
        if counts and self.skip:
            self.skip -= 1
        if skipped or self.now is not None:
            yield
            return
        self.now = run = RecordedRun(kind, self.clock(), mark=self.devices.mark())
        self.runs.append(run)
        try:
            yield
        except BaseException:
            run.failed = True
            raise
        finally:
            run.end = self.clock()
            self.now = None
            if counts and self.remaining is not None:
                self.remaining -= 1

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A context for a phase of a run before or after its program."""
        run, begin = self.now, self.clock()
        yield
        if run is not None:
            run.spans.append((name, begin, self.clock()))

    def run_program(self, runner: Runner) -> None:
        run = self.now
        assert run is not None
        # The calls are wrapped for the first run, and again for the second, which does not measure saved bytes.
        program, profiled = runner.recorded_calls, profiler_enabled()
        known = isinstance(program, RecordedProgram) and program.saved is self.saved
        if not isinstance(program, RecordedProgram) or not known or program.measure_saved or profiled:
            program = RecordedProgram(runner, self.clock, self.saved, self.devices, not known)
            runner.recorded_calls = None if profiled else program
        record = program.record = ProgramRecord(program.keys)
        run.programs.append(record)
        stamps, clock = record.stamps, self.clock
        for runner.at, call in enumerate(program.calls):
            stamps[runner.at] = clock()
            call()
        stamps[-1] = clock()
        runner.at = -1

    def finish(self, error: BaseException | None = None) -> None:
        """Stop recording, and wait for the GPUs. After an error, a GPU that fails too is left out."""
        self.remaining = 0
        programs = [(run, program) for run in self.runs for program in run.programs]
        try:
            self.devices.finish()
            for run, program in programs:
                for at, (device, before, after) in program.events.items():
                    mark = self.devices.marks[device][run.mark]
                    start, end = mark.elapsed_time(before), mark.elapsed_time(after)
                    program.seconds[at] = (device, start / 1e3, end / 1e3)
        except RuntimeError:
            if error is None:
                raise
            for _, program in programs:  # keep the host's times only
                program.seconds.clear()
        for _, program in programs:
            program.events.clear()
