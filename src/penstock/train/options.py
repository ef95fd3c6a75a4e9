"""What a pipeline can be told, checked in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.engine.loss import Outputs, check_outputs
from penstock.errors import PlanError
from penstock.schedule.costs import Costs
from penstock.schedule.recompute import Recompute
from penstock.schedule.schedule import Schedule
from penstock.train.devices import Devices
from penstock.train.materialise import Init
from penstock.train.mesh import Mesh
from penstock.train.optimizer_offload import Offload

__all__ = ["Options", "Parallelize"]

Parallelize = Callable[[nn.Module, Mesh], nn.Module | None]
"""Makes a parallel module of a stage's; None where it has changed the stage in place."""


@dataclass(frozen=True)
class Options:
    """The arguments of ``Pipeline`` beside its plan and mesh."""

    loss_fn: Callable[..., Any] | None
    microbatches: int
    microbatch_size: int | None
    schedule: str | Schedule | None
    costs: Costs | None
    strategy: str
    devices: Devices
    reduction: str | None
    outputs: Outputs
    outputs_everywhere: bool
    init: Init | None
    recompute: Recompute
    seed: int | None
    offload: Offload | None
    accumulate: str | None
    batchnorm: str
    lockstep: bool
    dynamic: bool
    parallelize: Parallelize | None
    stuck_after: float | None
    timeout: float | None

    @property
    def order(self) -> str | Schedule:
        """The schedule, as it was given or as the strategy has it."""
        return self.schedule or ("sharded" if self.strategy == "sharded" else "1f1b")

    def shared(self) -> dict[str, Any]:
        """What must be the same on every rank, beside the schedule."""
        names = ("seed", "accumulate", "batchnorm", "outputs_everywhere", "dynamic", "stuck_after", "timeout")
        numbers = {name: getattr(self, name) for name in (*names, "microbatch_size")}
        return {**numbers, "parallelize": self.parallelize is not None}

    def check(self) -> None:
        """One clear message for what cannot be, before anything is built."""
        check_outputs(self.outputs)
        if self.strategy not in ("pipelined", "sharded"):
            raise PlanError(f"strategy must be 'pipelined' or 'sharded', got {self.strategy!r}")
        if self.strategy == "sharded" and self.schedule not in (None, "sharded"):
            raise PlanError(
                f"strategy='sharded' sends one micro-batch at a time through all stages, which schedule="
                f"{self.schedule!r} does not: leave one of them out"
            )
        if self.costs is not None and not isinstance(self.costs, Costs):
            raise PlanError(f"costs must be penstock.schedule.Costs(…), got {type(self.costs).__name__}")
        if self.batchnorm not in ("microbatch", "deferred"):
            raise PlanError(f"batchnorm must be 'microbatch' or 'deferred', got {self.batchnorm!r}")
        if self.accumulate not in (None, "fp32"):
            raise PlanError(f"accumulate must be 'fp32' or None, got {self.accumulate!r}")
        for name in ("dynamic", "lockstep", "outputs_everywhere"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise PlanError(f"seed must be a whole number, got {self.seed!r}")
        for name in ("stuck_after", "timeout"):
            limit = getattr(self, name)
            if limit is not None and (not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit > 0):
                raise PlanError(f"{name} must be a number of seconds, or None for never, got {limit!r}")
        if self.offload is not None and not isinstance(self.offload, Offload):
            raise PlanError(f"offload must be ps.Offload(…), got {type(self.offload).__name__}")
        if self.offload is not None and self.offload.weights and self.parallelize is not None:
            raise PlanError("parallelize wants weights that stay where they are: leave out Offload(weights=True)")
        if self.parallelize is not None and not callable(self.parallelize):
            raise PlanError(f"parallelize must be a function of (stage, mesh), got {type(self.parallelize).__name__}")
        if self.init is not None and not callable(self.init):
            raise PlanError(f"init must be a function of a stage's module, got {type(self.init).__name__}")
