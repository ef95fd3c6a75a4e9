"""One clock for all ranks: how far each one's is off the first one's.

    rank 1   ask ●───────────────● answered       the answer was given in the middle of the way there and back, or
                  ╲             ╱                 at most half of it away from that: the shortest of several counts
    rank 0         ●────────────
                     the clock

The pipelines of a mesh ask their first ranks; these ask the first rank of the first replica.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple

import torch

from penstock import __version__
from penstock.engine.channel.control import TRACE, ControlChannel
from penstock.engine.distributed import DistributedExecutor
from penstock.engine.failure.watch import PipelineStopped
from penstock.engine.recorder import ProgramRecord, RecordedRun, StepRecorder
from penstock.engine.threads import ThreadExecutor
from penstock.errors import PlanError
from penstock.profile.trace.records import (
    ActionRecord,
    RankRecord,
    SendRecord,
    Span,
    StepRecord,
    Track,
    WaitRecord,
    with_memory,
)
from penstock.profile.trace.trace import Trace
from penstock.schedule.schedule import Action, Schedule
from penstock.schedule.simulate import Prediction
from penstock.split.plan import Plan
from penstock.train.launch import is_rank0, print0
from penstock.train.mesh import Mesh

__all__ = ["AlignedClock", "ClockOffset", "TraceRecording", "measure_clock_offset", "rank_records"]

ROUNDS = 24


class ClockOffset(NamedTuple):
    """What is to be added to a clock, and how wrong that may be: in nanoseconds."""

    value: float = 0.0
    error: float = 0.0

    def __add__(self, other: object) -> ClockOffset:
        if not isinstance(other, ClockOffset):
            return NotImplemented
        return ClockOffset(self.value + other.value, self.error + other.error)


class AlignedClock:
    """A clock that is set twice, and drifts evenly in between."""

    def __init__(self, at: int, offset: ClockOffset) -> None:
        self.begin = self.end = (at, offset)

    def again(self, at: int, offset: ClockOffset) -> None:
        self.end = (at, offset)

    def __call__(self, at: int) -> float:
        """Seconds on the first rank's clock."""
        (first, before), (last, after) = self.begin, self.end
        share = (at - first) / (last - first) if last > first else 0.0
        return round((at + before.value + share * (after.value - before.value)) / 1e9, 9)

    @property
    def error(self) -> float:
        """Seconds by which it may be off."""
        return max(self.begin[1].error, self.end[1].error) / 1e9


def measure_clock_offset(crew: DistributedExecutor, clock: Callable[[], int]) -> ClockOffset:
    """This rank's offset from the first rank of the mesh. All ranks call it."""
    pipe = crew.control
    data, tensor = (None if twins is None else twins.control for twins in (crew.replicas, crew.twins))
    with pipe.in_call(TRACE):
        return _from_first(pipe, data, tensor, clock)


def _from_first(
    pipe: ControlChannel, data: ControlChannel | None, tensor: ControlChannel | None, clock: Callable[[], int]
) -> ClockOffset:
    offset = _ask(pipe, clock)
    if data is not None:
        offset += pipe.gather(_ask(data, clock))[0]
    if tensor is not None:
        first = pipe.gather(_ask(tensor, clock))[0]
        offset += first if data is None else data.gather(first)[0]
    return offset


def _ask(control: ControlChannel, clock: Callable[[], int]) -> ClockOffset:
    """The offset from the first rank of a group, which answers all others one after the other."""
    best = ClockOffset(0.0, float("inf"))
    if control.group.rank() == 0:
        for rank in range(1, len(control.ranks)):
            for _ in range(ROUNDS):
                control.recv_row(rank, 1)
                control.send_row(rank, [float(clock())])
        control.wait_sends()
        return ClockOffset()
    for _ in range(ROUNDS):
        asked = clock()
        control.send_row(0, [0.0])
        (there,) = control.recv_row(0, 1)
        answered = clock()
        half = (answered - asked) / 2
        if half < best.error:
            best = ClockOffset(there - asked - half, half)
    control.wait_sends()
    return best


# From a tape's numbers to the parts of steps.

Clock = Callable[[int], float]  # the seconds that a number on this process's clock stands for


def rank_records(
    tape: StepRecorder, run: RecordedRun, clock: Clock, placement: Sequence[int], tracks: Mapping[int, int]
) -> list[RankRecord]:
    """What the ranks of this process did in a run; ``tracks[r]`` is the track of the pipeline's rank ``r``."""
    actions: dict[int, list[ActionRecord]] = {rank: [] for rank in tracks}
    common = [Span(name, clock(begin), clock(end)) for name, begin, end in run.spans]
    spans = {rank: list(common) for rank in tracks}
    for walk in run.walks:
        found, left = _actions(tape, run, walk, clock)
        for done in found:
            actions[placement[done.action.stage]].append(done)
        if left and found:
            spans[placement[found[-1].action.stage]].append(Span("sends", left[0].start, left[-1].end))
    begin, end = clock(run.begin), clock(run.end)
    return [
        RankRecord(number, begin, end, tuple(actions[rank]), tuple(sorted(spans[rank], key=lambda span: span.start)))
        for rank, number in tracks.items()
    ]


def _actions(
    tape: StepRecorder, run: RecordedRun, walk: ProgramRecord, clock: Clock
) -> tuple[list[ActionRecord], list[WaitRecord]]:
    """The actions of one program, as far as it got, and the waits after the last of them, until sends are over."""
    found: list[ActionRecord] = []
    waits: list[WaitRecord] = []
    sends: dict[int, list[SendRecord]] = defaultdict(list)  # by their action's place in what was found
    freed: dict[object, float] = {}  # when a device was done with its action before
    for at, (instruction, what, peer) in enumerate(walk.lines):
        start, stop = walk.stamps[at], walk.end(at)
        if not stop:  # it failed here
            break
        if what in ("wait", "sent"):
            waits.append(WaitRecord(peer, clock(start), clock(stop), "message" if what == "wait" else "sent"))
        elif what == "send" and found:
            sends[len(found) - 1].append(SendRecord(peer, clock(start), clock(stop), walk.sizes[at]))
        elif what == "work":
            action = Action(instruction.stage, instruction.kind, instruction.microbatch)
            if at in walk.seconds:
                device, *since = walk.seconds[at]
                begin, end = (clock(tape.times.on_host(device, run.base, seconds)) for seconds in since)
                waits = _on_device(waits, freed.get(device, 0.0), begin)
                done = ActionRecord(action, begin, end, clock(start), walk.memory[at], tuple(waits))
                freed[device] = end
            else:
                done = ActionRecord(action, clock(start), clock(stop), waits=tuple(waits))
            found.append(done)
            waits = []
    return [replace(done, sends=tuple(sends[place])) for place, done in enumerate(found)], waits


def _on_device(waits: Sequence[WaitRecord], freed: float, begin: float) -> list[WaitRecord]:
    """The host did not wait for messages, but the device: from its last action, if the host was ahead, to this one."""
    messages = [wait for wait in waits if wait.what == "message"]
    return [WaitRecord(wait.peer, min(max(freed, wait.end), begin), begin) for wait in messages]


# ``pipe.trace()``: clocks are set when the block begins, and when it ends all ranks' records become one.

OVER, LEFT = "over", "left"
clock: Callable[[], int] = time.perf_counter_ns


@dataclass(frozen=True)
class _ProcessRecord:
    """What one process has recorded."""

    tracks: list[Track]
    saved: dict[int, int]
    runs: list[tuple[str, bool, list[RankRecord]]]  # kind, failed, parts; their tracks are numbered within the share


class TraceRecording:
    """The block. What it gives is filled when it ends."""

    def __init__(
        self,
        crew: ThreadExecutor | DistributedExecutor,
        plan: Plan,
        schedule: Schedule,
        mesh: Mesh | None,
        steps: int | None,
        skip: int,
        prediction: Callable[[], Prediction | None] = lambda: None,
        quiet: bool = False,
    ) -> None:
        """``prediction`` is asked when the block has ended; ``quiet``: nothing is said then."""
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise PlanError(f"trace(steps={steps!r}): how many steps to record must be at least 1, or None for all")
        if not isinstance(skip, int) or isinstance(skip, bool) or skip < 0:
            raise PlanError(f"trace(skip={skip!r}): how many steps to leave out first must be at least 0")
        self.crew, self.mesh = crew, mesh
        self.steps, self.skip = steps, skip
        self.prediction, self.quiet = prediction, quiet
        self.number = 0
        order = schedule if isinstance(crew, DistributedExecutor) else crew.source.training(crew.source.microbatches)
        self.trace = Trace(order, tuple(crew.edges), plan=json.loads(plan.to_json()), versions=_versions())

    def __enter__(self) -> Trace:
        crew = self.crew
        if crew.tape is not None:
            raise PlanError("this pipeline is being traced already: end that trace before another one begins")
        if self.trace.tracks:
            raise PlanError("this trace has ended: call pipe.trace() again for another one")
        tape = StepRecorder([stage.device for stage in crew.stages.values()], self.steps, self.skip, clock)
        self.tape = tape
        self.aligned = AlignedClock(0, ClockOffset())
        if isinstance(crew, DistributedExecutor):
            offset = crew.guarded(lambda: measure_clock_offset(crew, self._read))
            self.aligned = AlignedClock(self._read(), offset)
            crew.traces += 1
            self.number = crew.traces
        crew.tape = tape
        return self.trace

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        crew, self.crew.tape = self.crew, None
        try:
            self.tape.finish()
        except RuntimeError:
            if error is None:
                raise
            self.tape.forget_devices()  # a GPU that has failed cannot be asked
        if not isinstance(crew, DistributedExecutor):
            self._fill([self._share()])
            self._tell(error)
            return
        alone = None
        if error is not None:
            alone = f"rank {self._here} left it by {type(error).__name__}: {error}".splitlines()[0]
        elif crew.closed:
            alone = "the pipeline was closed in it"
        if alone is not None:
            self._fill([self._share()], alone)
            if crew.ended is None and not crew.closed:
                with contextlib.suppress(RuntimeError):  # a store that is gone has nobody left to tell
                    crew.watch.sockets.store.set(self._key(self._here), LEFT)
            return
        self._fill([self._share()], "the others' could not be had")
        words = crew.guarded(lambda: self._words(OVER))
        gone = [rank for rank, word in words.items() if word != OVER]
        if gone:
            self._fill([self._share()], f"rank {gone[0]} left it by an error")
            return
        offset = crew.guarded(lambda: measure_clock_offset(crew, self._read))
        self.aligned.again(self._read(), offset)
        self._fill(crew.guarded(lambda: _gathered(crew, self._share())))
        self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        """Say what was predicted beside what was measured, where anybody is told anything."""
        self.trace.prediction = self.prediction()
        if error is None and not self.quiet and is_rank0():
            text = self.trace.comparison
            if text is not None:
                print0(text)

    def _read(self) -> int:
        return self.tape.clock() - self.tape.begin

    # ── what the processes tell each other ───────────────────────────────────────────────────────────────────

    @property
    def _here(self) -> int:
        return 0 if self.mesh is None else self.mesh.rank

    def _key(self, rank: int) -> str:
        return f"trace/{self.number}/{rank}"

    def _words(self, word: str) -> dict[int, str]:
        """How each rank has ended the block: through the store, since one that left it may talk of other things by now.

        It is looked for and not waited for there: a rank that is gone must not be waited for.
        """
        assert self.mesh is not None
        crew = self.crew
        assert isinstance(crew, DistributedExecutor)
        store, ranks = crew.watch.sockets.store, self.mesh.world_ranks
        store.set(self._key(self._here), word)
        keys = [self._key(rank) for rank in ranks]
        pause = 0.001
        with crew.status.waiting([rank for rank in ranks if rank != self._here], "until this trace is ended by"):
            while not store.check(keys):
                if crew.watch.cause is not None:
                    raise PipelineStopped(crew.watch.cause)
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        return {rank: store.get(key).decode() for rank, key in zip(ranks, keys, strict=True)}

    # ── what becomes of the tape ─────────────────────────────────────────────────────────────────────────────

    def _share(self) -> _ProcessRecord:
        crew, tape = self.crew, self.tape
        tracks = _tracks(crew, self.mesh, self.aligned.error)
        places = {track.place: number for number, track in enumerate(tracks)}

        def seconds(at: int) -> float:
            return self.aligned(at - tape.begin)

        runs = [
            (run.kind, run.failed, rank_records(tape, run, seconds, crew.placement, places))
            for run in tape.runs
            if run.end
        ]
        return _ProcessRecord(tracks, dict(tape.saved), runs)

    def _fill(self, shares: Sequence[_ProcessRecord], missing: str | None = None) -> None:
        """The trace, of the shares of one or all processes."""
        trace = self.trace
        found: dict[tuple[int, str], list[tuple[bool, list[RankRecord]]]] = {}
        tracks: list[Track] = []
        for share in shares:
            for number, (kind, failed, parts) in enumerate(share.runs):
                moved = [replace(part, track=part.track + len(tracks)) for part in parts]
                found.setdefault((number, kind), []).append((failed, moved))
            tracks += share.tracks
        steps = [
            StepRecord(number, kind, tuple(p for _, parts in rows for p in parts), any(failed for failed, _ in rows))
            for (number, kind), rows in sorted(found.items())
        ]
        trace.tracks = tuple(tracks)
        trace.saved = {stage: size for share in shares for stage, size in share.saved.items()}
        trace.steps = with_memory(steps, trace.saved)
        trace.memory = "allocated" if any("cuda" in track.device for track in tracks) else "saved"
        trace.missing = missing


def _tracks(crew: ThreadExecutor | DistributedExecutor, mesh: Mesh | None, error: float) -> list[Track]:
    """The ranks of this process."""
    if mesh is not None:
        replica = mesh.data_rank * mesh.tensor + mesh.tensor_rank
        return [Track(mesh.rank, replica, mesh.pipe_rank, _device(mesh.device), error, _gpu(mesh.device))]
    of_rank = {crew.placement[s]: stage.device for s, stage in reversed(crew.stages.items())}
    return [Track(rank, 0, rank, _device(device), gpu=_gpu(device)) for rank, device in sorted(of_rank.items())]


def _device(device: torch.device) -> str:
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _gathered(crew: DistributedExecutor, share: _ProcessRecord) -> list[_ProcessRecord]:
    """Every process's, on every one of them, in the order of the replicas and of their ranks."""
    with crew.control.in_call(TRACE):
        shares: list[Any] = crew.control.gather(share)
    for twins in (crew.twins, crew.replicas):
        if twins is not None:
            shares = [one for row in twins.control.gather(shares) for one in row]
    return shares


def _versions() -> dict[str, str]:
    return {"penstock": __version__, "torch": torch.__version__, "python": platform.python_version()}
