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
from penstock.engine.replicas import Pending, Replicas
from penstock.engine.settle import Settlement
from penstock.engine.tree import detached
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
        self.sizes: Sequence[int] = ()
        self.weights: Sequence[float | Tensor] = ()
        self.replicas: Replicas | None = None  # where the mini-batch is theirs all together
        self.pending: Pending | None = None  # what all replicas have, while it is on its way
        self.losses: list[Tensor | None] = []
        self.counts: list[Any] = []  # what the losses, as sums, are to be divided by, all together
        self.settlement = Settlement(())

    def begin(
        self, sizes: Sequence[int], targets: Sequence[Any] | None, outputs: Outputs, *, training: bool = False
    ) -> None:
        """Get ready for one mini-batch, of which ``outputs`` are kept; with ``targets`` None there is no loss."""
        self.training = training
        self.wants_loss = targets is not None
        self.batch, self.sizes = sum(sizes), sizes
        self.targets = targets or ()
        self.pending = None
        if targets is not None:
            whole = self.rule.whole(sizes, self.targets)
            if self.replicas is None:
                self.weights = self.rule.weights(sizes, whole)
            else:  # not waited for before the first backward
                self.pending = self.replicas.start([float(self.batch), float(whole)])
        self.collector = collector(outputs, sizes) if sizes else None
        self.losses = [None] * len(sizes)
        self.counts = []
        alone = self.rule.call is None
        shares = self.rule.weights(sizes, self.rule.whole(sizes, ())) if alone else ()
        self.settlement = Settlement([float(share) for share in shares])

    def targets_of(self, targets: Any, sizes: Sequence[int], device: torch.device) -> list[Any] | None:
        """The targets of an evaluation's micro-batches; None where there is no loss to compute."""
        if targets is None and self.rule.wants_targets:
            return None
        return cut_targets(targets, sizes, device)

    def __call__(self, microbatch: int, output: Any) -> Any:
        """Keep the output; return the loss, or the output itself where there is no loss to compute.

        In a forward that runs for the second time, all there is to keep has been kept.
        """
        if isinstance(output, Counted) and self.rule.call is not None:
            output = output.output  # what the model's own loss was averaged over does not matter to another one
        counted = output if isinstance(output, Counted) else None
        output = self.settlement.note(microbatch, output)
        kept = self.collector
        if kept is not None and not here.recomputing and kept.wants(microbatch):
            # In a step, an output of a kind that cannot be joined is there for its loss alone.
            kept.add(microbatch, detached(output) if not self.training or can_join(output) else None)
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
        if self.pending is not None:
            self._weigh(self.pending)
        weight = 1 / self.batch if self.counts else 1.0 if self.settlement.own else self.weights[microbatch]
        if isinstance(weight, Tensor):
            return [(weight * self.scale).to(loss.device, loss.dtype).reshape(loss.shape)]
        return [torch.full_like(loss, weight * self.scale)]

    def _weigh(self, pending: Pending) -> None:
        """Weights and the size of the mini-batch, by what all replicas have."""
        batch, whole = pending()
        self.batch, self.pending = int(batch), None
        self.weights = self.rule.weights(self.sizes, 1.0 if self.rule.reduction == "sum" else whole)

    def finish(self) -> tuple[Tensor | None, float | None]:
        """The loss of the mini-batch, and the factor that puts all gradients right, if counts ask for one."""
        if self.pending is not None:
            self._weigh(self.pending)
        losses = [_wide(loss) for loss in self.losses if loss is not None]
        if self.replicas is None:
            return self._total(losses) if losses else (None, None)
        if not self.wants_loss:
            return None, None
        return self._total_of_all(losses, self.replicas)

    def _total(self, losses: Sequence[Tensor]) -> tuple[Tensor, float | None]:
        total = self._sum(losses)
        if not self.counts:
            return total, None
        count = sum(float(count) for count in self.counts)
        factor = self.batch / count if count else math.nan  # as the plain mean over nothing
        return total * (factor / self.batch), factor

    def _sum(self, losses: Sequence[Tensor]) -> Tensor:
        """The micro-batches' losses added up, each by its weight."""
        if self.counts and len(self.counts) != len(losses):
            raise PlanError("loss_fn returned (sum, count) for some micro-batches and a loss alone for others")
        stacked = torch.stack(list(losses))
        if self.counts or self.settlement.own:
            return stacked.sum()
        weights = [w.to(stacked) if isinstance(w, Tensor) else stacked.new_tensor(w) for w in self.weights]
        return (stacked * torch.stack(weights)).sum()

    def _total_of_all(self, losses: Sequence[Tensor], replicas: Replicas) -> tuple[Tensor | None, float | None]:
        """The same over all replicas, of which one may have no samples."""
        total = self._sum(losses) if losses else torch.zeros(())
        counts = sum(float(count) for count in self.counts)
        there, wide = float(bool(losses)), float(total.dtype == torch.float64)
        loss, count, counted, anyone, wide = replicas.sum([float(total), counts, float(bool(self.counts)), there, wide])
        if not anyone:
            return None, None
        factor = None
        if counted:
            factor = self.batch / count if count else math.nan
            loss *= factor / self.batch
        return torch.tensor(loss, dtype=torch.float64 if wide else torch.float32, device=total.device), factor

    def take_outputs(self) -> Any:
        """The outputs of the mini-batch that were to be kept; nothing of it is kept here any longer."""
        kept = self.collector
        whole = None if kept is None else self.settlement.settle(kept.result())
        self.clear()
        return whole

    def clear(self) -> None:
        self.collector = self.pending = None
        self.losses, self.counts, self.targets = [], [], ()


def _wide(loss: Tensor) -> Tensor:
    """Losses of half precision are added up in single."""
    return loss.reshape(()).float() if loss.dtype.itemsize < 4 else loss.reshape(())
