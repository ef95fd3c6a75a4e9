"""The loss of a mini-batch from the losses of its micro-batches, and the outputs that a step keeps.

A loss that averages is weighted by what each micro-batch averages over; one that sums is summed. The denominator must
be known before the first backward, which comes before the last forward:

    mean    n_k / N, the micro-batch's share of the samples
    sum     1
    counted cross-entropy and NLL average over the targets that are not ignored (by class weight, if given): run
            as a sum, divided by the count over all targets of the mini-batch, which are known beforehand
    pair    the function returns (sum, count): divided by N at first, rescaled at the end of the step

A function of one argument finds the loss in the output: it takes no targets.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.forward_context import forward_state
from penstock.engine.message import detach_tensors, flatten, unflatten
from penstock.engine.microbatch import can_join, join
from penstock.engine.replicas import PendingSum, ReplicaGroup
from penstock.errors import PlanError
from penstock.split.sample import CountedOutput

# ── loss functions ───────────────────────────────────────────────────────────────────────────────────────────────

_COUNTED: dict[Any, type[nn.Module]] = {F.cross_entropy: nn.CrossEntropyLoss, F.nll_loss: nn.NLLLoss}


@dataclass(frozen=True)
class LossRule:
    """How the losses of micro-batches make that of the mini-batch: ``call`` for each, then a weighted sum."""

    call: Callable[[Any, Any], Any] | None  # None: the model computes its loss
    reduction: str  # "mean", "sum" or "counted"
    count: Callable[[Any], Tensor] | None = None
    wants_targets: bool = True

    def denominator(self, sizes: Sequence[int], targets: Sequence[Any]) -> float | Tensor:
        """The mini-batch's number of samples, or its count of targets; 1 for a sum."""
        if self.reduction == "sum":
            return 1.0
        if self.count is not None:
            return functools.reduce(torch.add, [self.count(target) for target in targets], torch.zeros(()))
        return float(sum(sizes))

    def weights(self, sizes: Sequence[int], denominator: float | Tensor) -> list[float | Tensor]:
        """The factor of each micro-batch's loss."""
        if self.reduction == "mean" and self.count is None:
            return [size / denominator for size in sizes]
        if isinstance(denominator, Tensor):
            return [denominator.reciprocal()] * len(sizes)
        return [1 / denominator if denominator else math.inf] * len(sizes)


def loss_rule(loss_fn: Callable[..., Any] | None, reduction: str | None = None) -> LossRule:
    """The rule for ``loss_fn``, by its own ``reduction`` or by the one given."""
    if loss_fn is not None and not callable(loss_fn):
        raise PlanError(f"loss_fn must be a function of (output, target), got {type(loss_fn).__name__}")
    if reduction not in (None, "mean", "sum"):
        raise PlanError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    options, function = _loss_options(loss_fn)
    found = reduction or str(options.get("reduction", "mean"))
    found = "mean" if found == "batchmean" else found  # of ``nn.KLDivLoss``: a mean over samples
    if found not in ("mean", "sum"):
        raise PlanError(f"loss_fn has reduction={found!r}, but a step needs one number: use 'mean' or 'sum'")
    if loss_fn is None:
        return LossRule(None, found, wants_targets=False)
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):  # some of torch's functions have no signature
        parameters = {}.values()
    kinds = [parameter.kind for parameter in parameters if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    if kinds in ([inspect.Parameter.POSITIONAL_ONLY], [inspect.Parameter.POSITIONAL_OR_KEYWORD]):
        return LossRule(lambda output, _: loss_fn(output), found, wants_targets=False)
    if found == "sum" or function not in _COUNTED:
        return LossRule(loss_fn, found)
    call = functools.partial(function, **{**options, "reduction": "sum"})
    count = functools.partial(_count_targets, ignored=options.get("ignore_index", -100), weight=options.get("weight"))
    return LossRule(call, "counted", count)


def _loss_options(loss_fn: Any) -> tuple[dict[str, Any], Any]:
    """The options of a loss function, and the functional that it stands for, where these are known."""
    if isinstance(loss_fn, functools.partial):
        options, function = _loss_options(loss_fn.func)
        return {**options, **loss_fn.keywords}, function if not loss_fn.args else None
    for function, module in _COUNTED.items():
        if isinstance(loss_fn, module) and type(loss_fn).forward is module.forward:
            names = ("weight", "ignore_index", "reduction", "label_smoothing")
            return {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)}, function
    return {"reduction": getattr(loss_fn, "reduction", "mean")}, loss_fn


def _count_targets(target: Any, ignored: int, weight: Tensor | None) -> Tensor:
    """The number that cross-entropy and NLL divide the sum of their losses by."""
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


def find_loss(output: Any) -> Any:
    """The loss in the output of a model that computes its own: the output itself, ``.loss`` or ``["loss"]``."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", None)


# ── outputs ──────────────────────────────────────────────────────────────────────────────────────────────────────

Outputs = str | Callable[[Any, Any], Any] | None
"""Which of the micro-batches' outputs are kept:

    "all"       0 1 2 3 4 5    joined along the first dimension
    "final"               5
    "every:2"     1   3   5    joined
    "sum"       0+1+2+3+4+5    added up as they come: no more than one is kept
    a function                 called as f(so_far, output) on each in order, with None at first
"""


class KeptOutputs:
    """Collects the outputs of a mini-batch's micro-batches, which come in any order."""

    def __init__(self, outputs: Outputs, sizes: Sequence[int]) -> None:
        count, every = len(sizes), check_outputs(outputs)
        self.sizes = sizes
        self.selected = [count - 1] if outputs == "final" else range(every - 1, count, every)
        self.reducer = outputs if callable(outputs) else _add_outputs if outputs == "sum" else None
        self.outputs: dict[int, Any] = {}
        self.reduced: Any = None
        self.num_reduced = 0

    def add(self, microbatch: int, output: Any) -> None:
        self.outputs[microbatch] = output
        while self.reducer is not None and self.num_reduced in self.outputs:
            self.reduced = self.reducer(self.reduced, self.outputs.pop(self.num_reduced))
            self.num_reduced += 1

    def result(self) -> Any:
        if self.reducer is not None or not self.selected:
            return self.reduced
        outputs = [self.outputs[k] for k in self.selected]
        if len(outputs) > 1:
            check_joinable([flatten(output)[0] for output in outputs], [self.sizes[k] for k in self.selected])
        return join(outputs)


def check_outputs(outputs: Outputs) -> int:
    """Raise an error for an invalid value; return the ``N`` of ``"every:N"``, 1 for other words."""
    if outputs is None or callable(outputs) or outputs in ("all", "final", "sum"):
        return 1
    word, _, number = outputs.partition(":") if isinstance(outputs, str) else ("", "", "")
    if word == "every" and number.isdigit() and int(number) > 0:
        return int(number)
    raise PlanError(
        f"outputs must be 'all', 'final', 'sum', 'every:N', a function of (so_far, output), or None: got {outputs!r}"
    )


def check_joinable(outputs: Sequence[Sequence[Any]], sizes: Sequence[int]) -> None:
    """Outputs are joined along the first dimension: it must hold the same number of entries for each sample.

    How many entries there are may also depend on the data: then micro-batches of the same size differ.
    """
    for column in zip(*outputs, strict=False):
        if len(column) < 2 or not all(isinstance(x, Tensor) and x.dim() for x in column):
            continue
        lengths = [len(x) for x in column]
        if set(lengths) == {1} or len(set(zip(sizes, lengths, strict=True))) > len(set(sizes)):
            continue  # one entry per micro-batch, such as a loss
        if lengths != [lengths[0] // sizes[0] * size for size in sizes]:
            raise PlanError(
                f"outputs of micro-batches of {list(sizes)} samples have {lengths} entries along their first "
                "dimension, and cannot be joined there: return outputs with the samples first, or, for a step, say "
                "outputs='final' or None"
            )


def _add_outputs(so_far: Any, output: Any) -> Any:
    if so_far is None:
        return output
    (before, spec), (now, other) = flatten(so_far), flatten(output)
    shapes = [[tuple(x.shape) if isinstance(x, Tensor) else None for x in leaves] for leaves in (before, now)]
    if spec != other or shapes[0] != shapes[1]:
        raise PlanError(
            f"outputs='sum' adds outputs of one shape, but micro-batches gave {shapes[0]} and {shapes[1]}: choose a "
            "batch that divides into the micro-batches, or a function of (so_far, output)"
        )
    return unflatten([a + b if isinstance(a, Tensor) else a for a, b in zip(before, now, strict=True)], spec)


# ── loss and outputs of a step ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class StepOutcome:
    """The result of one mini-batch. With replicas, loss and samples are those of all; the rest is this one's."""

    loss: Tensor | None  # None: an evaluation without targets
    factor: float | None  # what the gradients are still to be multiplied by; None: nothing
    outputs: Any
    samples: int
    microbatches: int


class ModelLoss:
    """Merges the losses in the outputs of a model that computes its own, one per micro-batch, into the mini-batch's.

    ``shares`` are the micro-batches' parts in a mean; () where a ``loss_fn`` computes the loss.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self.shares = shares
        self.counts: dict[int, Any] = {}  # what the model's losses were averaged over, per micro-batch, where known
        self.scalar = False  # whether the output is the loss

    def merge(self, joined: Any) -> Any:
        """The joined outputs with one loss in place of one per micro-batch."""
        if not self.shares and not self.counts:
            return joined
        if self.scalar and isinstance(joined, Tensor) and joined.shape == (len(self.shares),):
            return self._mean(joined)
        losses = joined.get("loss") if isinstance(joined, MutableMapping) else None
        count = max(len(self.shares), len(self.counts))
        if count > 1 and isinstance(losses, Tensor) and losses.shape == (count,):
            joined["loss"] = self._mean(losses)
        return joined

    def _mean(self, losses: Tensor) -> Tensor:
        counts = [self.counts[k] for k in sorted(self.counts)]
        if not counts:
            return (losses * losses.new_tensor(self.shares)).sum()
        if any(count is None for count in counts):
            return losses.sum()
        count = torch.stack([torch.as_tensor(n).to(losses) for n in counts])
        return torch.where(count > 0, losses * count, 0.0).sum() / count.sum()


@dataclass(eq=False)
class LossAndOutputs:
    """The end of the last stage: called with each micro-batch's output, in training and in evaluation."""

    rule: LossRule
    scale: float = 1.0  # of the gradients, not of the loss
    replicas: ReplicaGroup | None = None  # where the mini-batch is split over replicas
    # Of the current mini-batch:
    training: bool = False
    wants_loss: bool = False
    batch: int = 0
    targets: Sequence[Any] = ()
    sizes: Sequence[int] = ()
    weights: Sequence[float | Tensor] = ()
    kept: KeptOutputs | None = None
    pending: PendingSum | None = None  # samples and denominator over all replicas, not yet received
    losses: list[Tensor | None] = field(default_factory=list)
    counts: list[Any] = field(default_factory=list)  # of losses that are sums: the total is divided by their sum
    model_loss: ModelLoss = field(default_factory=lambda: ModelLoss(()))

    def begin(
        self, sizes: Sequence[int], targets: Sequence[Any] | None, outputs: Outputs, *, training: bool = False
    ) -> None:
        """Start a mini-batch and keep these ``outputs``; with ``targets`` None there is no loss."""
        self.training = training
        self.wants_loss = targets is not None
        self.batch, self.sizes = sum(sizes), sizes
        self.targets = targets or ()
        self.pending = None
        if targets is not None:
            denominator = self.rule.denominator(sizes, self.targets)
            if self.replicas is None:
                self.weights = self.rule.weights(sizes, denominator)
            else:  # received by the first backward
                self.pending = self.replicas.start_sum([float(self.batch), float(denominator)])
        self.kept = KeptOutputs(outputs, sizes) if sizes and outputs is not None else None
        self.losses = [None] * len(sizes)
        self.counts = []
        shares = self.rule.weights(sizes, self.rule.denominator(sizes, ())) if self.rule.call is None else ()
        self.model_loss = ModelLoss([float(share) for share in shares])

    def __call__(self, microbatch: int, output: Any) -> Any:
        """Keep the output; return the loss, or the output itself where there is no loss to compute.

        A recomputed forward keeps nothing: the first one did.
        """
        count = None
        first = not forward_state.recomputing
        if isinstance(output, CountedOutput):
            if self.rule.call is None:  # else the count of the model's own loss does not matter
                self.model_loss.counts[microbatch] = count = output.count
            output = output.output
        self.model_loss.scalar = isinstance(output, Tensor) and output.dim() == 0
        kept = self.kept
        if kept is not None and first and microbatch in kept.selected:
            # In a step, an output that cannot be joined is there for its loss alone.
            kept.add(microbatch, detach_tensors(output) if not self.training or can_join(output) else None)
        if not self.wants_loss:
            return output
        if self.rule.call is None:
            loss = find_loss(output)
            if count is not None and isinstance(loss, Tensor):
                # Undo the model's mean; a micro-batch with count 0 contributes 0 instead of NaN.
                loss = torch.where(count > 0, loss * count, torch.zeros_like(loss))
                if first:
                    self.counts.append(count)
            if not self.training and (isinstance(output, Tensor) or loss is None):
                return output  # a model that computes its loss does so where it is given labels, and not always
            what = "the model computes its own loss (no loss_fn was given), but its output"
        else:
            loss = self.rule.call(output, self.targets[microbatch])
            what = "loss_fn"
            if isinstance(loss, tuple):
                if len(loss) != 2:
                    raise PlanError(f"loss_fn returned {len(loss)} values: return the loss, or (sum, count)")
                loss, count = loss
                if first:
                    self.counts.append(count)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise PlanError(f"{what} gave {found} where the loss, one number in a tensor, was expected")
        if self.training and not loss.requires_grad:
            raise PlanError("the loss does not depend on any parameter that requires a gradient: nothing to train")
        if first:
            self.losses[microbatch] = loss.detach().clone()  # its memory may be a view of the output's
        return loss

    def seed(self, microbatch: int) -> list[Tensor]:
        """The gradient of the mini-batch's loss with respect to this micro-batch's."""
        loss = self.losses[microbatch]
        assert loss is not None
        self._receive_weights()
        weight = 1 / self.batch if self.counts else 1.0 if self.model_loss.counts else self.weights[microbatch]
        if isinstance(weight, Tensor):
            return [(weight * self.scale).to(loss.device, loss.dtype).reshape(loss.shape)]
        return [torch.full_like(loss, weight * self.scale)]

    def _receive_weights(self) -> None:
        """With replicas: the size of the mini-batch and the weights, once the sums over all replicas have arrived."""
        if self.pending is not None:
            batch, denominator = self.pending()
            self.batch, self.pending = int(batch), None
            self.weights = self.rule.weights(self.sizes, 1.0 if self.rule.reduction == "sum" else denominator)

    def finish(self) -> tuple[Tensor | None, float | None]:
        """The loss of the mini-batch, and the factor to multiply all gradients by, if the loss returned counts."""
        self._receive_weights()
        if not self.wants_loss:
            return None, None
        losses = [loss.reshape(()) for loss in self.losses if loss is not None]
        # Half-precision losses are added up in single precision.
        losses = [loss.float() if loss.dtype.itemsize < 4 else loss for loss in losses]
        if self.counts and len(self.counts) != len(losses):
            raise PlanError("loss_fn returned (sum, count) for some micro-batches and a loss alone for others")
        stacked = torch.stack(losses) if losses else torch.zeros(1)
        if losses and not self.counts and not self.model_loss.counts:
            weights = [w.to(stacked) if isinstance(w, Tensor) else stacked.new_tensor(w) for w in self.weights]
            stacked = stacked * torch.stack(weights)
        total = stacked.sum()
        dtype, count = total.dtype, sum(float(count) for count in self.counts)
        counted, present = float(bool(self.counts)), float(bool(losses))
        if self.replicas is not None:  # of which one may have no samples
            double = float(dtype == torch.float64)
            number, count, counted, present, double = self.replicas.sum([float(total), count, counted, present, double])
            dtype = torch.float64 if double else torch.float32
            total = torch.tensor(number, dtype=torch.float64, device=total.device)
        factor = None
        if counted:
            factor = self.batch / count if count else math.nan  # like the plain mean over nothing
            total = total * (factor / self.batch)
        return (total.to(dtype), factor) if present else (None, None)

    def take_outputs(self) -> Any:
        """The outputs that were kept; nothing of the mini-batch is kept here any longer."""
        joined = None if self.kept is None else self.model_loss.merge(self.kept.result())
        self.clear()
        return joined

    def clear(self) -> None:
        self.kept = self.pending = None
        self.losses, self.counts, self.targets = [], [], ()
