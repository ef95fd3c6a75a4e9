"""What a step gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["StepResult"]


@dataclass(frozen=True)
class StepResult:
    """What a step gives back: ``loss`` on every rank, ``outputs`` where the last stage is.

    ``bubble`` is the share of the step's time in which ranks waited for others, as measured: of this process's rank
    under a mesh, else of all on average. It is not known on GPUs, where the host does not wait.
    """

    loss: Any  # a Tensor; None for an evaluation without targets
    outputs: Any
    samples: int  # of all replicas, where there is a loss
    microbatches: int  # of this replica
    seconds: float
    bubble: float | None = None
