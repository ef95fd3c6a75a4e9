"""What a planner answers: the plan, the order, what both will take, and what else there was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from penstock import _registry
from penstock.errors import PenstockError, PlanError
from penstock.format import format_size, format_table, format_time
from penstock.profile.planner.candidates import Candidate, Configuration, Rejection
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Schedule
from penstock.schedule.simulate import Prediction, Simulation, simulate
from penstock.schedule.text import from_text, to_text
from penstock.split.plan import Plan
from penstock.train.pipeline import Pipeline

__all__ = ["PlanResult"]

FORMAT = 1
SHOWN = 8  # of those that lost
RANKS = 12


@dataclass(frozen=True)
class PlanResult:
    """A plan with its schedule, and the time and memory that they should take.

    planned = ps.plan(model, sample, devices=4, batch=64)
    print(planned)
    pipe = planned.pipeline(loss_fn)
    """

    best: Candidate
    others: tuple[Rejection, ...]
    layers: tuple[str, ...]
    plan: Plan | None = None
    devices: tuple[str, ...] | None = None

    @property
    def way(self) -> Configuration:
        return self.best.way

    @property
    def schedule(self) -> Schedule:
        return self.best.schedule

    @property
    def microbatches(self) -> int:
        return self.best.way.microbatches

    @property
    def seconds(self) -> float:
        """What a step should take."""
        return self.best.seconds

    @property
    def memory(self) -> tuple[float, ...]:
        """What each rank should hold at its peak: bytes."""
        return self.best.memory

    @property
    def prediction(self) -> Prediction:
        """All of that, for what ``pipe.trace()`` says beside what it has measured."""
        return Prediction(self.seconds, "plan", self.memory, self.best.saved, self.way.samples)

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The layers of each stage."""
        return [self.layers[i:j] for i, j in pairwise((0, *self.best.cuts))]

    def simulation(self) -> Simulation:
        """The step as it is expected, without the sums of gradients over replicas at its end."""
        costs = self.best.costs
        if costs is None:
            raise PlanError("this was planned by a version that did not keep the times of stages: plan it again")
        edges = tuple(costs.bytes) if isinstance(costs.bytes, Mapping) else None
        return simulate(self.schedule, costs, edges)

    def pipeline(self, loss_fn: Callable[..., Any] | None = None, **options: Any) -> Pipeline:
        """The pipeline of this plan; ``options`` are those of ``ps.Pipeline``, such as ``mesh``."""
        if self.plan is None:
            raise PlanError("this was planned without a model: plan it with one, ps.plan(model, …)")
        if self.plan.chain is None:
            raise PlanError("this was read without its model: read it with it, ps.PlanResult.load(path, model)")
        for option in ("microbatches", "microbatch_size", "schedule"):
            if option in options:
                raise PlanError(f"{option} is a part of what was planned: leave {option}= out, or plan again")
        if "mesh" not in options and "devices" not in options and self.devices is not None:
            options["devices"] = list(self.devices[: self.way.pipe])
        pipe = Pipeline(self.plan, loss_fn, microbatches=self.microbatches, schedule=self.schedule, **options)
        pipe.prediction = self.prediction
        return pipe

    def __str__(self) -> str:
        best = self.best
        certain = "no order of these stages is faster" if best.gap < 1e-9 else f"at most {best.gap:.1%} above the best"
        again = "" if best.way.recompute or not best.recomputed else f", stages {_numbers(best.recomputed)} recomputed"
        lines = [
            f"{best.way}{again}",
            f"a step of {format_time(best.seconds)}, {best.bubble:.1%} of it idle ({certain})",
            "",
            *_shortened(format_table(["rank", "stages", "layers", "memory"], self._ranks(), right={0, 3})),
        ]
        if self.others:
            rows = [
                (str(lost.way), "-" if lost.seconds is None else format_time(lost.seconds), lost.reason)
                for lost in self.others[:SHOWN]
            ]
            lines += ["", *format_table(["others", "step", "why not"], rows, right={1})]
            if len(self.others) > SHOWN:
                lines.append(f"and {len(self.others) - SHOWN} more")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        html: str = _registry.viz().plan_result_html(self)
        return html

    def _ranks(self) -> list[tuple[str, ...]]:
        groups, placement = self.groups, self.schedule.placement
        rows: list[tuple[str, ...]] = []
        for rank, memory in enumerate(self.memory):
            own = [stage for stage, home in enumerate(placement) if home == rank]
            runs = [_run(groups[stage]) for stage in own]
            rows.append((str(rank), " ".join(map(str, own)), " | ".join(runs), format_size(memory)))
        return rows

    def save(self, path: str | Path) -> None:
        """Write it as JSON: to be made once, and read by every rank."""
        Path(path).write_text(self.to_json())

    def to_json(self) -> str:
        best = asdict(replace(self.best, schedule=Schedule("", (), (), 0), costs=None))
        del best["schedule"]
        best["costs"] = None if self.best.costs is None else self.best.costs.to_data()
        data = {
            "penstock_planned": FORMAT,
            **best,
            "schedule": to_text(self.schedule),
            "others": [asdict(lost) for lost in self.others],
            "layers": self.layers,
            "plan": None if self.plan is None else json.loads(self.plan.to_json()),
            "devices": self.devices,
        }
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None) -> PlanResult:
        """Read it; with ``model``, as a plan of that model."""
        try:
            text = Path(path).read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise PlanError(f"{path} cannot be read as what a planner saved: {error}") from error
        return cls.from_json(text, model, str(path))

    @classmethod
    def from_json(cls, text: str, model: nn.Module | None = None, origin: str = "the text") -> PlanResult:
        """The same from JSON; ``origin`` names it in errors."""
        try:
            data = json.loads(text)
            if data["penstock_planned"] != FORMAT:
                raise PlanError(f"{origin} has format {data['penstock_planned']}: expected {FORMAT}")
            best = Candidate(
                Configuration(**data["way"]),
                tuple(data["cuts"]),
                from_text(data["schedule"]),
                data["seconds"],
                data["floor"],
                tuple(data["memory"]),
                data["bubble"],
                costs=None if data.get("costs") is None else Costs.from_data(data["costs"]),
                saved=None if data.get("saved") is None else tuple(data["saved"]),
            )
            others = tuple(Rejection(Configuration(**lost.pop("way")), **lost) for lost in data["others"])
            plan = None if data["plan"] is None else Plan._from_data(data["plan"])
            devices = None if data["devices"] is None else tuple(data["devices"])
            layers = tuple(data["layers"])
            _check(best, layers)
        except PenstockError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise PlanError(f"{origin} is not what a planner saved: {type(error).__name__}: {error}") from error
        if plan is not None and model is not None:
            plan = plan.attach(model)
        return cls(best, others, layers, plan, devices)


def _check(best: Candidate, layers: Sequence[str]) -> None:
    """What was saved is whole: cuts for all stages and layers, bytes of all ranks, and numbers that are numbers."""
    schedule, cuts = best.schedule, (0, *best.cuts)
    if len(best.cuts) != schedule.num_stages or cuts[-1] != len(layers) or any(i >= j for i, j in pairwise(cuts)):
        raise ValueError(f"cuts {list(best.cuts)} of {len(layers)} layers into {schedule.num_stages} stages")
    if len(best.memory) != schedule.num_ranks or best.way.pipe != schedule.num_ranks:
        raise ValueError(f"memory of {len(best.memory)} ranks, and a schedule for {schedule.num_ranks}")
    for number in (best.seconds, best.floor, best.bubble, *best.memory):
        if not isinstance(number, (int, float)) or isinstance(number, bool):
            raise ValueError(f"{number!r} is not a number")


def _shortened(lines: list[str]) -> list[str]:
    """A table's head, and of many rows the first and the last."""
    rows = lines[2:]
    return lines if len(rows) <= RANKS else [*lines[: RANKS + 1], f"… {len(rows) - RANKS} more …", lines[-1]]


def _numbers(stages: Sequence[int]) -> str:
    """0 to 3, 7."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and stage == runs[-1][-1] + 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _run(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]} ({len(layers)})"
