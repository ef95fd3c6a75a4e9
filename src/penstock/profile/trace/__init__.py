"""``Trace``: the actions of every rank in some steps, with their times. Plain data, with files and reports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import _registry
from penstock.errors import PlanError
from penstock.profile.trace.analysis import PREDICTION_SOURCES, TraceData, traced_messages
from penstock.profile.trace.records import ACTION_NAMES, ActionRecord, StepRecord, Track
from penstock.schedule.schedule import Action, Schedule
from penstock.schedule.simulate import Prediction
from penstock.split.plan import Plan

if TYPE_CHECKING:
    from penstock.profile.report.findings import Findings

__all__ = ["Trace"]

FORMAT = 1


@dataclass(repr=False)
class Trace(TraceData):
    """The records of ``with pipe.trace() as trace``, available when the block has ended.

    Under a mesh every rank gets the records of all ranks; ``missing`` says why if it has those of one rank only. See
    ``TraceData`` for its fields and the numbers that follow from them.
    """

    def save(self, path: str | Path) -> None:
        """Write a JSON file."""
        Path(path).write_text(json.dumps(self.to_data()))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a JSON file written by ``save``."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        except ValueError as error:
            raise PlanError(f"{path} is not a saved trace, nor JSON at all: {error}") from error
        if not isinstance(data, dict) or "penstock_trace" not in data:
            raise PlanError(f"{path} is not a saved trace: trace.save writes them, and trace.chrome does not")
        try:
            return cls.from_data(data)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise PlanError(f"{path} is not a saved trace: {type(error).__name__}: {error}") from error

    def to_data(self) -> dict[str, Any]:
        """A dict for JSON."""
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
    def from_data(cls, data: dict[str, Any]) -> Trace:
        """The inverse of ``to_data``."""
        if data["penstock_trace"] != FORMAT:
            raise PlanError(
                f"trace format {data['penstock_trace']!r} cannot be read here: expected {FORMAT}. Read it with the "
                "version of penstock that wrote it, or record it again"
            )
        given = data["schedule"]
        orders = [[Action.parse(name) for name in order.split()] for order in given["orders"]]
        plan, predicted = dict(data["plan"]), data.get("prediction")
        if plan:
            Plan._from_data(plan)  # raises for an invalid plan
        if predicted is not None:
            memory, saved = (None if predicted[key] is None else tuple(predicted[key]) for key in ("memory", "saved"))
            predicted = Prediction(float(predicted["seconds"]), predicted["by"], memory, saved, predicted["samples"])
            if predicted.by not in PREDICTION_SOURCES:
                raise PlanError(
                    f"the trace has a prediction by {predicted.by!r}: it must be in {[*PREDICTION_SOURCES]}"
                )
        trace = cls(
            Schedule.of(str(given["name"]), list(map(int, given["placement"])), orders, int(given["microbatches"])),
            tuple((int(src), int(dst)) for src, dst in data["edges"]),
            plan=plan,
            tracks=tuple(Track(**track) for track in data["tracks"]),
            steps=tuple(StepRecord.from_data(step) for step in data["steps"]),
            saved={int(stage): int(size) for stage, size in data["saved"].items()},
            memory=str(data["memory"]),
            versions=dict(data["versions"]),
            missing=data["missing"],
            prediction=predicted,
        )
        tracks, ranks, stages = len(trace.tracks), len(orders), trace.schedule.num_stages
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
        """Write a file for https://ui.perfetto.dev or chrome://tracing: a track for each rank, arrows for messages."""
        Path(path).write_text(json.dumps(_chrome_trace(self)))

    def table(self, path: str | Path | None = None) -> Sequence[Mapping[str, Any]]:
        """A row for each action; with ``path`` also written as ``.json`` or, with pyarrow, as ``.parquet``."""
        rows, target = _rows(self), None if path is None else Path(path)
        if target is None:
            return rows
        if target.suffix == ".json":
            target.write_text(json.dumps(rows))
        elif target.suffix == ".parquet":
            try:
                import pyarrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
                import pyarrow.parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
            except ImportError as error:
                raise PlanError("to write .parquet, pyarrow is needed: pip install pyarrow, or write .json") from error
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), target)
        else:
            raise PlanError(f"a table is written as .json or .parquet, not as {target.name!r}")
        return rows

    def report(self, path: str | Path) -> Findings:
        """Write an HTML page: the timeline of a step, causes of idle time, advice. Return its contents as data."""
        from penstock.profile.report import write_report

        return write_report(self, path)

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        html: str = _registry.viz().trace_html(self)
        return html


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a time")


# ── Chrome's and Perfetto's JSON ─────────────────────────────────────────────────────────────────────────────────

Event = dict[str, Any]


def _chrome_trace(trace: Trace) -> dict[str, Any]:
    """The whole file, with times in microseconds from 0 on: a process for each replica, a thread for each rank.

    rank 0  ▕▔0F0▔▏▕▔0F1▔▏                       an "X" event for each action and each wait;
               ╲ s    ╲                          an "s" and an "f" event with one id are the ends of an arrow,
    rank 1    f ▕▔1F0▔▏▕▔1F1▔▏                   each within its action
    """
    # All ids are distinct, and none is 0: Perfetto takes thread 0 for the main thread of its process.
    replicas, count = trace.replicas, len(trace.tracks)
    ranks = [{"pid": 1 + track.replica, "tid": 1 + len(replicas) + t} for t, track in enumerate(trace.tracks)]
    rows = {replica: {"pid": 1 + replica, "tid": 1 + len(replicas) + count + replica} for replica in replicas}
    titles = []
    for replica, where in rows.items():
        name = "pipeline" if replicas == [0] else f"replica {replica}"
        titles.append({"ph": "M", "name": "process_name", **where, "args": {"name": name}})
        titles.append({"ph": "M", "name": "thread_name", **where, "args": {"name": "steps"}})
    for track, where in zip(trace.tracks, ranks, strict=True):
        stages = trace.schedule.stages_of(track.place)
        name = f"rank {track.rank}: stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))} on {track.device}"
        titles.append({"ph": "M", "name": "thread_name", **where, "args": {"name": name}})
    events = []
    for step in trace.steps:
        for part in step.parts:
            track, where = trace.tracks[part.track], ranks[part.track]
            if track.place == 0:  # on the first rank: the next step may begin before others have ended this one
                events.append(_slice(step.name, "step", part.begin, part.end, rows[track.replica]))
            for done in part.actions:
                events += _action_events(trace, step, done, track, where)
            for span in part.host_spans:
                events.append(_slice(span.name, "outside", span.start, span.end, where))
        for message in traced_messages(trace, step):
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
    about = {"schedule": trace.schedule.name, "memory": trace.memory, **trace.versions}
    return {"traceEvents": [*titles, *events], "displayTimeUnit": "ms", "otherData": about}


def _action_events(
    trace: Trace, step: StepRecord, done: ActionRecord, track: Track, where: dict[str, int]
) -> Iterator[Event]:
    stage, kind, microbatch = done.action
    for wait in done.waits:
        about: dict[str, Any] = {"stage": wait.peer, "before": str(done.action)}
        yield _slice(f"wait for {wait.what}", "wait", wait.start, wait.end, where, about)
    about = {
        "stage": stage, "microbatch": microbatch, "step": step.number, "waited": done.waited * 1e6,
        "bytes sent": sum(sent.bytes for sent in done.sends),
    }  # fmt: skip
    if done.launched is not None:
        about["launched"] = done.launched * 1e6
    yield _slice(str(done.action), ACTION_NAMES[kind], done.start, done.end, where, about)
    if done.memory is not None:
        name = f"memory {trace.memory} of rank {track.rank}"
        yield {"ph": "C", "name": name, "ts": done.end * 1e6, **where, "args": {"bytes": done.memory}}


def _slice(
    name: str, category: str, start: float, end: float, where: dict[str, int], args: Mapping[str, Any] | None = None
) -> Event:
    duration = max(0.0, end - start) * 1e6
    return {"ph": "X", "name": name, "cat": category, "ts": start * 1e6, "dur": duration, **where, "args": args or {}}


# ── table ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rows(trace: Trace) -> list[dict[str, Any]]:
    """A row for each action.

    ``received`` counts the bytes of its input messages; ``waited_for`` is the stage with the longest wait.
    """
    found = []
    for step in trace.steps:
        received: Counter[int] = Counter()
        for message in traced_messages(trace, step):
            received[id(message.target)] += message.sent.bytes
        for part in step.parts:
            track = trace.tracks[part.track]
            for done in part.actions:
                longest = max(done.waits, key=lambda wait: wait.end - wait.start, default=None)
                row = {"step": step.number, "run": step.kind, "failed": step.failed, "replica": track.replica}
                row |= {"rank": track.rank, "action": str(done.action), **done.action._asdict()}
                row |= {"start": done.start, "end": done.end, "seconds": done.seconds, "launched": done.launched}
                row |= {"waited": done.waited, "waited_for": None if longest is None else longest.peer}
                row |= {"sent": sum(sent.bytes for sent in done.sends), "received": received[id(done)]}
                found.append({**row, "memory": done.memory})
    return found
