"""``Trace``: the actions of every rank in some steps, with their times. Plain data, with files and reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import _registry
from penstock.errors import PlanError
from penstock.profile.trace.analysis import PREDICTION_SOURCES, TraceData, TracedMessage, traced_messages
from penstock.profile.trace.records import ACTION_NAMES, ActionRecord, RankRecord, StepRecord, Track
from penstock.schedule.schedule import Action, Schedule
from penstock.schedule.simulate import Prediction

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
            chrome = isinstance(data, dict) and "traceEvents" in data
            what = "trace.chrome wrote it, for Perfetto" if chrome else "something else wrote it"
            raise PlanError(f"{path} is not a saved trace: {what}, and trace.save writes what can be read here")
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
            "steps": [
                {"number": s.number, "kind": s.kind, "failed": s.failed, "parts": [part.to_data() for part in s.parts]}
                for s in self.steps
            ],
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
        tracks = tuple(Track.from_data(track) for track in data["tracks"])
        steps = tuple(
            StepRecord(
                int(s["number"]), str(s["kind"]), tuple(map(RankRecord.from_data, s["parts"])), bool(s["failed"])
            )
            for s in data["steps"]
        )
        parts = [part for step in steps for part in step.parts]
        if any(not 0 <= part.track < len(tracks) for part in parts):
            raise PlanError(f"the trace has {len(tracks)} tracks, but its steps have parts of others")
        placement = [int(rank) for rank in given["placement"]]
        stages = len(placement)
        if any(not 0 <= rank < len(orders) for rank in (*placement, *(track.place for track in tracks))):
            raise PlanError(f"the trace has {len(orders)} ranks, but stages or tracks of others")
        edges = tuple((int(src), int(dst)) for src, dst in data["edges"])
        if any(not 0 <= src < dst < stages for src, dst in edges):
            raise PlanError(f"the trace has {stages} stages, but edges of others")
        if any(done.action.stage >= stages for part in parts for done in part.actions):
            raise PlanError(f"the trace has {stages} stages, but actions of others")
        return cls(
            Schedule.of(str(given["name"]), placement, orders, int(given["microbatches"])),
            edges,
            plan=_parse_plan(data["plan"]),
            tracks=tracks,
            steps=steps,
            saved={int(stage): int(size) for stage, size in data["saved"].items()},
            memory=str(data["memory"]),
            versions={str(name): str(version) for name, version in data["versions"].items()},
            missing=None if data["missing"] is None else str(data["missing"]),
            prediction=_parse_prediction(data.get("prediction")),
        )

    def chrome(self, path: str | Path) -> None:
        """Write a file for https://ui.perfetto.dev or chrome://tracing: a track for each rank, arrows for messages."""
        Path(path).write_text(json.dumps(_chrome_trace(self)))

    def table(self, path: str | Path | None = None) -> Sequence[Mapping[str, Any]]:
        """A row for each action; with ``path`` also written as ``.json`` or, with pyarrow, as ``.parquet``."""
        rows = _rows(self)
        if path is not None:
            _write_rows(rows, Path(path))
        return rows

    def report(self, path: str | Path) -> Findings:
        """Write a page to look at in a browser: the timeline of a step, why ranks are idle, and what would help.

        What it says received_at back as data, too.
        """
        from penstock.profile.report import write_report

        return write_report(self, path)

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        html: str = _registry.viz().trace_html(self)
        return html


def _parse_plan(data: Mapping[str, Any]) -> dict[str, Any]:
    if not data:
        return {}
    stages = [
        {**s, "layers": list(map(str, s["layers"])), "parameters": int(s["parameters"]), "bytes": int(s["bytes"])}
        for s in data["stages"]
    ]
    ties = [{**tie, "names": [str(name) for name in tie["names"]]} for tie in data["ties"]]
    devices = None if data["devices"] is None else [str(device) for device in data["devices"]]
    if devices is not None and len(devices) != len(stages):
        raise PlanError(f"the trace's plan has {len(stages)} stages, but {len(devices)} devices")
    return {**data, "stages": stages, "ties": ties, "devices": devices}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a time")


def _parse_prediction(data: Mapping[str, Any] | None) -> Prediction | None:
    if data is None:
        return None
    memory, saved = (None if data[name] is None else tuple(map(float, data[name])) for name in ("memory", "saved"))
    samples, by = data["samples"], str(data["by"])
    if by not in PREDICTION_SOURCES:
        raise PlanError(f"the trace has a prediction by {by!r}: it must be one of {sorted(PREDICTION_SOURCES)}")
    return Prediction(float(data["seconds"]), by, memory, saved, None if samples is None else int(samples))


# ── Chrome's and Perfetto's JSON ─────────────────────────────────────────────────────────────────────────────────

Event = dict[str, Any]


def _chrome_trace(trace: Trace) -> dict[str, Any]:
    """The whole file, with times in microseconds from 0 on: a process for each replica, a thread for each rank.

    rank 0  ▕▔0F0▔▏▕▔0F1▔▏                       an "X" event for each action and each wait;
               ╲ s    ╲                          an "s" and an "f" event with one id are the ends of an arrow,
    rank 1    f ▕▔1F0▔▏▕▔1F1▔▏                   each within its action
    """
    events = [event for step in trace.steps for event in _step(trace, step)]
    for number, (step, message) in enumerate((s, c) for s in trace.steps for c in traced_messages(trace, s)):
        events += _arrow(trace, step, message, number)
    first = min((event["ts"] for event in events), default=0.0)
    for event in events:
        event["ts"] = round(event["ts"] - min(0.0, first), 3)
        if "dur" in event:
            event["dur"] = round(event["dur"], 3)
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    about = {"schedule": trace.schedule.name, "memory": trace.memory, **trace.versions}
    return {"traceEvents": [*_names(trace), *events], "displayTimeUnit": "ms", "otherData": about}


def _names(trace: Trace) -> list[Event]:
    titles = []
    for replica in trace.replicas:
        name = "pipeline" if trace.replicas == [0] else f"replica {replica}"
        where = _step_row_ids(trace, replica)
        titles.append(_metadata("process_name", **where, name=name))
        titles.append(_metadata("process_sort_index", **where, sort_index=replica))
        titles.append(_metadata("thread_name", **where, name="steps"))
        titles.append(_metadata("thread_sort_index", **where, sort_index=trace.schedule.num_ranks))
    for t, track in enumerate(trace.tracks):
        where = _rank_ids(trace, t)
        stages = trace.schedule.stages_of(track.place)
        name = f"rank {track.rank}: stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))} on {track.device}"
        titles.append(_metadata("thread_name", **where, name=name))
        titles.append(_metadata("thread_sort_index", **where, sort_index=track.place))
    return titles


def _metadata(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _rank_ids(trace: Trace, track: int) -> dict[str, int]:
    """Ids of a rank, all distinct and none 0: Perfetto takes thread 0 for the main thread of its process."""
    return {"pid": 1 + trace.tracks[track].replica, "tid": 1 + len(trace.replicas) + track}


def _step_row_ids(trace: Trace, replica: int) -> dict[str, int]:
    """Ids of the row with the steps of a pipeline."""
    return {"pid": 1 + replica, "tid": 1 + len(trace.replicas) + len(trace.tracks) + replica}


def _step(trace: Trace, step: StepRecord) -> list[Event]:
    events = []
    for part in step.parts:
        where = _rank_ids(trace, part.track)
        track = trace.tracks[part.track]
        if track.place == 0:  # on the first rank: the next step may begin before others have ended this one
            there = _step_row_ids(trace, track.replica)
            name = f"{step.kind} {step.number}" + (" (failed)" if step.failed else "")
            events.append(_slice(name, "step", part.begin, part.end, there))
        for done in part.actions:
            events += _action(trace, step, part, done, where)
        on_host = all(done.launched is None for done in part.actions)  # on a GPU, actions overlap them
        for span in part.spans if on_host else ():
            events.append(_slice(span.name, "outside", span.start, span.end, where))
    return events


def _action(trace: Trace, step: StepRecord, part: RankRecord, done: ActionRecord, where: dict[str, int]) -> list[Event]:
    stage, kind, microbatch = done.action
    events = [
        _slice(f"wait for {wait.what}", "wait", wait.start, wait.end, where, stage=wait.peer, before=str(done.action))
        for wait in done.waits
    ]
    about: dict[str, Any] = {
        "stage": stage, "microbatch": microbatch, "step": step.number, "waited": done.waited * 1e6,
        "bytes sent": sum(sent.bytes for sent in done.sends),
    }  # fmt: skip
    if done.launched is not None:
        about["launched"] = done.launched * 1e6
    events.append(_slice(str(done.action), ACTION_NAMES[kind], done.start, done.end, where, **about))
    if done.memory is not None:
        name = f"memory {trace.memory} of rank {trace.tracks[part.track].rank}"
        counter = {"ph": "C", "name": name, "ts": done.end * 1e6, **where, "args": {"bytes": done.memory}}
        events.append(counter)
    return events


def _slice(name: str, category: str, start: float, end: float, where: dict[str, int], **args: Any) -> Event:
    duration = max(0.0, end - start) * 1e6
    return {"ph": "X", "name": name, "cat": category, "ts": start * 1e6, "dur": duration, **where, "args": args}


def _arrow(trace: Trace, step: StepRecord, message: TracedMessage, number: int) -> list[Event]:
    """Both ends lie within their actions; the arrow does not go back in time where clocks are inexact."""
    source, target = message.source, message.target
    sent_at = source.start + 0.5 * source.seconds
    received_at = max(sent_at, target.start + 0.5 * target.seconds)
    common = {"name": "message", "cat": "edge", "id": number}
    args = {"bytes": message.sent.bytes, "step": step.number}
    return [
        {"ph": "s", **common, "ts": sent_at * 1e6, **_rank_ids(trace, message.source_track), "args": args},
        {
            "ph": "f",
            "bp": "e",
            **common,
            "ts": received_at * 1e6,
            **_rank_ids(trace, message.target_track),
            "args": args,
        },
    ]


# ── table ────────────────────────────────────────────────────────────────────────────────────────────────────────

_COLUMN_TYPES = {
    "step": "int64", "run": "string", "failed": "bool", "replica": "int64", "rank": "int64", "action": "string",
    "stage": "int64", "kind": "string", "microbatch": "int64", "start": "float64", "end": "float64",
    "seconds": "float64", "launched": "float64", "waited": "float64", "waited_for": "int64", "sent": "int64",
    "received": "int64", "memory": "int64",
}  # fmt: skip
"""Column types in Parquet, fixed so that the files of several traces can be concatenated."""


def _rows(trace: Trace) -> list[dict[str, Any]]:
    """A row for each action; ``received`` counts the bytes of its input messages."""
    found = []
    for step in trace.steps:
        received: dict[int, int] = {}
        for message in traced_messages(trace, step):
            received[id(message.target)] = received.get(id(message.target), 0) + message.sent.bytes
        for part in step.parts:
            track = trace.tracks[part.track]
            for done in part.actions:
                waits = sorted(done.waits, key=lambda wait: wait.start - wait.end)
                found.append(
                    {
                        "step": step.number,
                        "run": step.kind,
                        "failed": step.failed,
                        "replica": track.replica,
                        "rank": track.rank,
                        "action": str(done.action),
                        "stage": done.action.stage,
                        "kind": done.action.kind,
                        "microbatch": done.action.microbatch,
                        "start": done.start,
                        "end": done.end,
                        "seconds": done.seconds,
                        "launched": done.launched,
                        "waited": done.waited,
                        "waited_for": waits[0].peer if waits else None,  # the stage with the longest wait
                        "sent": sum(sent.bytes for sent in done.sends),
                        "received": received.get(id(done), 0),
                        "memory": done.memory,
                    }
                )
    return found


def _write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
        return
    if path.suffix != ".parquet":
        raise PlanError(f"a table is written as .json or .parquet, not as {path.name!r}")
    try:
        import pyarrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise PlanError("to write .parquet, pyarrow is needed: pip install pyarrow, or write .json") from error
    schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in _COLUMN_TYPES.items()])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema), path)
