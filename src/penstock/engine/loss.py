"""The loss of a mini-batch from the losses of its micro-batches, and the outputs that a step keeps.

A loss that averages is weighted by the number of elements that each micro-batch averages over; one that sums is summed:

    loss = Σ n_k l_k / Σ c_k        backward of micro-batch k is seeded with n_k / Σ c_k

    mean      n_k = c_k = samples, where the user says reduction="mean"
    sum       n_k = 1, Σ c_k = 1
    targets   cross-entropy and NLL: n_k = c_k = targets that are not ignored (by class weight), known beforehand
    elements  mean squared error and the like: n_k = c_k = elements of the output
    observed  any other loss: n_k = c_k is read from its autograd graph when its forward is over (`loss_terms`)
    pair      the function returns (sum, count): n_k = 1, c_k = count

The first backward comes before the last forward. Where counts are not known beforehand, Σ c_k is then an estimate by
the micro-batches so far, and all gradients are rescaled at the end of the step unless it was right.

A function of one argument finds the loss in the output: it takes no targets.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.forward_context import forward_state
from penstock.engine.loss_terms import (
    Count,
    LossWeights,
    count_targets,
    requiring_grad,
    warn_if_samples_are_compared,
    with_graph,
)
from penstock.engine.message import detach_tensors, flatten, map_tensors, unflatten
from penstock.engine.microbatch import can_join, join
from penstock.engine.replicas import PendingSum, ReplicaGroup
from penstock.errors import PlanError

# ── loss functions ───────────────────────────────────────────────────────────────────────────────────────────────

EXACT = 1e-12  # a relative difference of counts below this is rounding

_COUNTED: dict[Any, type[nn.Module]] = {F.cross_entropy: nn.CrossEntropyLoss, F.nll_loss: nn.NLLLoss}
_ELEMENTWISE: dict[Any, type[nn.Module]] = {
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}


@dataclass(frozen=True)
class LossRule:
    """How the losses of micro-batches make that of the mini-batch."""

    call: Callable[[Any, Any], Any] | None  # None: the model computes its loss
    reduction: str  # "mean", "sum", "targets", "elements" or "observed"
    count: Callable[[Any], Tensor] | None = None  # of targets
    wants_targets: bool = True
    made_of: tuple[Any, str | None, Sequence[Any]] = (None, None, ())  # the function, the given reduction, its options

    def current(self) -> LossRule:
        """The rule for the loss function as it is now: its weight or reduction may have been set since."""
        loss_fn, reduction, options = self.made_of
        now = [*_loss_options(loss_fn)[0].values()]
        same = len(now) == len(options) and all(map(operator.is_, now, options))
        return self if same else loss_rule(loss_fn, reduction)


def loss_rule(loss_fn: Callable[..., Any] | None, reduction: str | None = None) -> LossRule:
    """The rule for ``loss_fn``, by its own ``reduction`` or by the one given."""
    rule = _loss_rule(loss_fn, reduction)
    return replace(rule, made_of=(loss_fn, reduction, [*_loss_options(loss_fn)[0].values()]))


def _loss_rule(loss_fn: Callable[..., Any] | None, reduction: str | None) -> LossRule:
    if loss_fn is not None and not callable(loss_fn):
        raise PlanError(f"loss_fn must be a function of (output, target), got {type(loss_fn).__name__}")
    if reduction not in (None, "mean", "sum"):
        raise PlanError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    options, function = _loss_options(loss_fn)
    own = str(options.get("reduction", "mean"))
    if reduction is None and own not in ("mean", "sum", "batchmean"):
        raise PlanError(f"loss_fn has reduction={own!r}, but a step needs one number: use 'mean' or 'sum'")
    found = reduction or ("sum" if own == "sum" else "observed")
    if loss_fn is None:
        return LossRule(None, found, wants_targets=False)
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):  # some of torch's functions have no signature
        parameters = {}.values()
    kinds = [parameter.kind for parameter in parameters if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    if kinds in ([inspect.Parameter.POSITIONAL_ONLY], [inspect.Parameter.POSITIONAL_OR_KEYWORD]):
        return LossRule(lambda output, _: loss_fn(output), found, wants_targets=False)
    if found == "observed" and function in _ELEMENTWISE:
        return LossRule(loss_fn, "elements")
    if found == "sum" or function not in _COUNTED:
        return LossRule(loss_fn, found)
    ignored, weight = options.get("ignore_index", -100), options.get("weight")
    return LossRule(loss_fn, "targets", functools.partial(_count, ignored=ignored, weight=weight))


def _loss_options(loss_fn: Any) -> tuple[dict[str, Any], Any]:
    """The options of a loss function, and the functional that it stands for, where these are known."""
    if isinstance(loss_fn, functools.partial):
        options, function = _loss_options(loss_fn.func)
        return {**options, **loss_fn.keywords}, function if not loss_fn.args else None
    for function, module in (_COUNTED | _ELEMENTWISE).items():
        if isinstance(loss_fn, module) and type(loss_fn).forward is module.forward:
            names = ("weight", "ignore_index", "reduction", "label_smoothing")
            return {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)}, function
    return {"reduction": getattr(loss_fn, "reduction", "mean")}, loss_fn


def _count(target: Any, ignored: int, weight: Tensor | None) -> Tensor:
    if not isinstance(target, Tensor):
        raise PlanError(f"the loss needs a tensor as target, got {type(target).__name__}")
    return count_targets(target, ignored, weight)


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
    factor: float | None  # what the gradients are still to be multiplied by; None: nothing, in other steps neither
    outputs: Any
    samples: int
    microbatches: int


@dataclass(eq=False)
class CapturedLoss:
    """The results of a last stage's forward that was captured as a CUDA graph: its tensors are written by replays."""

    output: Any = None
    loss: Tensor | None = None
    kind: str = ""  # of the weight that was observed; "" if it is known beforehand
    numbers: tuple[Count, Count] = (0.0, 0.0)  # numerator and count
    others: list[Any] | None = None
    by_value: bool = False
    own_loss: str = ""


@dataclass(eq=False)
class LossAndOutputs:
    """The end of the last stage: called with each micro-batch's output, in training and in evaluation."""

    rule: LossRule
    scale: float = 1.0  # of the gradients, not of the loss
    replicas: ReplicaGroup | None = None  # where the mini-batch is split over replicas
    compared: bool = False  # whether it was looked at whether the loss compares samples with each other
    # Of the current mini-batch:
    training: bool = False
    wants_loss: bool = False
    observes: bool = False  # whether the counts come with the forwards
    needs_graph: bool = False  # whether a forward needs a graph for that, in evaluations too
    batch: int = 0
    targets: Sequence[Any] = ()
    sizes: Sequence[int] = ()
    kept: KeptOutputs | None = None
    pending: PendingSum | None = None  # samples and denominator over all replicas, not yet received
    denominator: Count | None = None  # of the weights that backwards were seeded with
    losses: list[Tensor | None] = field(default_factory=list)
    weights: LossWeights = field(default_factory=lambda: LossWeights(()))
    capturing: CapturedLoss | None = None  # set while a CUDA graph is captured
    _has_own_loss: bool | None = None  # whether the model's outputs have a loss in them

    def begin(
        self, sizes: Sequence[int], targets: Sequence[Any] | None, outputs: Outputs, *, training: bool = False
    ) -> None:
        """Start a mini-batch and keep these ``outputs``; with ``targets`` None there is no loss."""
        self.training, self.rule = training, self.rule.current()
        self.wants_loss = targets is not None
        self.batch, self.sizes = sum(sizes), sizes
        self.targets = targets or ()
        self.pending = self.denominator = None
        self.kept = KeptOutputs(outputs, sizes) if sizes and outputs is not None else None
        self.losses = [None] * len(sizes)
        self.weights = weights = LossWeights(sizes)
        reduction, count = self.rule.reduction, self.rule.count
        own = self.rule.call is None or not self.rule.wants_targets
        several = len(sizes) > 1 or self.replicas is not None
        self.observes = several and reduction in ("observed", "elements")
        self.needs_graph = self.observes and own and self._has_own_loss is not False
        samples: list[Count] = [float(size) for size in sizes]
        if reduction == "sum":
            weights.set_known([1.0] * len(sizes), samples)
        elif count is not None and targets is not None:
            counts = [count(target) for target in self.targets]
            weights.set_known(counts, counts)
        elif not self.observes:
            weights.set_known(samples, samples)
        if targets is not None and self.replicas is not None:  # received by the first backward
            self.pending = self.replicas.start_sum([float(self.batch), float(sum(weights.counts))])
            if not sizes:  # the others may wait for this replica's part of an estimate
                self._denominator()

    def __call__(self, microbatch: int, output: Any) -> Any:
        """Keep the output; return the loss, or the output itself where there is no loss to compute.

        A recomputed forward keeps nothing: the first one did.
        """
        first, weights, observes = not forward_state.recomputing, self.weights, self.observes
        if first:
            self.keep(microbatch, output)
        what = "the model computes its own loss (no loss_fn was given), but its output"
        if self.rule.call is None:
            loss = find_loss(output)
            scalar = isinstance(loss, Tensor) and loss.dim() == 0
            self._has_own_loss = scalar
            weights.own_loss = "" if not scalar else "scalar" if loss is output else "entry"
            if scalar and observes:
                loss = weights.observe(microbatch, loss)
            if not self.wants_loss or not (self.training or scalar):
                # A model that computes its loss does so where it is given labels, and not always.
                return output
        elif not self.wants_loss:
            return output
        else:
            what = "loss_fn"
            target = self.targets[microbatch]
            if observes and self.rule.reduction == "observed" and not torch.is_grad_enabled():
                with with_graph():
                    loss = self.rule.call(requiring_grad(output), target)
            else:
                loss = self.rule.call(output, target)
            if isinstance(loss, tuple):
                if len(loss) != 2:
                    raise PlanError(f"loss_fn returned {len(loss)} values: return the loss, or (sum, count)")
                loss, count = loss
                weights.add_pair(microbatch, count)
            elif observes and self.rule.reduction == "elements" and isinstance(output, Tensor):
                weights.add_mean(microbatch, float(output.numel()))
            elif observes and isinstance(loss, Tensor):
                loss = weights.observe(microbatch, loss)
            elif isinstance(loss, Tensor) and isinstance(count := weights.counts[microbatch], Tensor):
                loss = torch.where(count > 0, loss, torch.zeros_like(loss))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise PlanError(f"{what} gave {found} where the loss, one number in a tensor, was expected")
        if self.training and not loss.requires_grad:
            raise PlanError("the loss does not depend on any parameter that requires a gradient: nothing to train")
        if self.training and not self.compared and (len(self.sizes) > 1 or self.replicas is not None):
            self.compared = True
            warn_if_samples_are_compared(loss, self.sizes[microbatch])
        if first:
            self.losses[microbatch] = loss.detach().clone()  # its memory may be a view of the output's
        return loss if self.training else loss.detach()

    def keep(self, microbatch: int, output: Any) -> None:
        """Keep the output of a micro-batch, if it is one of those that the step returns."""
        if self.kept is None:
            return
        if self.capturing is not None:
            self.capturing.output = detach_tensors(output)
        elif microbatch in self.kept.selected:
            # In a step, an output that cannot be joined is there for its loss alone.
            self.kept.add(microbatch, detach_tensors(output) if not self.training or can_join(output) else None)

    @contextmanager
    def capture(self, microbatch: int, target: Any, count: Any) -> Iterator[CapturedLoss]:
        """Around a forward that is captured as a CUDA graph: it reads these tensors as the target and its count.

        The result has the tensors that each replay writes, for ``replayed``.
        """
        targets, losses, outer = self.targets, list(self.losses), self.weights
        captured = self.capturing = CapturedLoss()
        self.weights = weights = LossWeights(self.sizes)
        weights.counts[microbatch] = count
        if targets:
            self.targets = [target if k == microbatch else other for k, other in enumerate(targets)]
        try:
            yield captured
            captured.loss, captured.kind = self.losses[microbatch], weights.kinds[microbatch]
            captured.numbers = weights.numerators[microbatch], weights.counts[microbatch]
            captured.others, captured.by_value = weights.others.get(microbatch), weights.by_value
            captured.own_loss = weights.own_loss
        finally:
            self.targets, self.capturing, self.weights, self.losses = targets, None, outer, losses

    def replayed(self, microbatch: int, captured: CapturedLoss) -> None:
        """Note the results of a replay, as ``__call__`` does in a forward without a graph."""
        weights, clones = self.weights, dict[int, Any]()

        def clone(value: Any) -> Any:  # each tensor once: the next replay overwrites it
            if not isinstance(value, Tensor):
                return value
            if id(value) not in clones:
                clones[id(value)] = value.clone()
            return clones[id(value)]

        if self.kept is not None and microbatch in self.kept.selected:
            joinable = not self.training or can_join(captured.output)
            self.kept.add(microbatch, map_tensors(captured.output, clone) if joinable else None)
        self.losses[microbatch] = clone(captured.loss)
        weights.own_loss = captured.own_loss
        if captured.kind:
            weights.kinds[microbatch], weights.by_value = captured.kind, weights.by_value or captured.by_value
            weights.numerators[microbatch], weights.counts[microbatch] = map(clone, captured.numbers)
            if captured.others is not None:
                weights.others[microbatch] = [
                    replace(term, count=clone(term.count), numerator=None) for term in captured.others
                ]

    def seed(self, microbatch: int) -> list[Tensor]:
        """The gradient of the mini-batch's loss with respect to this micro-batch's."""
        loss = self.losses[microbatch]
        assert loss is not None
        weight = self.weights.numerators[microbatch] / self._denominator()
        if isinstance(weight, Tensor):
            return [(weight * self.scale).to(loss.device, loss.dtype).reshape(loss.shape)]
        return [torch.full_like(loss, weight * self.scale)]

    def _denominator(self) -> Count:
        """The sum of all counts, or an estimate of it by the forwards so far; the same number for the whole step."""
        if self.denominator is not None:
            return self.denominator
        weights, reduction = self.weights, self.rule.reduction
        known = sum(weights.counts)
        if self.pending is not None:
            batch, known = self.pending()
            self.batch, self.pending = int(batch), None
        if reduction == "sum":
            known = 1.0
        elif self.observes or "pair" in weights.kinds:
            seen = [k for k, kind in enumerate(weights.kinds) if kind]
            count: Count = sum(weights.counts[k] for k in seen)
            samples, summed = float(sum(self.sizes[k] for k in seen)), float(weights.summed)
            if self.replicas is not None:
                count, samples, summed = self.replicas.sum([float(count), samples, summed])
            known = 1.0 if summed else count if samples == self.batch else count * self.batch / max(samples, 1)
            if isinstance(known, Tensor):
                known = torch.where(known > 0, known, float(self.batch))
            known = known if isinstance(known, Tensor) else known or float(self.batch)
        self.denominator = known
        return known

    def finish(self) -> tuple[Tensor | None, float | None]:
        """The loss of the mini-batch, and the factor to multiply all gradients by, where counts came with losses."""
        if not self.wants_loss:
            return None, None
        weights, denominator = self.weights, self._denominator()
        weights.check()
        losses = [loss.reshape(()) for loss in self.losses if loss is not None]
        # Half-precision losses are added up in single precision.
        losses = [loss.float() if loss.dtype.itemsize < 4 else loss for loss in losses]
        stacked = torch.stack(losses) if losses else torch.zeros(1)
        estimated = self.observes or "pair" in weights.kinds
        count = denominator if weights.summed or not estimated else sum(weights.counts)
        count = count if isinstance(count, Tensor) else count or math.nan  # a mean over nothing
        present, dtype = float(bool(losses)), stacked.dtype
        if self.replicas is None:
            numbers, device = [n / count for n in weights.numerators], stacked.device
            shares = [torch.as_tensor(n, dtype=torch.float64, device=device).to(dtype) for n in numbers]
            total = (stacked * torch.stack(shares)).sum() if losses else stacked[0]
        else:  # of which one may have no samples
            numerators = [torch.as_tensor(n, dtype=torch.float64, device=stacked.device) for n in weights.numerators]
            number = float((stacked.double() * torch.stack(numerators)).sum()) if losses else 0.0
            own = [number, float(sum(weights.counts)), present, float(dtype == torch.float64), float(weights.summed)]
            number, counts, present, double, summed = self.replicas.sum([*own])
            count = denominator if summed or not estimated else counts
            number = number / float(count) if count else math.nan
            dtype = torch.float64 if double else torch.float32
            total = torch.tensor(number, dtype=torch.float64, device=stacked.device)
        factor = None
        if estimated:
            factor = float(denominator / count) if count else math.nan
            factor = 1.0 if abs(factor - 1) < EXACT else factor
            if factor == 1.0 and not weights.by_value:
                factor = None
        return (total.to(dtype), factor) if present else (None, None)

    def take_outputs(self) -> Any:
        """The outputs that were kept; nothing of the mini-batch is kept here any longer."""
        joined = None if self.kept is None else self.weights.merge(self.kept.result())
        self.clear()
        return joined

    def clear(self) -> None:
        self.kept = self.pending = None
        self.losses, self.targets = [], ()
