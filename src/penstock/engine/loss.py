"""The loss of a mini-batch from the losses of its micro-batches.

A loss that averages is weighted by what each micro-batch averages over; one that sums is summed. What a loss
averages over must be known before the first backward, which comes before the last forward:

    mean    n_k / N, the micro-batch's share of the samples
    sum     1
    counted cross-entropy and NLL average over the targets that are not ignored (by class weight, if given): run
            as a sum, divided by the count over all targets of the mini-batch, which are at hand beforehand
    pair    the function returns (sum, count): divided by N at first, put right at the end of the step

A function of one argument finds the loss in the output: it takes no targets.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.errors import PlanError

__all__ = ["LossRule", "find_loss", "loss_rule", "takes_output_alone"]

_COUNTED: dict[Any, type[nn.Module]] = {F.cross_entropy: nn.CrossEntropyLoss, F.nll_loss: nn.NLLLoss}


@dataclass(frozen=True)
class LossRule:
    """How micro-batches' losses make the mini-batch's: ``call`` on each, with ``weights`` from sizes and targets."""

    call: Callable[[Any, Any], Any] | None
    reduction: str  # "mean", "sum" or "counted"
    count: Callable[[Any], Tensor] | None = None
    alone: bool = False  # whether ``call`` looks at the output alone

    @property
    def wants_targets(self) -> bool:
        return self.call is not None and not self.alone

    def whole(self, sizes: Sequence[int], targets: Sequence[Any]) -> float | Tensor:
        """What the mini-batch's loss is divided by: its samples, or what counts of its targets; 1 for a sum."""
        if self.reduction == "sum":
            return 1.0
        if self.count is not None:
            return functools.reduce(torch.add, [self.count(target) for target in targets], torch.zeros(()))
        return float(sum(sizes))

    def weights(self, sizes: Sequence[int], whole: float | Tensor) -> list[float | Tensor]:
        """What each micro-batch's loss is multiplied by, where all of them are divided by ``whole``."""
        if self.reduction == "mean" and self.count is None:
            return [size / whole for size in sizes]
        weight = whole.reciprocal() if isinstance(whole, Tensor) else 1 / whole if whole else math.inf
        return [weight] * len(sizes)


def loss_rule(loss_fn: Callable[..., Any] | None, reduction: str | None = None) -> LossRule:
    """How to treat ``loss_fn``: by what it says of itself, or as ``reduction`` says."""
    if loss_fn is not None and not callable(loss_fn):
        raise PlanError(f"loss_fn must be a function of (output, target), got {type(loss_fn).__name__}")
    if reduction not in (None, "mean", "sum"):
        raise PlanError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    options, function = _options(loss_fn)
    found = reduction or str(options.get("reduction", "mean"))
    found = "mean" if found == "batchmean" else found  # of ``nn.KLDivLoss``: a mean over samples
    if found not in ("mean", "sum"):
        raise PlanError(f"loss_fn has reduction={found!r}, but a step needs one number: use 'mean' or 'sum'")
    if loss_fn is not None and takes_output_alone(loss_fn):
        return LossRule(lambda output, _: loss_fn(output), found, alone=True)
    if loss_fn is None or found == "sum" or function not in _COUNTED:
        return LossRule(loss_fn, found)
    return _counted(function, options)


def takes_output_alone(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss function has one argument, and not two."""
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):  # a function without one, such as some of torch's
        return False
    kinds = [parameter.kind for parameter in parameters if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    return kinds in ([inspect.Parameter.POSITIONAL_ONLY], [inspect.Parameter.POSITIONAL_OR_KEYWORD])


def _options(loss_fn: Any) -> tuple[dict[str, Any], Any]:
    """The options of a loss function that says them, and the functional it stands for, if it is a known one."""
    if isinstance(loss_fn, functools.partial):
        options, function = _options(loss_fn.func)
        return {**options, **loss_fn.keywords}, function if not loss_fn.args else None
    for function, module in _COUNTED.items():
        if isinstance(loss_fn, module) and type(loss_fn).forward is module.forward:
            names = ("weight", "ignore_index", "reduction", "label_smoothing")
            return {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)}, function
    return {"reduction": getattr(loss_fn, "reduction", "mean")}, loss_fn


def _counted(function: Callable[..., Any], options: Mapping[str, Any]) -> LossRule:
    ignored = options.get("ignore_index", -100)
    weight: Tensor | None = options.get("weight")
    call = functools.partial(function, **{**options, "reduction": "sum"})

    def count(target: Any) -> Tensor:
        if not isinstance(target, Tensor):
            raise PlanError(f"the loss needs a tensor as target, got {type(target).__name__}")
        if target.is_floating_point():  # class probabilities: every sample counts
            classes = target.shape[1] if target.dim() > 1 else 1
            return torch.tensor(target.numel() // classes, dtype=torch.float64, device=target.device)
        kept: Tensor = target != ignored
        if weight is None:
            return kept.sum(dtype=torch.float64)
        of_target = weight.to(target.device).index_select(0, torch.where(kept, target, 0).flatten())
        return (of_target * kept.flatten()).sum(dtype=torch.float64)

    return LossRule(call, "counted", count)


def find_loss(output: Any) -> Any:
    """The loss in the output of a model that computes its own: the output itself, ``.loss`` or ``["loss"]``."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", None)
