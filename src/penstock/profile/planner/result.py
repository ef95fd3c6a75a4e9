"""The result of the planner: a plan with its schedule, predictions, and the rejected configurations."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from penstock import _registry
from penstock.errors import PenstockError, PlanError
from penstock.format import count_noun, format_size, format_table, format_time
from penstock.json_schema import Maybe, check_schema, parse_json
from penstock.profile.planner.cuts import Cuts
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Schedule
from penstock.schedule.simulate import Prediction, Simulation, simulate
from penstock.schedule.text import from_text, to_text
from penstock.split.plan import Plan
from penstock.train.pipeline import Pipeline

FORMAT = 1
SHOWN_REJECTIONS = 8
_SHAPES = {"straight": "", "loop": " × {v} looped", "v": " × 2 on a V"}

_CONFIGURATION = {
    "data": int,
    "pipe": int,
    "shape": str,
    "v": int,
    "samples": int,
    "microbatches": int,
    "recompute": Maybe(bool),
    "tensor": int,
}
_SCHEMA = {
    "configuration": _CONFIGURATION,
    "cuts": [int],
    "schedule": str,
    "seconds": float,
    "lower_bound": float,
    "memory": [float],
    "bubble": float,
    "costs": {},
    "saved": Maybe([float]),
    "others": [{"configuration": _CONFIGURATION, "reason": str, "seconds": Maybe(float), "memory": Maybe(float)}],
    "layers": [str],
    "plan": Maybe({}),
    "devices": Maybe([str]),
}


@dataclass(frozen=True)
class Configuration:
    """The number of replicas, ranks and stages per rank, and the division of the mini-batch."""

    data: int
    pipe: int
    shape: str  # "straight", "loop" or "v"
    v: int  # stages per rank
    samples: int  # of a micro-batch
    microbatches: int  # of each replica
    recompute: bool | None = False  # all stages, none, or (None) as few as the memory requires
    tensor: int = 1  # devices that share each layer; a rank is a group of such devices

    def __str__(self) -> str:
        stages = _SHAPES[self.shape].format(v=self.v)
        replicas = f"{self.data} × " if self.data > 1 else ""
        text = f"{replicas}{count_noun(self.pipe, 'rank')}{stages}"
        text += f", {count_noun(self.microbatches, 'micro-batch')} of {self.samples}"
        text += f", {self.tensor} devices each" if self.tensor > 1 else ""
        return text + (", recomputed" if self.recompute else "")


def _configuration(data: dict[str, Any]) -> Configuration:
    if data["shape"] not in _SHAPES:
        raise PlanError(f"a configuration has the shape {data['shape']!r}: it must be in {[*_SHAPES]}")
    values: dict[str, Any] = {one.name: data.get(one.name) for one in fields(Configuration)}
    return Configuration(**values)


@dataclass(frozen=True)
class Candidate:
    """A configuration with its cuts, its schedule, and the predicted time and memory of a step."""

    configuration: Configuration
    cuts: Cuts
    schedule: Schedule
    seconds: float  # of a step
    lower_bound: float  # of all orders of these stages
    memory: tuple[float, ...]  # peak bytes of each rank
    bubble: float
    costs: Costs  # of its stages and edges
    saved: tuple[float, ...] | None = None  # peak bytes saved for backwards; None where activations are recomputed

    @property
    def gap(self) -> float:
        """How far the step time is above the lower bound, as a fraction of the bound."""
        return self.seconds / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The stages with recomputed forwards."""
        return tuple(sorted({stage for stage, _ in self.schedule.recomputed}))


@dataclass(frozen=True)
class Rejection:
    """A configuration that was not chosen, and the reason."""

    configuration: Configuration
    reason: str
    seconds: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class PlanResult:
    """A plan with its schedule, and the predicted time and memory of a step.

    result = ps.plan(model, sample, devices=4, batch=64)
    print(result)
    pipe = result.pipeline(loss_fn)
    """

    best: Candidate
    others: tuple[Rejection, ...]
    layers: tuple[str, ...]
    plan: Plan | None = None
    devices: tuple[str, ...] | None = None

    @property
    def configuration(self) -> Configuration:
        return self.best.configuration

    @property
    def schedule(self) -> Schedule:
        return self.best.schedule

    @property
    def microbatches(self) -> int:
        return self.best.configuration.microbatches

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.best.seconds

    @property
    def memory(self) -> tuple[float, ...]:
        """Predicted peak bytes of each rank."""
        return self.best.memory

    @property
    def prediction(self) -> Prediction:
        """The predicted time and memory, which ``pipe.trace()`` compares with its measurement."""
        return Prediction(self.seconds, "plan", self.memory, self.best.saved, self.configuration.samples)

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The layers of each stage."""
        return [self.layers[i:j] for i, j in pairwise((0, *self.best.cuts))]

    def simulation(self) -> Simulation:
        """The simulation of the predicted step, without the all-reduce of gradients over replicas at its end."""
        return simulate(self.schedule, self.best.costs, self.best.costs.edges)

    def pipeline(self, loss_fn: Callable[..., Any] | None = None, **options: Any) -> Pipeline:
        """Create the pipeline of this plan, with further ``options`` of ``ps.Pipeline`` such as ``mesh``."""
        if self.plan is None:
            raise PlanError("this is a plan without a model: use ps.plan(model, …)")
        if self.plan.chain is None:
            raise PlanError("this plan was loaded without its model: use ps.PlanResult.load(path, model)")
        for option in ("microbatches", "microbatch_size", "schedule"):
            if option in options:
                raise PlanError(f"{option} is part of the plan: leave {option}= out, or plan again")
        if "mesh" not in options and "devices" not in options and self.devices is not None:
            options["devices"] = list(self.devices[: self.configuration.pipe])
        pipe = Pipeline(self.plan, loss_fn, microbatches=self.microbatches, schedule=self.schedule, **options)
        pipe.prediction = self.prediction
        return pipe

    def __str__(self) -> str:
        best = self.best
        certain = "no order of these stages is faster" if best.gap < 1e-9 else f"at most {best.gap:.1%} above the best"
        recomputed = ""
        if best.recomputed and not best.configuration.recompute:
            recomputed = f", stages {', '.join(map(str, best.recomputed))} recomputed"
        names = [g[0] if len(g) == 1 else f"{g[0]} … {g[-1]} ({len(g)})" for g in self.groups]
        ranks = []
        for rank, memory in enumerate(self.memory):
            own = self.schedule.stages_of(rank)
            layers = " | ".join(names[stage] for stage in own)
            ranks.append((str(rank), " ".join(map(str, own)), layers, format_size(memory)))
        lines = [
            f"{best.configuration}{recomputed}",
            f"a step of {format_time(best.seconds)}, {best.bubble:.1%} of it idle ({certain})",
            "",
            *format_table(["rank", "stages", "layers", "memory"], ranks, right={0, 3}),
        ]
        if self.others:
            rows = [
                (str(one.configuration), "-" if one.seconds is None else format_time(one.seconds), one.reason)
                for one in self.others[:SHOWN_REJECTIONS]
            ]
            lines += ["", *format_table(["others", "step", "reason"], rows, right={1})]
            if len(self.others) > SHOWN_REJECTIONS:
                lines.append(f"and {len(self.others) - SHOWN_REJECTIONS} more")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return str(_registry.viz().plan_result_html(self))

    def save(self, path: str | Path) -> None:
        """Write a JSON file."""
        Path(path).write_text(self.to_json())

    def to_json(self) -> str:
        best = {one.name: getattr(self.best, one.name) for one in fields(self.best)}
        best["configuration"] = asdict(self.configuration)
        data = {
            "penstock_plan_result": FORMAT,
            **best,
            "schedule": to_text(self.schedule),
            "costs": self.best.costs.to_data(),
            "others": [asdict(one) for one in self.others],
            "layers": self.layers,
            "plan": None if self.plan is None else json.loads(self.plan.to_json()),
            "devices": self.devices,
        }
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None) -> PlanResult:
        """Read a JSON file; with ``model``, the plan is attached to it."""
        try:
            text = Path(path).read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise PlanError(f"{path} cannot be read as a plan: {error}") from error
        return cls.from_json(text, model, str(path))

    @classmethod
    def from_json(cls, text: str, model: nn.Module | None = None, origin: str = "the text") -> PlanResult:
        """Parse JSON; ``origin`` names it in errors."""
        data = parse_json(text, f"{origin} is not a saved PlanResult, nor JSON at all")
        try:
            check_schema(data, {"penstock_plan_result": int}, "the result")
            if data["penstock_plan_result"] != FORMAT:
                raise PlanError(f"its format is {data['penstock_plan_result']}: expected {FORMAT}")
            check_schema(data, _SCHEMA, "the result")
            best = Candidate(
                _configuration(data["configuration"]),
                tuple(data["cuts"]),
                from_text(data["schedule"]),
                data["seconds"],
                data["lower_bound"],
                tuple(data["memory"]),
                data["bubble"],
                Costs.from_data(data["costs"]),
                None if data.get("saved") is None else tuple(data["saved"]),
            )
            others = tuple(
                Rejection(_configuration(one["configuration"]), one["reason"], one.get("seconds"), one.get("memory"))
                for one in data["others"]
            )
            plan = None if data.get("plan") is None else Plan._from_data(data["plan"])
            devices = None if data.get("devices") is None else tuple(data["devices"])
            layers = tuple(data["layers"])
            # Cuts and memory must be complete, and agree with the schedule.
            schedule, ends = best.schedule, (0, *best.cuts)
            increasing = all(i < j for i, j in pairwise(ends))
            if len(best.cuts) != schedule.num_stages or ends[-1] != len(layers) or not increasing:
                raise PlanError(f"cuts {list(best.cuts)} of {len(layers)} layers into {schedule.num_stages} stages")
            if len(best.memory) != schedule.num_ranks or best.configuration.pipe != schedule.num_ranks:
                raise PlanError(f"memory of {len(best.memory)} ranks, and a schedule for {schedule.num_ranks}")
        except PenstockError as error:
            raise PlanError(f"{origin} is not a saved PlanResult: {error}") from error
        if plan is not None and model is not None:
            plan = plan.attach(model)
        return cls(best, others, layers, plan, devices)
