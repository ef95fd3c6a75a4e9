"""The costs of a schedule: time per action, time per transfer, memory per micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from penstock.errors import ScheduleError
from penstock.json_schema import check_schema
from penstock.schedule.schedule import COMPUTE, Edge

PerStage = float | tuple[float, ...]
"""One number for all stages, or one per stage."""

PerEdge = float | Mapping[Edge, float]
"""One number for all edges, or one per edge (source stage, destination stage)."""


@dataclass(frozen=True)
class Costs:
    """Times and sizes, in any consistent units.

    ``f``, ``i``, ``w``, ``b``, ``r`` are the times of one action of a stage: forward, input gradient, weight
    gradient, full backward (by default ``i + w``) and recompute (by default ``f``).

    A value sent to another rank arrives ``latency + bytes / bandwidth`` after it is computed. It occupies its channel
    for ``bytes / bandwidth``, and a channel carries one value at a time. The gradient in the other direction costs the
    same. Values that stay on a rank cost nothing.

    ``activation`` is the memory of one micro-batch on a stage from the start of ``F`` to the end of ``B`` or ``W``.
    ``keep`` is the fraction of it held between ``I`` and ``W``. It may exceed 1, because gradients are held, too.
    ``checkpoint`` is the fraction held between ``F`` and ``R`` where the schedule recomputes.
    """

    f: PerStage = 1.0
    i: PerStage = 1.0
    w: PerStage = 1.0
    b: PerStage | None = None
    r: PerStage | None = None
    latency: PerEdge = 0.0
    bandwidth: PerEdge = math.inf
    bytes: PerEdge = 0.0
    activation: PerStage = 1.0
    keep: PerStage = 1.0
    checkpoint: PerStage = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, int | float):
                value = (value,)
            for number in value.values() if isinstance(value, Mapping) else value:
                if not number >= 0 or (math.isinf(number) and field.name != "bandwidth"):
                    raise ScheduleError(f"cost {field.name}={number} must be a number, at least 0")
                if field.name == "bandwidth" and number == 0:
                    raise ScheduleError("cost bandwidth=0 must be positive")
                if field.name == "checkpoint" and number > 1:
                    raise ScheduleError(f"cost checkpoint={number} must be a fraction, at most 1")

    @classmethod
    def per_rank(
        cls,
        *,
        v: int,
        f: float = 1.0,
        i: float = 1.0,
        w: float = 1.0,
        comm: float = 0.0,
        b: float | None = None,
        r: float | None = None,
    ) -> Costs:
        """Costs of a rank and micro-batch, divided over its ``v`` stages, to compare schedules with different ``v``.

        ``comm`` is the latency between two ranks.
        """
        if v < 1:
            raise ScheduleError(f"v={v} stages per rank: at least 1 is needed")
        times = {"f": f, "i": i, "w": w, "b": b, "r": r}
        return cls(latency=comm, activation=1 / v, **{name: t / v for name, t in times.items() if t is not None})

    @property
    def edges(self) -> tuple[Edge, ...] | None:
        """The edges for which ``bytes`` are given; None if one number is for all edges."""
        return tuple(self.bytes) if isinstance(self.bytes, Mapping) else None

    def durations(self, num_stages: int) -> dict[str, list[float]]:
        """The time of each kind of action, per stage."""
        times = {kind: self.of_stages(kind.lower(), num_stages) for kind in "FIW"}
        split = [i + w for i, w in zip(times["I"], times["W"], strict=True)]
        times["B"] = split if self.b is None else self.of_stages("b", num_stages)
        times["R"] = times["F"] if self.r is None else self.of_stages("r", num_stages)
        return {kind: times[kind] for kind in COMPUTE}

    def of_stages(self, name: str, num_stages: int) -> list[float]:
        """The values of the field ``name``, one per stage."""
        value: PerStage = getattr(self, name)
        if isinstance(value, int | float):
            return [float(value)] * num_stages
        if len(value) != num_stages:
            raise ScheduleError(f"cost {name} has {len(value)} numbers, the schedule has {num_stages} stages")
        return [float(number) for number in value]

    def of_edge(self, name: str, edge: Edge) -> float:
        """The value of the field ``name`` for one edge."""
        value: PerEdge = getattr(self, name)
        if isinstance(value, int | float):
            return float(value)
        if edge not in value:
            raise ScheduleError(f"cost {name} has no number for the edge {edge[0]}->{edge[1]}")
        return float(value[edge])

    def to_data(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as numbers, lists and dicts."""
        data: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                edges = isinstance(value, Mapping)
                data[field.name] = [[*edge, number] for edge, number in value.items()] if edges else value
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Costs:
        """The inverse of ``to_data``."""
        known, costs = [field.name for field in fields(cls)], dict[str, Any]()
        for name, value in data.items():
            if name not in known:
                raise ScheduleError(f"there is no cost {name!r}: costs are {', '.join(known)}")
            several = isinstance(value, list | tuple)
            by_edge = bool(several and value and isinstance(value[0], list | tuple))
            number = math.inf if name == "bandwidth" else float
            check_schema(value, [(int, int, number)] if by_edge else [number] if several else number, f"cost {name}")
            edges = {(row[0], row[1]): row[2] for row in value} if by_edge else None
            costs[name] = edges or (tuple(value) if several else value)
        return cls(**costs)
