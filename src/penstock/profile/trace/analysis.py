"""Analysis of recorded steps: bubbles, costs of actions and edges, and the prediction beside the measurement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from penstock.errors import PenstockError, PlanError
from penstock.format import format_size, format_table
from penstock.profile.trace.records import ActionRecord, RankRecord, SendRecord, StepRecord, Track, WaitRecord
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Edge, Schedule
from penstock.schedule.simulate import Prediction, Simulation, simulate

PREDICTION_SOURCES = {
    "plan": "predicted by the plan",
    "costs": "predicted from the pipeline's costs",
    "replan": "predicted by replan",
    "trace": "simulated with the times of this trace",
}

_NO_STEP = (
    "this trace has no whole step: its block must end before it is used, and at least one step must come in it after "
    "those that are skipped"
)


@dataclass(repr=False)
class TraceData:
    """The records of all ranks, and the numbers that follow from them.

    Times are in seconds since the trace began, on the first rank's clock. ``memory`` says how the memory of an action
    is counted: on GPUs the bytes ``"allocated"`` on its device; else the bytes ``"saved"`` for pending backwards, where
    each micro-batch in flight counts as many as the first one of its stage (``saved``).
    """

    schedule: Schedule  # of a step with all micro-batches
    edges: tuple[Edge, ...]
    plan: Mapping[str, Any] = field(default_factory=dict)  # as written by Plan.save
    tracks: tuple[Track, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    saved: Mapping[int, int] = field(default_factory=dict)
    memory: str = "saved"
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None  # why it has the records of one rank only
    prediction: Prediction | None = None  # of the plan or costs that the pipeline was made from

    @property
    def replicas(self) -> list[int]:
        """The numbers of the pipelines: several with data or tensor parallelism."""
        return sorted({track.replica for track in self.tracks})

    def replica(self, number: int) -> list[int]:
        """The tracks of one pipeline."""
        return [t for t, track in enumerate(self.tracks) if track.replica == number]

    @property
    def bubble(self) -> float | None:
        """The fraction of a step, from its first action to its last, in which ranks work on no action.

        The mean over ranks and the median over steps; None if no whole step was recorded.
        """
        return _median(_bubble(self, step) for step in typical_steps(self))

    @property
    def seconds(self) -> float | None:
        """The median duration of a step."""
        return _median(step.seconds for step in typical_steps(self))

    @property
    def predicted(self) -> Prediction | None:
        """The predicted step, and its source ``by``: a plan, costs, ``replan``, or a simulation of this trace.

        The simulation is used if the pipeline has no prediction, or if other steps were recorded than it was made for.
        None if no whole step was recorded.
        """
        steps = typical_steps(self)
        if self.missing is not None or not steps or steps[0].kind != "step":
            return None
        try:
            if self.prediction is not None and self.order.num_microbatches == self.schedule.num_microbatches:
                return self.prediction
            return Prediction(self.simulation().makespan, "trace")
        except PenstockError:  # some ranks have no actions
            return None

    @property
    def comparison(self) -> str | None:
        """One line with the predicted and the measured time and memory; None without a prediction."""
        text, seconds = prediction_text(self), self.seconds
        return None if text is None or seconds is None else f"step {milliseconds(seconds)} measured, {text}"

    @property
    def shared_gpus(self) -> list[list[int]]:
        """For each GPU that several ranks share: their tracks."""
        found: dict[str, list[int]] = {}
        for t, track in enumerate(self.tracks):
            if track.gpu:
                found.setdefault(track.gpu, []).append(t)
        return [tracks for tracks in found.values() if len(tracks) > 1]

    @property
    def order(self) -> Schedule:
        """The schedule that most of the recorded steps ran."""
        steps = typical_steps(self)
        if not steps:
            raise PlanError(_NO_STEP)
        places = [track.place for track in self.tracks]
        tracks = self.replica(self.replicas[0])
        return steps[0].schedule(self.schedule.name, self.schedule.placement, places, tracks)

    def simulation(self) -> Simulation:
        """The recorded steps, simulated with the median time of each action and edge."""
        return simulate(self.order, self.costs(), self.edges)

    def costs(self) -> Costs:
        """The median time of each kind of action per stage, in seconds, and of each edge between ranks.

        If backwards are not split, ``i`` and ``w`` are half of one each; if they are, ``b`` is the sum of both. The
        latency of an edge is the time from the end of an action until a waiting rank has its message, which includes
        the transfer; it is 0 if no rank ever waited. ``activation`` is the number of bytes saved.
        """
        steps = [step for step in self.steps if not step.failed]
        times: dict[tuple[str, int], list[float]] = defaultdict(list)
        for step in steps:
            for part in step.parts:
                for action in part.actions:
                    times[action.action.kind, action.action.stage].append(action.seconds)
        stages = range(self.schedule.num_stages)
        if not times:
            raise PlanError(_NO_STEP)
        missing = [stage for stage in stages if not times["F", stage]]
        if missing:
            why = "" if self.missing is None else f", for it has one rank's part only: {self.missing}"
            raise PlanError(f"this trace has no forward of stages {missing}{why}")
        latencies: dict[Edge, list[float]] = defaultdict(list)
        sizes: dict[Edge, list[float]] = defaultdict(list)
        for message in (message for step in steps for message in traced_messages(self, step)):
            if message.seconds is not None:
                latencies[message.edge].append(message.seconds)
            if message.source.action.kind == "F":
                sizes[message.edge].append(float(message.sent.bytes))
        found = {kind: [_median(times[kind, stage]) for stage in stages] for kind in "FRBIW"}
        halves = [None if b is None else b / 2 for b in found["B"]]
        i, w = ([_first(x, half) for x, half in zip(found[kind], halves, strict=True)] for kind in "IW")
        return Costs(
            f=tuple(_first(f) for f in found["F"]),
            i=tuple(i),
            w=tuple(w),
            b=tuple(_first(b, x + y) for b, x, y in zip(found["B"], i, w, strict=True)),
            r=None if not any(found["R"]) else tuple(_first(r, f) for r, f in zip(found["R"], found["F"], strict=True)),
            latency={edge: _first(_median(latencies[edge])) for edge in self.edges},
            bytes={edge: _first(_median(sizes[edge])) for edge in self.edges},
            activation=tuple(float(self.saved.get(stage, 0)) for stage in stages),
        )

    def __str__(self) -> str:
        return _summary(self)

    def __repr__(self) -> str:
        text = f"Trace({len(self.steps)} steps of {len(self.tracks)} ranks, schedule {self.schedule.name!r})"
        return text if self.comparison is None else f"{text[:-1]}: {self.comparison})"


# ── messages and steps ───────────────────────────────────────────────────────────────────────────────────────────


class TracedMessage(NamedTuple):
    """A message from one action to another, between two ranks or within one."""

    source: ActionRecord
    sent: SendRecord
    target: ActionRecord
    source_track: int
    target_track: int
    wait: WaitRecord | None  # of the receiver; None within a rank

    @property
    def edge(self) -> Edge:
        """The edge of the plan: from the earlier stage to the later one."""
        ends = self.source.action.stage, self.target.action.stage
        return ends if self.source.action.kind == "F" else ends[::-1]

    @property
    def seconds(self) -> float | None:
        """The time in transit; known if the receiver was waiting when it was sent."""
        sent = max(self.sent.start, self.source.end)
        if self.wait is None or self.wait.start > sent:
            return None
        return max(0.0, self.wait.end - sent)


def traced_messages(trace: TraceData, step: StepRecord) -> Iterator[TracedMessage]:
    """All messages of a step whose source and target are recorded."""
    for replica in trace.replicas:
        parts = step.of(trace.replica(replica))
        targets: dict[tuple[bool, int, int], tuple[RankRecord, ActionRecord]] = {}
        for part in parts:
            for action in part.actions:
                stage, kind, microbatch = action.action
                if kind in "FBI":
                    targets[kind == "F", stage, microbatch] = part, action
        for part in parts:
            for action in part.actions:
                stage, kind, microbatch = action.action
                for sent in action.sends:
                    found = targets.get((kind == "F", sent.target, microbatch))
                    if found is not None:
                        there, target = found
                        waits = [w for w in target.waits if w.what == "message" and w.peer == stage]
                        wait = waits[0] if waits else None
                        yield TracedMessage(action, sent, target, part.track, there.track, wait)


def typical_steps(trace: TraceData) -> list[StepRecord]:
    """The whole steps that ran the same actions as most others; training steps, if there are any."""
    whole = [step for step in trace.steps if not step.failed and step.of(range(len(trace.tracks)))]
    whole = [step for step in whole if step.kind == "step"] or whole
    groups: dict[object, list[StepRecord]] = defaultdict(list)
    for step in whole:
        actions = [(part.track, tuple(one.action for one in part.actions)) for part in step.parts]
        groups[step.kind, tuple(actions)].append(step)
    return max(groups.values(), key=len, default=[])


def _bubble(trace: TraceData, step: StepRecord) -> float | None:
    busy = total = 0.0
    for replica in trace.replicas:
        tracks = trace.replica(replica)
        parts = step.of(tracks)
        if parts:
            first = min(part.actions[0].start for part in parts)
            last = max(action.end for part in parts for action in part.actions)
            busy += sum(part.busy for part in parts)
            total += (last - first) * len(tracks)
    return max(0.0, 1 - busy / total) if total else None


def _median(numbers: Iterable[float | None]) -> float | None:
    """The median of the numbers that are known, at least 0."""
    known = [number for number in numbers if number is not None]
    return max(0.0, median(known)) if known else None


def _first(*numbers: float | None) -> float:
    """The first number that is not None, else 0."""
    return next((number for number in numbers if number is not None), 0.0)


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def plural(number: int, noun: str) -> str:
    """As in ``3 stages``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def milliseconds(seconds: float) -> str:
    """As in ``1.23 ms``; in seconds from 1 s on."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def prediction_text(trace: TraceData) -> str | None:
    """The prediction as text, to be printed beside the measured time of a step."""
    predicted, seconds = trace.predicted, trace.seconds
    if predicted is None or seconds is None:
        return None
    text = f"{milliseconds(predicted.seconds)} {prediction_source(predicted, seconds)}"
    expected = predicted.saved if trace.memory == "saved" else predicted.memory
    peaks: dict[int, int] = {}  # by track
    for step in typical_steps(trace):
        for part in step.parts:
            for action in part.actions:
                if action.memory is not None:
                    peaks[part.track] = max(peaks.get(part.track, 0), action.memory)
    if expected is None or not peaks or len(expected) != trace.schedule.num_ranks:
        return text
    fullest = max(peaks, key=lambda track: peaks[track])
    track, size = trace.tracks[fullest], expected[trace.tracks[fullest].place]
    kind = "saved for backwards" if trace.memory == "saved" else "memory"
    there = f"{format_size(peaks[fullest])} measured, {format_size(size)} predicted on rank {track.rank}"
    return f"{text}; {kind} {there} ({_difference(size, peaks[fullest])})"


def prediction_source(prediction: Prediction, seconds: float) -> str:
    """The source of a prediction, and its distance from the measured ``seconds``."""
    return f"{PREDICTION_SOURCES[prediction.by]} ({_difference(prediction.seconds, seconds)})"


def _difference(expected: float, measured: float) -> str:
    share = expected / measured - 1 if measured else 0.0
    return "the same" if abs(share) < 0.0005 else f"{abs(share):.1%} {'more' if share > 0 else 'less'}"


def _summary(trace: TraceData) -> str:
    """The duration and bubble of a step, and the time of each rank by activity."""
    schedule = trace.schedule
    head = (
        f"trace of {plural(len(trace.steps), 'step')}: {schedule.name}, {plural(schedule.num_stages, 'stage')} on "
        f"{plural(schedule.num_ranks, 'rank')}, {plural(schedule.num_microbatches, 'micro-batch')}"
    )
    if len(trace.replicas) > 1:
        head += f", {len(trace.replicas)} replicas"
    lines = [head] + ([] if trace.missing is None else [f"one rank's part only: {trace.missing}"])
    steps = typical_steps(trace)
    if not steps:
        return "\n".join([*lines, "no whole step"])
    times = [step.seconds for step in steps]
    middle, least, most = (milliseconds(pick(times)) for pick in (median, min, max))
    lines.append(f"step    {middle} (median of {len(times)}; {least} to {most})")
    lines += [f"        {text}" for text in [prediction_text(trace)] if text]
    if trace.bubble is not None:
        lines.append(f"bubble  {trace.bubble:.1%} measured")
        with suppress(PenstockError):  # records of one rank only, or of half of a call
            lines[-1] += f", {trace.simulation().bubble:.1%} simulated with the median time of each action"
    for tracks in trace.shared_gpus:
        lines.append(
            f"ranks {', '.join(str(trace.tracks[t].rank) for t in tracks)} share a GPU, its time and its memory"
        )
    rows: list[tuple[str, ...]] = []
    for t, track in enumerate(trace.tracks):
        parts = [part for step in steps for part in step.of([t])]
        if parts:
            known = [[part.busy, part.waited, part.around] for part in parts]
            other = [max(0.0, p.end - p.begin - sum(row)) for p, row in zip(parts, known, strict=True)]
            medians = [median(column) for column in (*zip(*known, strict=True), other)]
            stages = " ".join(map(str, schedule.stages_of(track.place)))
            rows.append((str(track.rank), track.device, stages, *map(milliseconds, medians)))
    heads = ("rank", "device", "stages", "busy", "waits", "around", "other")
    return "\n".join([*lines, "", *format_table(heads, rows, right=range(3, 7))])
