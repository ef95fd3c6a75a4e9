"""What a pipeline can be told, checked in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.errors import PlanError
from penstock.schedule.recompute import Recompute
from penstock.schedule.schedule import Schedule
from penstock.train.devices import Devices
from penstock.train.materialise import Init

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """The arguments of ``Pipeline`` beside its plan and mesh."""

    loss_fn: Callable[..., Any] | None
    microbatches: int
    schedule: str | Schedule
    devices: Devices
    reduction: str | None
    outputs: str | None
    init: Init | None
    recompute: Recompute
    seed: int | None

    def check(self) -> None:
        """One clear message for what cannot be, before anything is built."""
        if self.outputs not in ("all", None):
            raise PlanError(f"outputs must be 'all' or None, got {self.outputs!r}")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise PlanError(f"seed must be a whole number, got {self.seed!r}")
        if self.init is not None and not callable(self.init):
            raise PlanError(f"init must be a function of a stage's module, got {type(self.init).__name__}")
