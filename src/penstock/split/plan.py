"""A plan: a model's stages, what crosses between them, what they share, and where they go. Plain data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from penstock.errors import PlanError

__all__ = ["Edge", "Plan", "Stage", "Tie"]

FORMAT = 1


@dataclass(frozen=True)
class Stage:
    """The layers between two active cuts."""

    layers: tuple[str, ...]
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Edge:
    """A value that crosses from one stage to a later one."""

    src: int
    dst: int


@dataclass(frozen=True)
class Tie:
    """One parameter that lives in several stages, under the names it has there."""

    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """How a model is cut. ``devices`` and ``ranks`` say where each stage goes, once that is decided."""

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    ties: tuple[Tie, ...] = ()
    devices: tuple[str, ...] | None = None
    ranks: tuple[int, ...] | None = None
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def placed(self, ranks: Sequence[int], devices: Sequence[object] | None) -> Plan:
        """The same plan with each stage's rank and device written in."""
        names = None if devices is None else tuple(str(device) for device in devices)
        return replace(self, ranks=tuple(ranks), devices=names)

    def stage_module(self, index: int) -> nn.Sequential:
        """The layers of one stage: the model's own module objects, under their own names."""
        if self.model is None:
            raise PlanError("this plan has no model: load it with Plan.load(path, model)")
        stage = nn.Sequential()
        for name in self.stages[index].layers:
            stage.add_module(name, self.model.get_submodule(name))
        stage.training = self.model.training  # its own flag only: a layer may be in another mode on purpose
        return stage

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON. The model is not part of it."""
        Path(path).write_text(self.to_json())

    def to_json(self) -> str:
        data = {k: v for k, v in asdict(replace(self, model=None)).items() if k != "model"}
        return json.dumps({"penstock_plan": FORMAT, **data}, indent=2) + "\n"

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None) -> Plan:
        """Read a plan; with ``model``, check that it is a plan of that model and attach it."""
        try:
            data = json.loads(Path(path).read_text())
            plan = cls._from_data(data)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{path} is not a saved plan: {type(error).__name__}: {error}") from error
        return plan if model is None else plan.attach(model)

    @classmethod
    def _from_data(cls, data: dict[str, Any]) -> Plan:
        if data["penstock_plan"] != FORMAT:
            raise PlanError(f"plan format {data['penstock_plan']} cannot be read here: expected {FORMAT}")
        return cls(
            stages=tuple(Stage(tuple(s["layers"]), s["parameters"], s["bytes"]) for s in data["stages"]),
            edges=tuple(Edge(**edge) for edge in data["edges"]),
            ties=tuple(Tie(tuple(t["names"]), tuple(t["stages"])) for t in data["ties"]),
            devices=None if data["devices"] is None else tuple(data["devices"]),
            ranks=None if data["ranks"] is None else tuple(data["ranks"]),
        )

    def attach(self, model: nn.Module) -> Plan:
        """This plan for ``model``, which must have the same layers with the same numbers of parameters."""
        from penstock.split.sequential import split_sequential

        fresh = split_sequential(model, balance=[len(stage.layers) for stage in self.stages])
        for index, (mine, its) in enumerate(zip(self.stages, fresh.stages, strict=True)):
            if mine != its:
                raise PlanError(
                    f"the plan's stage {index} is {list(mine.layers)} with {mine.parameters} parameters, but the "
                    f"model's is {list(its.layers)} with {its.parameters}: this is a plan of another model"
                )
        return replace(self, model=model)

    def __str__(self) -> str:
        return _table(self)


def _table(plan: Plan) -> str:
    """The plan as a table, one row per stage."""
    where = ["-"] * plan.num_stages
    if plan.ranks is not None:
        devices = plan.devices or [""] * plan.num_stages
        where = [f"{rank} {device}".strip() for rank, device in zip(plan.ranks, devices, strict=True)]
    rows = [("stage", "rank", "layers", "parameters", "bytes", "sends to")]
    for index, stage in enumerate(plan.stages):
        to = " ".join(str(edge.dst) for edge in plan.edges if edge.src == index) or "-"
        parameters, size = f"{stage.parameters:,}", f"{stage.bytes:,}"
        rows.append((str(index), where[index], _short(stage.layers), parameters, size, to))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = {0, 3, 4}
    lines = [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("─" * width for width in widths))
    lines += [f"tie: {' = '.join(tie.names)} (stages {', '.join(map(str, tie.stages))})" for tie in plan.ties]
    return "\n".join(lines)


def _short(layers: Sequence[str]) -> str:
    text = " ".join(layers)
    return text if len(text) <= 40 else f"{layers[0]} … {layers[-1]} ({len(layers)} layers)"
