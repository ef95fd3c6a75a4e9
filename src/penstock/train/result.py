"""The result of a step, and sums over steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepResult:
    """The result of ``Pipeline.step``: ``loss`` on every rank, ``outputs`` where the last stage is.

    ``bubble`` is the share of the step's time in which ranks waited for others, as measured: of this process's rank
    under a mesh, else of all on average. It is not known on GPUs, where the host does not wait.
    """

    loss: Any  # a Tensor; None for an evaluation without targets
    outputs: Any
    samples: int  # of all replicas, where there is a loss
    microbatches: int  # of this replica
    seconds: float
    bubble: float | None = None


@dataclass
class StepTotals:
    """Sums over steps. ``idle`` of the ``measured`` seconds were spent waiting, in steps with a known bubble."""

    steps: int = 0
    samples: int = 0
    measured: float = 0.0
    idle: float = 0.0

    def add(self, result: StepResult) -> None:
        self.steps += 1
        self.samples += result.samples
        if result.bubble is not None:
            self.measured += result.seconds
            self.idle += result.bubble * result.seconds

    def since(self, before: StepTotals) -> StepTotals:
        return StepTotals(*(now - then for now, then in zip(vars(self).values(), vars(before).values(), strict=True)))

    @property
    def bubble(self) -> float | None:
        """The fraction of time spent waiting; None if it is not known."""
        return self.idle / self.measured if self.measured else None
