"""``Trace``: what every rank did in some steps, and when. Plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PlanError
from penstock.profile.trace import measure
from penstock.profile.trace.chrome import chrome_trace
from penstock.profile.trace.compare import comparison, predicted, prediction_from, prediction_to
from penstock.profile.trace.steps import Part, Step, Track
from penstock.profile.trace.summary import summary
from penstock.profile.trace.table import rows, write_rows
from penstock.schedule.action import Action
from penstock.schedule.costs import Costs
from penstock.schedule.flow import Edge
from penstock.schedule.prediction import Prediction
from penstock.schedule.schedule import Schedule
from penstock.schedule.simulate import Simulation, simulate

if TYPE_CHECKING:
    from penstock.profile.report.findings import Findings

__all__ = ["Trace"]

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
    steps: tuple[Step, ...] = ()
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
        return measure.middle([measure.bubble(self, step) for step in measure.typical(self)])

    @property
    def seconds(self) -> float | None:
        """How long a step takes: the median."""
        return measure.middle([step.seconds for step in measure.typical(self)])

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
        return measure.costs(self)

    def simulation(self) -> Simulation:
        """What the recorded steps would be if every action took its median time, and nothing else any."""
        return simulate(self.order, self.costs(), self.edges)

    @property
    def order(self) -> Schedule:
        """The schedule that most of the recorded steps have run."""
        return measure.order(self)

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
            Step(int(s["number"]), str(s["kind"]), tuple(map(Part.from_data, s["parts"])), bool(s["failed"]))
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
        from penstock.notebook import trace_html

        return trace_html(self)

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
