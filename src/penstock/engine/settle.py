"""The loss in the outputs of a model that computes it itself: the mini-batch's, from its micro-batches'."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.split.counted import Counted

__all__ = ["Settlement"]


class Settlement:
    """What is noted of each micro-batch, to put the loss of joined outputs right.

    ``shares`` are the micro-batches' parts in a mean; () where a function of the user's makes the loss, and outputs are
    none of our business.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self.shares = shares
        self.own: dict[int, Counted] = {}  # what the model's losses were averaged over, where that is known
        self.scalar = False  # whether the output is the loss

    def note(self, microbatch: int, output: Any) -> Any:
        """The output of a micro-batch, without the count that may come with it."""
        if isinstance(output, Counted):
            self.own[microbatch] = Counted(None, output.count)
            output = output.output
        self.scalar = isinstance(output, Tensor) and output.dim() == 0
        return output

    def settle(self, joined: Any) -> Any:
        """Joined outputs, with one loss in the place of as many as there were micro-batches."""
        if not self.shares and not self.own:
            return joined
        if self.scalar and isinstance(joined, Tensor) and joined.shape == (len(self.shares),):
            return self._mean(joined)
        losses = joined.get("loss") if isinstance(joined, MutableMapping) else None
        count = max(len(self.shares), len(self.own))
        if count > 1 and isinstance(losses, Tensor) and losses.shape == (count,):
            joined["loss"] = self._mean(losses)
        return joined

    def _mean(self, losses: Tensor) -> Tensor:
        counts = [self.own[k].count for k in sorted(self.own)]
        if not counts:
            return (losses * losses.new_tensor(self.shares)).sum()
        if any(count is None for count in counts):
            return losses.sum()
        count = torch.stack([torch.as_tensor(n).to(losses) for n in counts])
        return torch.where(count > 0, losses * count, 0.0).sum() / count.sum()
