"""The end of the pipeline: the loss of each micro-batch, and the outputs that are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.engine.inputs import cut_targets
from penstock.engine.loss import LossRule, find_loss
from penstock.engine.microbatch import can_join
from penstock.engine.moment import here
from penstock.engine.outputs import Collector, Outputs, collector
from penstock.engine.settle import Settlement
from penstock.engine.tree import flatten, unflatten
from penstock.errors import PlanError
from penstock.split.counted import Counted

__all__ = ["Head"]


class Head:
    """Called with every output of the last stage, in training and in evaluation."""

    def __init__(self, rule: LossRule) -> None:
        self.rule = rule
        self.scale = 1.0  # of the gradients, not of the loss
        self.collector: Collector | None = None
        self.training = False
        self.wants_loss = False
        self.batch = 0
        self.targets: Sequence[Any] = ()
        self.weights: Sequence[float | Tensor] = ()
        self.losses: list[Tensor | None] = []
        self.counts: list[Any] = []  # what the losses, as sums, are to be divided by, all together
        self.settlement = Settlement(())

    def begin(
        self, sizes: Sequence[int], targets: Sequence[Any] | None, outputs: Outputs, *, training: bool = False
    ) -> None:
        """Get ready for one mini-batch, of which ``outputs`` are kept; with ``targets`` None there is no loss."""
        self.training = training
        self.wants_loss = targets is not None
        self.batch = sum(sizes)
        self.targets = targets or ()
        self.weights = self.rule.weights(sizes, self.targets) if targets is not None else ()
        self.collector = collector(outputs, sizes)
        self.losses = [None] * len(sizes)
        self.counts = []
        alone = self.rule.call is None
        self.settlement = Settlement([float(w) for w in self.rule.weights(sizes, ())] if alone else ())

    def targets_of(self, targets: Any, sizes: Sequence[int], device: torch.device) -> list[Any] | None:
        """The targets of an evaluation's micro-batches; None where there is no loss to compute."""
        if targets is None and self.rule.call is not None:
            return None
        return cut_targets(targets, sizes, device)

    def __call__(self, microbatch: int, output: Any) -> Any:
        """Keep the output; return the loss, or the output itself where there is no loss to compute.

        In a forward that runs for the second time, all there is to keep has been kept.
        """
        counted = output if isinstance(output, Counted) else None
        output = self.settlement.note(microbatch, output)
        kept = self.collector
        if kept is not None and not here.recomputing and kept.wants(microbatch):
            # In a step, an output of a kind that cannot be joined is there for its loss alone.
            kept.add(microbatch, _detached(output) if not self.training or can_join(output) else None)
        if not self.wants_loss:
            return output
        if self.rule.call is None:
            loss = find_loss(output) if counted is None else self._own_loss(find_loss(output), counted)
            what = "the model computes its own loss (no loss_fn was given), but its output"
        else:
            loss = self.rule.call(output, self.targets[microbatch])
            what = "loss_fn"
        if self.rule.call is None and not self.training and (isinstance(output, Tensor) or loss is None):
            return output  # a model that computes its loss computes it where it is given labels, and not always
        if self.rule.call is not None and isinstance(loss, tuple):
            loss = self._pair(loss)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise PlanError(f"{what} gave {found} where the loss, one number in a tensor, was expected")
        if self.training and not loss.requires_grad:
            raise PlanError("the loss does not depend on any parameter that requires a gradient: nothing to train")
        if not here.recomputing:
            self.losses[microbatch] = loss.detach().clone()  # its memory may be as large as the output's
        return loss

    def _own_loss(self, loss: Any, counted: Counted) -> Any:
        """A loss that the model averaged, as a sum: over nothing it is not a number, but nothing to the whole."""
        if not isinstance(loss, Tensor) or counted.count is None:
            return loss
        if not here.recomputing:
            self.counts.append(counted.count)
        return torch.where(counted.count > 0, loss * counted.count, torch.zeros_like(loss))

    def _pair(self, pair: tuple[Any, ...]) -> Any:
        if len(pair) != 2:
            raise PlanError(f"loss_fn returned {len(pair)} values: return the loss, or (sum, count)")
        loss, count = pair
        if not here.recomputing:
            self.counts.append(count)
        return loss

    def seed(self, microbatch: int) -> list[Tensor]:
        """The gradient of the mini-batch's loss by this micro-batch's."""
        loss = self.losses[microbatch]
        assert loss is not None
        weight = 1 / self.batch if self.counts else 1.0 if self.settlement.own else self.weights[microbatch]
        if isinstance(weight, Tensor):
            return [(weight * self.scale).to(loss.device, loss.dtype).reshape(loss.shape)]
        return [torch.full_like(loss, weight * self.scale)]

    def finish(self) -> tuple[Tensor | None, float | None]:
        """The loss of the mini-batch, and the factor that puts all gradients right, if counts ask for one."""
        if not any(loss is not None for loss in self.losses):
            return None, None
        losses = torch.stack([_wide(loss) for loss in self.losses if loss is not None])
        if self.counts:
            if len(self.counts) != len(losses):
                raise PlanError("loss_fn returned (sum, count) for some micro-batches and a loss alone for others")
            count = sum(float(count) for count in self.counts)
            factor = self.batch / count if count else math.nan  # as the plain mean over nothing
            return losses.sum() * (factor / self.batch), factor
        if self.settlement.own:
            return losses.sum(), None
        weights = [w.to(losses) if isinstance(w, Tensor) else losses.new_tensor(w) for w in self.weights]
        return (losses * torch.stack(weights)).sum(), None

    def take_outputs(self) -> Any:
        """The outputs of the mini-batch that were to be kept; nothing of it is kept here any longer."""
        kept = self.collector
        whole = None if kept is None else self.settlement.settle(kept.result())
        self.clear()
        return whole

    def clear(self) -> None:
        self.collector = None
        self.losses, self.counts, self.targets = [], [], ()


def _wide(loss: Tensor) -> Tensor:
    """Losses of half precision are added up in single."""
    return loss.reshape(()).float() if loss.dtype.itemsize < 4 else loss.reshape(())


def _detached(output: Any) -> Any:
    leaves, spec = flatten(output)
    return unflatten([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
