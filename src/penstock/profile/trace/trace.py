"""``Trace``: what every rank did in some steps, and when. Plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import _registry
from penstock.errors import PlanError
from penstock.profile.trace import analysis
from penstock.profile.trace.analysis import (
    TracedMessage,
    comparison,
    predicted,
    prediction_from,
    prediction_to,
    summary,
    traced_messages,
)
from penstock.profile.trace.records import ActionRecord, RankRecord, StepRecord, Track
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Action, Edge, Schedule
from penstock.schedule.simulate import Prediction, Simulation, simulate

if TYPE_CHECKING:
    from penstock.profile.report.findings import Findings

__all__ = ["Trace", "chrome_trace", "rows", "write_rows"]


# A trace as Chrome's and Perfetto's JSON: a process for each replica, a thread for each rank.
#
# rank 0  ▕▔0F0▔▏▕▔0F1▔▏                       an "X" event for each action and each wait;
#            ╲ s    ╲                          an "s" and an "f" event with one id are the two ends of an arrow,
# rank 1    f ▕▔1F0▔▏▕▔1F1▔▏                   each inside of the action that it belongs to

Event = dict[str, Any]

NAMES = {"F": "forward", "R": "recompute", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The whole file. Times are in microseconds, and none is before 0."""
    events = [event for step in trace.steps for event in _step(trace, step)]
    for number, (step, crossing) in enumerate((s, c) for s in trace.steps for c in traced_messages(trace, s)):
        events += _arrow(trace, step, crossing, number)
    first = min((event["ts"] for event in events), default=0.0)
    for event in events:
        event["ts"] = round(event["ts"] - min(0.0, first), 3)
        if "dur" in event:
            event["dur"] = round(event["dur"], 3)
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    about = {"schedule": trace.schedule.name, "memory": trace.memory, **trace.versions}
    return {"traceEvents": [*_titles(trace), *events], "displayTimeUnit": "ms", "otherData": about}


def _titles(trace: Trace) -> list[Event]:
    titles = []
    for replica in trace.replicas:
        name = "pipeline" if trace.replicas == [0] else f"replica {replica}"
        where = _steps(trace, replica)
        titles.append(_title("process_name", **where, name=name))
        titles.append(_title("process_sort_index", **where, sort_index=replica))
        titles.append(_title("thread_name", **where, name="steps"))
        titles.append(_title("thread_sort_index", **where, sort_index=trace.schedule.num_ranks))
    for t, track in enumerate(trace.tracks):
        where = _where(trace, t)
        stages = trace.schedule.stages_of(track.place)
        name = f"rank {track.rank}: stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))} on {track.device}"
        titles.append(_title("thread_name", **where, name=name))
        titles.append(_title("thread_sort_index", **where, sort_index=track.place))
    return titles


def _title(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _where(trace: Trace, track: int) -> dict[str, int]:
    """A rank's ids. Perfetto takes a thread 0 for its process's first one: none is 0, nor the same as another."""
    return {"pid": 1 + trace.tracks[track].replica, "tid": 1 + len(trace.replicas) + track}


def _steps(trace: Trace, replica: int) -> dict[str, int]:
    """The ids of the row in which a pipeline's steps are."""
    return {"pid": 1 + replica, "tid": 1 + len(trace.replicas) + len(trace.tracks) + replica}


def _step(trace: Trace, step: StepRecord) -> list[Event]:
    events = []
    for part in step.parts:
        where = _where(trace, part.track)
        track = trace.tracks[part.track]
        if track.place == 0:  # as the pipeline's first rank saw it: the next one may begin before others have ended
            there = _steps(trace, track.replica)
            name = f"{step.kind} {step.number}" + (" (failed)" if step.failed else "")
            events.append(_slice(name, "step", part.begin, part.end, there))
        for done in part.actions:
            events += _action(trace, step, part, done, where)
        on_host = all(done.launched is None for done in part.actions)  # a GPU does its actions beside them
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
    events.append(_slice(str(done.action), NAMES[kind], done.start, done.end, where, **about))
    if done.memory is not None:
        name = f"memory {trace.memory} of rank {trace.tracks[part.track].rank}"
        counter = {"ph": "C", "name": name, "ts": done.end * 1e6, **where, "args": {"bytes": done.memory}}
        events.append(counter)
    return events


def _slice(name: str, category: str, start: float, end: float, where: dict[str, int], **args: Any) -> Event:
    duration = max(0.0, end - start) * 1e6
    return {"ph": "X", "name": name, "cat": category, "ts": start * 1e6, "dur": duration, **where, "args": args}


def _arrow(trace: Trace, step: StepRecord, crossing: TracedMessage, number: int) -> list[Event]:
    """Both ends lie inside of their actions, and the arrow does not go back in time where clocks are not exact."""
    maker, taker = crossing.maker, crossing.taker
    leaves = maker.start + 0.5 * maker.seconds
    comes = max(leaves, taker.start + 0.5 * taker.seconds)
    common = {"name": "message", "cat": "edge", "id": number}
    args = {"bytes": crossing.sent.bytes, "step": step.number}
    return [
        {"ph": "s", **common, "ts": leaves * 1e6, **_where(trace, crossing.made_on), "args": args},
        {"ph": "f", "bp": "e", **common, "ts": comes * 1e6, **_where(trace, crossing.taken_on), "args": args},
    ]


# A trace as a table: a row for each action.

_TYPES = {
    "step": "int64", "run": "string", "failed": "bool", "replica": "int64", "rank": "int64", "action": "string",
    "stage": "int64", "kind": "string", "microbatch": "int64", "start": "float64", "end": "float64",
    "seconds": "float64", "launched": "float64", "waited": "float64", "waited_for": "int64", "sent": "int64",
    "received": "int64", "memory": "int64",
}  # fmt: skip
"""Of the columns in Parquet: they do not depend on what a trace has, so that the files of several are one table."""


def rows(trace: Trace) -> list[dict[str, Any]]:
    """The actions of all ranks and steps. ``received`` counts bytes from other stages, of this rank or of others."""
    found = []
    for step in trace.steps:
        received: dict[int, int] = {}
        for crossing in traced_messages(trace, step):
            received[id(crossing.taker)] = received.get(id(crossing.taker), 0) + crossing.sent.bytes
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
                        "waited_for": waits[0].peer if waits else None,  # the stage that it waited for longest
                        "sent": sum(sent.bytes for sent in done.sends),
                        "received": received.get(id(done), 0),
                        "memory": done.memory,
                    }
                )
    return found


def write_rows(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    if path.suffix == ".json":
        path.write_text(json.dumps(found))
        return
    if path.suffix != ".parquet":
        raise PlanError(f"a table is written as .json or .parquet, not as {path.name!r}")
    try:
        import pyarrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise PlanError("to write .parquet, pyarrow is needed: pip install pyarrow, or write .json") from error
    schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in _TYPES.items()])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(found), schema), path)


FORMAT = 1


@dataclass
class Trace:
    """What ``with pipe.trace() as trace`` recorded; it is there when that block has ended.

    Times are in seconds since the trace began, on the first rank's clock. Under a mesh every rank gets the whole; if
    it has one rank's part only, ``missing`` says why.

    ``memory`` says what an action's memory is: on GPUs the bytes ``"allocated"`` on its device, as torch counts them;
    else the bytes ``"saved"`` for backwards to come, of which each micro-batch in flight is counted with what the
    stage's first one was found to keep (``saved``).
    """

    schedule: Schedule  # of a step of a full number of micro-batches
    edges: tuple[Edge, ...]
    plan: Mapping[str, Any] = field(default_factory=dict)  # as Plan.save writes it
    tracks: tuple[Track, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    saved: Mapping[int, int] = field(default_factory=dict)
    memory: str = "saved"
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None
    prediction: Prediction | None = None  # of what the pipeline was made from, where that has one

    # ── what it says ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def replicas(self) -> list[int]:
        """The numbers of the pipelines, of which there are several where data or tensors are parallel."""
        return sorted({track.replica for track in self.tracks})

    def replica(self, number: int) -> list[int]:
        """The tracks of one pipeline."""
        return [t for t, track in enumerate(self.tracks) if track.replica == number]

    @property
    def bubble(self) -> float | None:
        """The share of a step's time in which ranks work on no action, from its first action to its last.

        Of all ranks, and the median over steps; None where there is no whole step.
        """
        return analysis.middle([analysis.bubble(self, step) for step in analysis.typical_steps(self)])

    @property
    def seconds(self) -> float | None:
        """How long a step takes: the median."""
        return analysis.middle([step.seconds for step in analysis.typical_steps(self)])

    @property
    def predicted(self) -> Prediction | None:
        """What a step should have taken, and ``by`` whom that is said.

        It is what the pipeline was made from that predicts: a plan, costs, or ``replan``. Without any, or where steps
        were recorded for which that does not hold, it is the simulation of this trace: how well it explains the run.
        None where no step was recorded, or not all of it.
        """
        return predicted(self)

    @property
    def comparison(self) -> str | None:
        """The prediction beside the measurement, in a line."""
        return comparison(self)

    @property
    def sharing(self) -> list[list[int]]:
        """The tracks that share a GPU, for each GPU that several have: what they do there adds up."""
        of: dict[str, list[int]] = {}
        for t, track in enumerate(self.tracks):
            if track.gpu:
                of.setdefault(track.gpu, []).append(t)
        return [tracks for tracks in of.values() if len(tracks) > 1]

    def costs(self) -> Costs:
        """The median time of each kind of action on each stage, in seconds, and of each edge between ranks.

        Where backwards are whole, ``i`` and ``w`` are half of one each; where they are split, a whole one is their sum.
        The latency of an edge is that from the end of an action to the moment when a rank that waited for its message
        had it: its whole time, so that no bandwidth is needed. It is 0 where nobody ever waited. ``activation`` is
        what is saved, in bytes.
        """
        return analysis.costs(self)

    def simulation(self) -> Simulation:
        """What the recorded steps would be if every action took its median time, and nothing else any."""
        return simulate(self.order, self.costs(), self.edges)

    @property
    def order(self) -> Schedule:
        """The schedule that most of the recorded steps have run."""
        return analysis.order(self)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, path: str | Path) -> None:
        """Write all of it as JSON."""
        Path(path).write_text(json.dumps(self.to_data()))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what ``save`` wrote."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_no_number)
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
        """As numbers, texts, lists and dicts."""
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
            "prediction": prediction_to(self.prediction),
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
            plan=_plan(data["plan"]),
            tracks=tracks,
            steps=steps,
            saved={int(stage): int(size) for stage, size in data["saved"].items()},
            memory=str(data["memory"]),
            versions={str(name): str(version) for name, version in data["versions"].items()},
            missing=None if data["missing"] is None else str(data["missing"]),
            prediction=prediction_from(data.get("prediction")),
        )

    def chrome(self, path: str | Path) -> None:
        """Write it for https://ui.perfetto.dev or chrome://tracing: a track for each rank, arrows for messages."""
        Path(path).write_text(json.dumps(chrome_trace(self)))

    def table(self, path: str | Path | None = None) -> Sequence[Mapping[str, Any]]:
        """A row for each action; with ``path`` they are written, too, as ``.json`` or, by pyarrow, as ``.parquet``."""
        found = rows(self)
        if path is not None:
            write_rows(found, Path(path))
        return found

    def report(self, path: str | Path) -> Findings:
        """Write a page to look at in a browser: the timeline of a step, why ranks are idle, and what would help.

        What it says comes back as data, too.
        """
        from penstock.profile.report import write_report

        return write_report(self, path)

    def __str__(self) -> str:
        return summary(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        html: str = _registry.viz().trace_html(self)
        return html

    def __repr__(self) -> str:
        text = f"Trace({len(self.steps)} steps of {len(self.tracks)} ranks, schedule {self.schedule.name!r})"
        return text if self.comparison is None else f"{text[:-1]}: {self.comparison})"


def _plan(data: Mapping[str, Any]) -> dict[str, Any]:
    """A plan as it was saved, if it is one; or none at all."""
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


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a time")
