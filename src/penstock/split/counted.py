"""A model's output with what its loss is a mean over: micro-batches of different counts weigh differently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Counted"]


@dataclass(frozen=True)
class Counted:
    """The last stage's output where the model computed its own loss.

    ``count`` is over how much the loss was averaged (for labels: those that are not ignored), as a tensor without
    dimensions: the loss of the mini-batch is the mean of the micro-batches' losses, weighted by their counts. None: the
    loss is a sum, divided by a number that was given for the whole mini-batch; such losses are added.
    """

    output: Any
    count: Tensor | None
