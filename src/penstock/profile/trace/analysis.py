"""``TraceData``: the actions of every rank in some steps, with statistics, text and file formats."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any, Self

from penstock import _registry
from penstock.errors import PenstockError, PlanError
from penstock.format import count_noun, format_size, format_table
from penstock.json_schema import Maybe, check_schema, parse_json
from penstock.profile.trace.records import ActionRecord, RankRecord, StepRecord, TracedMessage, Track
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import ACTION_NAMES, Action, Edge, Schedule
from penstock.schedule.simulate import Prediction, Simulation, simulate
from penstock.split.plan import Plan

FORMAT = 1

_ACTION_SCHEMA = (str, float, float, Maybe(float), Maybe(int), [(int, float, float, str)], [(int, float, float, int)])
_PART_SCHEMA = {
    "track": int,
    "begin": float,
    "end": float,
    "actions": [_ACTION_SCHEMA],
    "spans": [(str, float, float)],
}
_SCHEMA = {
    "schedule": {"name": str, "placement": [int], "orders": [str], "microbatches": int},
    "edges": [(int, int)],
    "plan": {},
    "versions": {str: str},
    "memory": str,
    "saved": {str: int},
    "missing": Maybe(str),
    "prediction": Maybe(
        {"seconds": float, "by": str, "memory": Maybe([float]), "saved": Maybe([float]), "samples": Maybe(int)}
    ),
    "tracks": [{"rank": int, "replica": int, "place": int, "device": str, "gpu": str, "clock_error": float}],
    "steps": [{"number": int, "kind": str, "failed": bool, "parts": [_PART_SCHEMA]}],
}

PREDICTION_SOURCES = {
    "plan": "predicted by the plan",
    "costs": "predicted from the pipeline's costs",
    "replan": "predicted by replan",
    "trace": "simulated with the times of this trace",
}

_NO_STEP = (
    "this trace has no complete step: use it after its block has ended, and run at least one step in the block after "
    "the skipped ones"
)


@dataclass(repr=False)
class TraceData:
    """The records of ``with pipe.trace() as trace``, and statistics of them.

    The trace is filled when the block has ended. Under a mesh every rank gets the records of all ranks. Times are in
    seconds since the trace began, on the clock of the first rank. ``memory`` is the kind of memory counts: on GPUs the
    bytes ``"allocated"`` on the device; otherwise the bytes ``"saved"`` for pending backwards, where each micro-batch
    in flight counts with the bytes of the first one of its stage (``saved``).
    """

    schedule: Schedule  # of a step with all micro-batches
    edges: tuple[Edge, ...]
    plan: Mapping[str, Any] = field(default_factory=dict)  # the JSON data of Plan.save
    tracks: tuple[Track, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    saved: Mapping[int, int] = field(default_factory=dict)
    memory: str = "saved"
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None  # the reason if it has the records of one rank only
    prediction: Prediction | None = None  # from the plan or the costs of the pipeline

    @property
    def replicas(self) -> dict[int, list[int]]:
        """The tracks of each pipeline, by its number; several pipelines with data or tensor parallelism."""
        found: dict[int, list[int]] = {number: [] for number in sorted({track.replica for track in self.tracks})}
        for t, track in enumerate(self.tracks):
            found[track.replica].append(t)
        return found

    @property
    def bubble(self) -> float | None:
        """The idle fraction of a step, from its first action to its last.

        The mean over ranks and the median over steps; None if no complete step was recorded.
        """
        return _median(self.step_bubble(step) for step in self.typical_steps())

    @property
    def seconds(self) -> float | None:
        """The median duration of a step."""
        return _median(step.seconds for step in self.typical_steps())

    @property
    def predicted(self) -> Prediction | None:
        """The predicted step, and its source ``by``: a plan, costs, ``replan``, or a simulation of this trace.

        The simulation is used if the pipeline has no prediction, or one for another number of micro-batches. None if no
        complete training step was recorded.
        """
        steps = self.typical_steps()
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
        """One line with the measured and the predicted time and memory; None without a prediction."""
        text, seconds = prediction_text(self), self.seconds
        return None if text is None or seconds is None else f"step {milliseconds(seconds)} measured, {text}"

    @property
    def shared_gpus(self) -> list[list[int]]:
        """The tracks of each GPU that several ranks share."""
        found: dict[str, list[int]] = {}
        for t, track in enumerate(self.tracks):
            if track.gpu:
                found.setdefault(track.gpu, []).append(t)
        return [tracks for tracks in found.values() if len(tracks) > 1]

    @property
    def order(self) -> Schedule:
        """The schedule of most of the recorded steps."""
        steps = self.typical_steps()
        if not steps:
            raise PlanError(_NO_STEP)
        return self.step_order(steps[0], min(self.replicas))

    def step_order(self, step: StepRecord, replica: int) -> Schedule:
        """The order of actions of one replica in a step."""
        placement = self.schedule.placement
        orders: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
        for part in step.of(self.replicas[replica]):
            orders[self.tracks[part.track].place] = [done.action for done in part.actions]
        count = max((action.microbatch + 1 for order in orders for action in order), default=0)
        return Schedule.of(self.schedule.name, placement, orders, count)

    def typical_steps(self) -> list[StepRecord]:
        """The complete steps with the most common sequence of actions; only training steps, if there are any."""
        whole = [step for step in self.steps if not step.failed and step.of(range(len(self.tracks)))]
        whole = [step for step in whole if step.kind == "step"] or whole
        groups: dict[object, list[StepRecord]] = defaultdict(list)
        for step in whole:
            actions = [(part.track, tuple(one.action for one in part.actions)) for part in step.parts]
            groups[step.kind, tuple(actions)].append(step)
        return max(groups.values(), key=len, default=[])

    def messages(self, step: StepRecord) -> Iterator[TracedMessage]:
        """All messages of a step with a recorded source and target."""
        for parts in map(step.of, self.replicas.values()):
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

    def step_bubble(self, step: StepRecord) -> float | None:
        busy = total = 0.0
        for tracks in self.replicas.values():
            parts = step.of(tracks)
            if parts:
                first = min(part.actions[0].start for part in parts)
                last = max(action.end for part in parts for action in part.actions)
                busy += sum(part.busy for part in parts)
                total += (last - first) * len(tracks)
        return max(0.0, 1 - busy / total) if total else None

    def simulation(self) -> Simulation:
        """The recorded steps, simulated with the median time of each action and edge."""
        return simulate(self.order, self.costs(), self.edges)

    def costs(self) -> Costs:
        """The median time of each kind of action per stage, in seconds, and of each edge between ranks.

        If backwards are not split, ``i`` and ``w`` are half of a backward each; if they are, ``b`` is the sum of both.
        The latency of an edge is the time from the end of an action to the arrival of its message at a waiting rank,
        which includes the transfer. It is 0 if no rank waited. ``activation`` is the number of bytes saved.
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
            why = "" if self.missing is None else f", because it has the records of one rank only: {self.missing}"
            raise PlanError(f"this trace has no forward of stages {missing}{why}")
        latencies: dict[Edge, list[float]] = defaultdict(list)
        sizes: dict[Edge, list[float]] = defaultdict(list)
        for message in (message for step in steps for message in self.messages(step)):
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
        """The duration and bubble of a step, and the time of each rank by activity."""
        schedule = self.schedule
        head = (
            f"trace of {count_noun(len(self.steps), 'step')}: {schedule.name}, "
            f"{count_noun(schedule.num_stages, 'stage')} on {count_noun(schedule.num_ranks, 'rank')}, "
            f"{count_noun(schedule.num_microbatches, 'micro-batch')}"
        )
        if len(self.replicas) > 1:
            head += f", {len(self.replicas)} replicas"
        lines = [head] + ([] if self.missing is None else [f"records of one rank only: {self.missing}"])
        steps = self.typical_steps()
        if not steps:
            return "\n".join([*lines, "no complete step"])
        times = [step.seconds for step in steps]
        middle, least, most = (milliseconds(pick(times)) for pick in (median, min, max))
        lines.append(f"step    {middle} (median of {len(times)}; {least} to {most})")
        lines += [f"        {text}" for text in [prediction_text(self)] if text]
        if self.bubble is not None:
            lines.append(f"bubble  {self.bubble:.1%} measured")
            with suppress(PenstockError):  # only the records of one rank, or of the forward of a call
                lines[-1] += f", {self.simulation().bubble:.1%} simulated with the median time of each action"
        for tracks in self.shared_gpus:
            ranks = ", ".join(str(self.tracks[t].rank) for t in tracks)
            lines.append(f"ranks {ranks} share a GPU")
        rows: list[tuple[str, ...]] = []
        for t, track in enumerate(self.tracks):
            parts = [part for step in steps for part in step.of([t])]
            if parts:
                known = [[part.busy, part.waited, sum(span.end - span.start for span in part.spans)] for part in parts]
                other = [max(0.0, p.end - p.begin - sum(row)) for p, row in zip(parts, known, strict=True)]
                medians = [median(column) for column in (*zip(*known, strict=True), other)]
                stages = " ".join(map(str, schedule.stages_of(track.place)))
                rows.append((str(track.rank), track.device, stages, *map(milliseconds, medians)))
        heads = ("rank", "device", "stages", "busy", "waits", "spans", "other")
        return "\n".join([*lines, "", *format_table(heads, rows, right=range(3, 7))])

    def __repr__(self) -> str:
        text = f"Trace({len(self.steps)} steps of {len(self.tracks)} ranks, schedule {self.schedule.name!r})"
        return text if self.comparison is None else f"{text[:-1]}: {self.comparison})"

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, path: str | Path) -> None:
        """Write a JSON file."""
        Path(path).write_text(json.dumps(self.to_data()))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a JSON file written by ``save``."""
        data = parse_json(Path(path).read_bytes(), f"{path} is not a saved trace, nor JSON at all")
        if not isinstance(data, dict) or "penstock_trace" not in data:
            raise PlanError(f"{path} is not a saved trace: load a file written by trace.save, not by trace.chrome")
        if data["penstock_trace"] != FORMAT:
            raise PlanError(
                f"{path}: trace format {data['penstock_trace']!r} is not supported: expected {FORMAT}. Read it with "
                "the version of penstock that wrote it, or record it again"
            )
        try:
            return cls.from_data(data)
        except PenstockError as error:
            raise PlanError(f"{path} is not a saved trace: {error}") from error

    def to_data(self) -> dict[str, Any]:
        orders = [" ".join(map(str, order)) for order in self.schedule.orders]
        return {
            "penstock_trace": FORMAT,
            "schedule": {
                "name": self.schedule.name,
                "placement": list(self.schedule.placement),
                "orders": orders,
                "microbatches": self.schedule.num_microbatches,
            },
            "edges": [list(edge) for edge in self.edges],
            "plan": dict(self.plan),
            "versions": dict(self.versions),
            "memory": self.memory,
            "saved": {str(stage): size for stage, size in self.saved.items()},
            "missing": self.missing,
            "prediction": None if self.prediction is None else asdict(self.prediction),
            "tracks": [asdict(track) for track in self.tracks],
            "steps": [step.to_data() for step in self.steps],
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Self:
        check_schema(data, _SCHEMA, "the trace")
        given = data["schedule"]
        orders = [[Action.parse(name) for name in order.split()] for order in given["orders"]]
        plan, predicted = data["plan"], data.get("prediction")
        if unknown := data["saved"].keys() - set(map(str, range(len(given["placement"])))):
            raise PlanError(f"the trace has saved bytes of stages {sorted(unknown)}, which do not exist")
        if plan:
            Plan._from_data(plan)  # raises for an invalid plan
        if predicted is not None:
            memory, saved = (
                None if predicted.get(key) is None else tuple(predicted[key]) for key in ("memory", "saved")
            )
            predicted = Prediction(predicted["seconds"], predicted["by"], memory, saved, predicted.get("samples"))
            if predicted.by not in PREDICTION_SOURCES:
                raise PlanError(
                    f"the trace has a prediction by {predicted.by!r}: it must be in {[*PREDICTION_SOURCES]}"
                )
        trace = cls(
            Schedule.of(given["name"], given["placement"], orders, given["microbatches"]),
            tuple((src, dst) for src, dst in data["edges"]),
            plan=plan,
            tracks=tuple(Track(**{one.name: track[one.name] for one in fields(Track)}) for track in data["tracks"]),
            steps=tuple(StepRecord.from_data(step) for step in data["steps"]),
            saved={int(stage): size for stage, size in data["saved"].items()},
            memory=data["memory"],
            versions=data["versions"],
            missing=data.get("missing"),
            prediction=predicted,
        )
        tracks, stages = len(trace.tracks), trace.schedule.num_stages
        ranks = min(len(orders), max(trace.schedule.placement, default=-1) + 1)
        parts = [part for step in trace.steps for part in step.parts]
        for what, numbers, count in (
            ("parts of tracks", [part.track for part in parts], tracks),
            ("stages or tracks of ranks", [*trace.schedule.placement, *(t.place for t in trace.tracks)], ranks),
            ("edges of stages", [stage for edge in trace.edges for stage in edge], stages),
            ("actions of stages", [done.action.stage for part in parts for done in part.actions], stages),
        ):
            if any(not 0 <= number < count for number in numbers):
                raise PlanError(f"the trace has {what} that do not exist: there are {count}")
        return trace

    def chrome(self, path: str | Path) -> None:
        """Write a file for https://ui.perfetto.dev or chrome://tracing: one track per rank, one arrow per message."""
        Path(path).write_text(json.dumps(_chrome_trace(self)))

    def table(self, path: str | Path | None = None) -> Sequence[Mapping[str, Any]]:
        """One row per action; with ``path`` also written as ``.json`` or, with pyarrow, as ``.parquet``.

        ``received`` is the number of bytes of its input messages; ``waited_for`` is the peer stage of its longest wait.
        """
        rows: list[dict[str, Any]] = []
        for step in self.steps:
            received: Counter[int] = Counter()
            for message in self.messages(step):
                received[id(message.target)] += message.sent.bytes
            for part in step.parts:
                track = self.tracks[part.track]
                for done in part.actions:
                    longest = max(done.waits, key=lambda wait: wait.end - wait.start, default=None)
                    row = {"step": step.number, "run": step.kind, "failed": step.failed, "replica": track.replica}
                    row |= {"rank": track.rank, "action": str(done.action), **done.action._asdict()}
                    row |= {"start": done.start, "end": done.end, "seconds": done.seconds, "launched": done.launched}
                    row |= {"waited": done.waited, "waited_for": None if longest is None else longest.peer}
                    row |= {"sent": sum(sent.bytes for sent in done.sends), "received": received[id(done)]}
                    rows.append({**row, "memory": done.memory})
        if path is None:
            return rows
        target = Path(path)
        if target.suffix == ".json":
            target.write_text(json.dumps(rows))
        elif target.suffix == ".parquet":
            try:
                import pyarrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
                import pyarrow.parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
            except ImportError as error:
                raise PlanError(".parquet files need pyarrow: pip install pyarrow, or write .json") from error
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), target)
        else:
            raise PlanError(f"a table is written to a .json or .parquet file, not to {target.name!r}")
        return rows

    def _repr_html_(self) -> str:
        return str(_registry.viz().trace_html(self))


def _median(numbers: Iterable[float | None]) -> float | None:
    """The median of the numbers other than None, at least 0."""
    known = [number for number in numbers if number is not None]
    return max(0.0, median(known)) if known else None


def _first(*numbers: float | None) -> float:
    """The first number other than None, or 0."""
    return next((number for number in numbers if number is not None), 0.0)


def milliseconds(seconds: float) -> str:
    """Such as ``1.23 ms``; from 1 s on in seconds."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def prediction_text(trace: TraceData) -> str | None:
    """The prediction as text, with its difference from the measurement."""
    predicted, seconds = trace.predicted, trace.seconds
    if predicted is None or seconds is None:
        return None
    text = f"{milliseconds(predicted.seconds)} {prediction_source(predicted, seconds)}"
    expected = predicted.saved if trace.memory == "saved" else predicted.memory
    peaks: dict[int, int] = {}  # by track
    for step in trace.typical_steps():
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
    """The source of a prediction, and its difference from the measured ``seconds``."""
    return f"{PREDICTION_SOURCES[prediction.by]} ({_difference(prediction.seconds, seconds)})"


def _difference(expected: float, measured: float) -> str:
    share = expected / measured - 1 if measured else 0.0
    return "the same" if abs(share) < 0.0005 else f"{abs(share):.1%} {'more' if share > 0 else 'less'}"


# ── Chrome's and Perfetto's JSON ─────────────────────────────────────────────────────────────────────────────────


def _chrome_trace(trace: TraceData) -> dict[str, Any]:
    """The contents of the file, with times in microseconds from 0 on: one process per replica, one thread per rank.

    rank 0  ▕▔0F0▔▏▕▔0F1▔▏                       an "X" event for each action and each wait;
               ╲ s    ╲                          an "s" and an "f" event with the same id are the ends of an arrow,
    rank 1    f ▕▔1F0▔▏▕▔1F1▔▏                   each within its action
    """
    # All ids are distinct and not 0: Perfetto treats thread 0 as the main thread of its process.
    replicas, count = trace.replicas, len(trace.tracks)
    ranks = [{"pid": 1 + track.replica, "tid": 1 + len(replicas) + t} for t, track in enumerate(trace.tracks)]
    rows = {replica: {"pid": 1 + replica, "tid": 1 + len(replicas) + count + replica} for replica in replicas}
    titles = []
    for replica, where in rows.items():
        name = "pipeline" if list(replicas) == [0] else f"replica {replica}"
        titles.append({"ph": "M", "name": "process_name", **where, "args": {"name": name}})
        titles.append({"ph": "M", "name": "thread_name", **where, "args": {"name": "steps"}})
    for track, where in zip(trace.tracks, ranks, strict=True):
        stages = trace.schedule.stages_of(track.place)
        name = f"rank {track.rank}: stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))} on {track.device}"
        titles.append({"ph": "M", "name": "thread_name", **where, "args": {"name": name}})
    events: list[dict[str, Any]] = []

    def add(name: str, category: str, start: float, end: float, where: dict[str, int], **args: Any) -> None:
        event = {"ph": "X", "name": name, "cat": category, "ts": start * 1e6, "dur": max(0.0, end - start) * 1e6}
        events.append({**event, **where, "args": args})

    for step in trace.steps:
        for part in step.parts:
            track, where = trace.tracks[part.track], ranks[part.track]
            if track.place == 0:  # on the first rank only: it may begin the next step before others end this one
                add(step.name, "step", part.begin, part.end, rows[track.replica])
            for done in part.actions:
                stage, kind, microbatch = done.action
                for wait in done.waits:
                    before = {"stage": wait.peer, "before": str(done.action)}
                    add(f"wait for {wait.what}", "wait", wait.start, wait.end, where, **before)
                about = {"stage": stage, "microbatch": microbatch, "step": step.number, "waited": done.waited * 1e6}
                about["bytes sent"] = sum(sent.bytes for sent in done.sends)
                if done.launched is not None:
                    about["launched"] = done.launched * 1e6
                add(str(done.action), ACTION_NAMES[kind], done.start, done.end, where, **about)
                if done.memory is not None:
                    counter = {"ph": "C", "name": f"memory {trace.memory} of rank {track.rank}", "ts": done.end * 1e6}
                    events.append({**counter, **where, "args": {"bytes": done.memory}})
            for span in part.host_spans:
                add(span.name, "outside", span.start, span.end, where)
        for message in trace.messages(step):
            sent_at = message.source.start + 0.5 * message.source.seconds
            received_at = max(sent_at, message.target.start + 0.5 * message.target.seconds)  # clocks may be inexact
            arrow = {"name": "message", "cat": "edge", "id": len(events)}
            arrow["args"] = {"bytes": message.sent.bytes, "step": step.number}
            events.append({"ph": "s", **arrow, "ts": sent_at * 1e6, **ranks[message.source_track]})
            events.append({"ph": "f", "bp": "e", **arrow, "ts": received_at * 1e6, **ranks[message.target_track]})
    first = min((event["ts"] for event in events), default=0.0)
    for event in events:
        event["ts"] = round(event["ts"] - min(0.0, first), 3)
        if "dur" in event:
            event["dur"] = round(event["dur"], 3)
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    others = {"schedule": trace.schedule.name, "memory": trace.memory, **trace.versions}
    return {"traceEvents": [*titles, *events], "displayTimeUnit": "ms", "otherData": others}
