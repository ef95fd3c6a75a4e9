"""``Pipeline.trace``: record steps, and collect the records of all ranks in a ``Trace`` when the block ends."""

from __future__ import annotations

import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from penstock.engine.executor import Executor
from penstock.engine.recorder import ProgramRecord, RecordedRun, StepRecorder
from penstock.errors import PlanError
from penstock.profile.trace import Trace
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
from penstock.schedule.schedule import Action
from penstock.schedule.simulate import Prediction
from penstock.split.plan import Plan
from penstock.train.launch import is_rank0, print0
from penstock.train.mesh import Mesh
from penstock.version import __version__

Clock = Callable[[int], float]  # converts a time of this process's clock to seconds on the common clock


def rank_records(
    recorder: StepRecorder, run: RecordedRun, clock: Clock, placement: Sequence[int], tracks: Mapping[int, int]
) -> list[RankRecord]:
    """The records of the ranks of this process in a run; ``tracks[r]`` is the track of the pipeline's rank ``r``."""
    actions: dict[int, list[ActionRecord]] = {rank: [] for rank in tracks}
    common = [Span(name, clock(begin), clock(end)) for name, begin, end in run.spans]
    spans = {rank: list(common) for rank in tracks}
    for program in run.programs:
        found, left = _actions(recorder, run, program, clock)
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
    recorder: StepRecorder, run: RecordedRun, program: ProgramRecord, clock: Clock
) -> tuple[list[ActionRecord], list[WaitRecord]]:
    """The completed actions of one program, and the waits for sends after the last action."""
    found: list[ActionRecord] = []
    waits: list[WaitRecord] = []
    sends: dict[int, list[SendRecord]] = defaultdict(list)  # by the index of their action in ``found``
    previous_end: dict[object, float] = {}  # end of the previous action, by device
    for at, (instruction, what, peer) in enumerate(program.calls):
        start, stop = program.stamps[at], program.end(at)
        if not stop:  # the program failed here
            break
        if what in ("wait", "sent"):
            waits.append(WaitRecord(peer, clock(start), clock(stop), "message" if what == "wait" else "sent"))
        elif what == "send" and found:
            sends[len(found) - 1].append(SendRecord(peer, clock(start), clock(stop), program.sizes[at]))
        elif what == "work":
            action = Action(instruction.stage, instruction.kind, instruction.microbatch)
            if at in program.seconds:
                device, *since = program.seconds[at]
                begin, end = (clock(recorder.devices.on_host(device, run.mark, seconds)) for seconds in since)
                # The device waited for messages, not the host: since its previous action, if the host was ahead.
                last = previous_end.get(device, 0.0)
                messages = [wait for wait in waits if wait.what == "message"]
                waits = [WaitRecord(wait.peer, min(max(last, wait.end), begin), begin) for wait in messages]
                done = ActionRecord(action, begin, end, clock(start), program.memory[at], tuple(waits))
                previous_end[device] = end
            else:
                done = ActionRecord(action, clock(start), clock(stop), waits=tuple(waits))
            found.append(done)
            waits = []
    return [replace(done, sends=tuple(sends[place])) for place, done in enumerate(found)], waits


clock: Callable[[], int] = time.perf_counter_ns


ProcessRecord = tuple[list[Track], dict[int, int], list[tuple[str, bool, list[RankRecord]]]]
"""Tracks, saved bytes by stage, and runs (kind, failed, parts) of one process; track numbers start at 0 in each."""


class TraceRecording:
    """The context manager of ``pipe.trace()``. It fills the trace when the block ends."""

    def __init__(
        self,
        executor: Executor,
        plan: Plan,
        mesh: Mesh | None,
        steps: int | None,
        skip: int,
        prediction: Callable[[], Prediction | None] = lambda: None,
        quiet: bool = False,
    ) -> None:
        """``prediction`` is called after the block. Its result is printed with the measurement unless ``quiet``."""
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise PlanError(f"trace(steps={steps!r}): the number of steps must be at least 1, or None for all steps")
        if not isinstance(skip, int) or isinstance(skip, bool) or skip < 0:
            raise PlanError(f"trace(skip={skip!r}): the number of steps to skip must be at least 0")
        self.executor, self.mesh = executor, mesh
        self.steps, self.skip = steps, skip
        self.prediction, self.quiet = prediction, quiet
        schedule = executor.source.training(executor.source.microbatches)
        versions = {"penstock": __version__, "torch": torch.__version__, "python": platform.python_version()}
        self.trace = Trace(schedule, tuple(executor.edges), plan=json.loads(plan.to_json()), versions=versions)

    def __enter__(self) -> Trace:
        executor = self.executor
        if executor.recorder is not None:
            raise PlanError("this pipeline is being traced already: end that trace before you begin another one")
        if self.trace.tracks:
            raise PlanError("this trace has ended: call pipe.trace() again for a new one")
        devices = [stage.device for stage in executor.stages.values()]
        self.recorder = StepRecorder(devices, self.steps, self.skip, clock)
        executor.begin_recording(self.recorder)
        return self.trace

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.executor.recorder = None
        self.recorder.finish(error)
        try:
            records, missing = self.executor.end_recording(self.recorder, error, self._process_record)
        except BaseException:
            self._fill([self._process_record()], "the records of other ranks could not be collected")
            raise
        self._fill(records, missing)
        if missing is None:
            self.trace.prediction = self.prediction()
            if error is None and not self.quiet and is_rank0() and self.trace.comparison is not None:
                print0(self.trace.comparison)

    def _process_record(self) -> ProcessRecord:
        executor, recorder, mesh = self.executor, self.recorder, self.mesh
        if mesh is not None:
            replica, error = mesh.data_rank * mesh.tensor + mesh.tensor_rank, recorder.aligned.error
            tracks = [Track(mesh.rank, replica, mesh.pipe_rank, *_device(mesh.device), error)]
        else:
            first = {executor.placement[s]: stage for s, stage in sorted(executor.stages.items(), reverse=True)}
            tracks = [Track(rank, 0, rank, *_device(stage.device)) for rank, stage in sorted(first.items())]
        places = {track.place: number for number, track in enumerate(tracks)}

        def seconds(at: int) -> float:
            return recorder.aligned(at - recorder.begin)

        runs = [
            (run.kind, run.failed, rank_records(recorder, run, seconds, executor.placement, places))
            for run in recorder.runs
            if run.end
        ]
        return tracks, dict(recorder.saved), runs

    def _fill(self, shares: Sequence[ProcessRecord], missing: str | None = None) -> None:
        """Fill the trace with the records of one or of all processes."""
        trace = self.trace
        found: dict[tuple[int, str], list[tuple[bool, list[RankRecord]]]] = {}
        tracks: list[Track] = []
        for own, _, runs in shares:
            for number, (kind, failed, parts) in enumerate(runs):
                moved = [replace(part, track=part.track + len(tracks)) for part in parts]
                found.setdefault((number, kind), []).append((failed, moved))
            tracks += own
        steps = [
            StepRecord(number, kind, tuple(p for _, parts in rows for p in parts), any(failed for failed, _ in rows))
            for (number, kind), rows in sorted(found.items())
        ]
        trace.tracks = tuple(tracks)
        trace.saved = {stage: size for _, saved, _ in shares for stage, size in saved.items()}
        trace.steps = with_memory(steps, trace.saved)
        trace.memory = "allocated" if any("cuda" in track.device for track in tracks) else "saved"
        trace.missing = missing


def _device(device: torch.device) -> tuple[str, str]:
    """The name of a device, and the UUID of a GPU."""
    if device.type != "cuda":
        return str(device), ""
    properties = torch.cuda.get_device_properties(device)
    return f"{device} {properties.name}", str(properties.uuid)
