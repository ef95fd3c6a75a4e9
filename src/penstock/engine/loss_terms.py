"""The weights of micro-batches in the loss of a mini-batch, and the reductions of a loss, from which they follow.

A loss is made of reductions, which are read from its autograd graph:

    loss = 0.5 * cross_entropy(a, y) + mse_loss(b, z)

    Add ──▶ Mul ──▶ NllLoss     a mean over the targets that are not ignored
     └────▶ MseLoss             a mean over all elements

The graph is followed from the loss through sums and products with constants to the first reduction on every path. It
does not show the inside of compiled functions and of the user's own autograd functions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch import output_shape, pytree, saved_value
from penstock.errors import PlanError

Count = Tensor | float

_MEAN, _SUM = 1, 2  # torch's numbers of reductions
_LINEAR = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Add", "Sub", "Rsub", "Neg", "ToCopy", "Clone", "Alias", "View", "UnsafeView", "ReshapeAlias", "Expand"),
        *("Squeeze", "Unsqueeze", "Select", "Stack", "Cat", "Where", "NanToNum"),
    )
    for number in range(4)
)
_JOINS = ("StackBackward0", "CatBackward0")  # of several losses, which are then summed or averaged


@dataclass(frozen=True)
class LossTerm:
    """One reduction.

    ``count`` is the number of elements that it averages over; None for a sum. ``by_value``: the count depends on the
    data, such as ignored targets or a mask, and not on shapes alone. ``own_count`` is that of a sum, where it is known.
    """

    name: str
    count: Count | None
    by_value: bool = False
    own_count: Count | None = None
    numerator: Any = None  # the autograd node of a sum that was divided by its count


def requiring_grad(value: Any) -> Any:
    """``value`` with its floating-point tensors as leaves that require a gradient: a loss of them has a graph."""
    return pytree.tree_map(
        lambda x: x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x, value
    )


def with_graph() -> AbstractContextManager[Any]:
    """Record a graph, under ``no_grad`` and ``inference_mode`` too."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else torch.enable_grad()


def loss_terms(loss: Tensor) -> list[LossTerm]:
    """The reductions that ``loss`` is made of; parts that cannot be followed are left out."""
    return [] if loss.grad_fn is None else list(_terms(loss.grad_fn, set()))


def count_targets(target: Any, ignored: int, weight: Tensor | None) -> Tensor:
    """The number that cross-entropy and NLL divide the sum of their losses by."""
    if target.is_floating_point():  # class probabilities: every sample counts
        classes = target.shape[1] if target.dim() > 1 else 1
        return torch.full((), target.numel() // classes, dtype=torch.float64, device=target.device)
    kept: Tensor = target != ignored
    if weight is None:
        return kept.sum(dtype=torch.float64)
    of_target = weight.detach().to(target.device).index_select(0, torch.where(kept, target, 0).flatten())
    return (of_target * kept.flatten()).sum(dtype=torch.float64)


def _terms(node: Any, seen: set[Any]) -> Iterator[LossTerm]:
    if node in seen:
        return
    seen.add(node)
    name = node.name()
    inner = [source for source, _ in node.next_functions if source is not None]
    joined = bool(inner) and inner[0].name() in _JOINS
    sizes, reduction = saved_value(node, "self_sym_sizes"), saved_value(node, "reduction")
    if reduction is not None:
        yield from _loss_function(node, name, reduction)
    elif name in ("MeanBackward0", "MeanBackward1") and sizes is not None and not joined:
        if len(saved_value(node, "dim") or sizes) == len(sizes):
            yield LossTerm("mean", float(math.prod(sizes)))
    elif name in ("SumBackward0", "SumBackward1") and sizes is not None and not joined:
        yield LossTerm("sum", None, own_count=float(math.prod(sizes)))
    elif name in ("DivBackward0", "DivBackward1") and len(inner) == 1:
        yield from _quotient(saved_value(node, "other"), inner[0], list(_terms(inner[0], seen)))
    elif name.startswith("MulBackward") and len(inner) == 1:
        # A plain sum times a number may be a mean: sum() * (1 / n).
        yield from (term for term in _terms(inner[0], seen) if term.name != "sum" or term.count is not None)
    elif name in _LINEAR or joined:
        for source in inner:
            yield from _terms(source, seen)


def _loss_function(node: Any, name: str, reduction: int) -> Iterator[LossTerm]:
    """One of torch's loss functions, which saves its reduction and its inputs."""
    target, ignored = saved_value(node, "target"), saved_value(node, "ignore_index")
    if reduction not in (_MEAN, _SUM) or target is None:
        return
    label = name.partition("Backward")[0]
    if ignored is not None:
        ignored -= 2**64 if ignored >= 2**63 else 0  # torch shows it without its sign
        term = LossTerm(label, count_targets(target, ignored, saved_value(node, "weight")), by_value=True)
    else:
        sizes = saved_value(node, "self").shape, target.shape
        term = LossTerm(label, float(math.prod(torch.broadcast_shapes(*sizes))))  # type: ignore[no-untyped-call]
    yield term if reduction == _MEAN else replace(term, count=None, own_count=term.count)


def _quotient(divisor: Any, numerator: Any, terms: list[LossTerm]) -> Iterator[LossTerm]:
    """A sum divided by a count is a mean over it.

    Cross-entropy that is summed and divided by more targets than it has (Hugging Face: ``num_items_in_batch``) stays a
    sum: the divisor is that of the whole mini-batch.
    """
    scalar = divisor.numel() == 1 if isinstance(divisor, Tensor) else divisor is not None
    if not scalar or len(terms) != 1 or terms[0].count is not None:
        yield from terms
        return
    (term,) = terms
    if isinstance(term.own_count, Tensor) and bool(term.own_count < torch.as_tensor(divisor)):
        yield term
        return
    # Autograd saves a Python number as a 0-dim tensor. Under a dispatch mode, double() accepts that and detach() fails.
    count = divisor.double().detach().reshape(()) if isinstance(divisor, Tensor) else float(divisor)
    yield LossTerm(term.name, count, by_value=True, numerator=numerator)


# ── losses that compare samples with each other ─────────────────────────────────────────────────────────────────────

_PRODUCTS = ("Mm", "Addmm", "Bmm", "Cdist")
_OF_DATA = ("Mm", "Addmm", "Bmm", "Convolution")  # where one input has no gradient, it is data


def warn_if_samples_are_compared(loss: Tensor, samples: int) -> None:
    """Warn of a loss in which each sample is compared with all others: micro-batches do not see each other's.

    It is seen by a matrix product of activations, in the last stage or in ``loss_fn``, that has a row and a column for
    each sample, or for each of two views of it.
    """
    nodes: dict[Any, None] = {} if loss.grad_fn is None else {loss.grad_fn: None}
    queue = list(nodes)
    while queue:
        inner = [source for source, _ in queue.pop().next_functions if source is not None and source not in nodes]
        nodes.update(dict.fromkeys(inner))
        queue += dict.fromkeys(inner)
    found = next((node.name() for node in nodes if _compares(node, samples)), None)
    if found is not None:
        warnings.warn(
            f"the loss compares the {samples} samples of a micro-batch with each other ({found}), as a contrastive "
            "loss does: with several micro-batches or replicas it is not the loss of the mini-batch, in which each "
            "sample is compared with all others. Use microbatches=1, or let the model return its embeddings and "
            "compute the loss of all of them outside: loss(pipe(x)).backward()",
            stacklevel=2,
        )


def _compares(node: Any, samples: int) -> bool:
    name, sources = node.name().partition("Backward")[0], [source for source, _ in node.next_functions]
    if name not in _PRODUCTS or samples < 2:
        return False
    squares = {(*batch, n, n) for batch in ((), (1,)) for n in (samples, 2 * samples)}
    return output_shape(node) in squares and all(map(_carries_data, sources[-2:]))


def _carries_data(node: Any) -> bool:
    """Whether a value is computed from samples, and not from parameters alone."""
    seen, queue = set[Any](), [node]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name, inner = node.name().partition("Backward")[0], [source for source, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if name.startswith("Embedding") or (name in _OF_DATA and None in inner):
            return True
        if leaf is not None and not isinstance(leaf, nn.Parameter):
            return True
        queue += inner
    return False


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────

_REMEDY = (
    "Give Pipeline a loss_fn that returns (sum, count), say reduction='mean' to weight micro-batches by their samples, "
    "or use microbatches=1"
)


class LossWeights:
    """The weights of one mini-batch's micro-batches in its loss: ``numerators[k] / sum(counts)``."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.numerators: list[Count] = [0.0] * len(sizes)
        self.counts: list[Count] = [0.0] * len(sizes)
        self.kinds: list[str] = [""] * len(sizes)  # "mean", "sum" or "pair", of the micro-batches that were observed
        self.by_value = False  # whether counts depend on the data: they may change with every mini-batch
        self.others: dict[int, list[LossTerm]] = {}  # further means in the loss of a micro-batch
        self.own_loss = ""  # "scalar": the model's output is its loss; "entry": the output has it

    def set_known(self, numerators: Sequence[Count], counts: Sequence[Count]) -> None:
        self.numerators, self.counts = list(numerators), list(counts)

    def observe(self, k: int, loss: Tensor) -> Tensor:
        """Note what the loss of micro-batch ``k`` averages over; returns the loss, as 0 where that is nothing."""
        terms = loss_terms(loss)
        means = sorted((term for term in terms if term.count is not None), key=lambda term: not term.by_value)
        sums = [term for term in terms if term.count is None]
        if not means:
            if not sums and len(self.sizes) > 1 and loss.grad_fn is not None:
                warnings.warn(
                    f"it cannot be seen what the loss averages over (its last operation is {loss.grad_fn.name()}): "
                    "micro-batches are weighted by their samples, which is the mini-batch's loss only if that is a "
                    f"mean over samples. {_REMEDY}",
                    stacklevel=2,
                )
            kind, count = ("sum", 1.0) if sums else ("mean", float(self.sizes[k]))
            self._note(k, kind, 1.0 if sums else count, count)
            return loss
        if any(term.name != "sum" for term in sums):  # a plain sum() may be of parameters: a penalty
            names = ", ".join(term.name for term in terms)
            raise PlanError(
                f"the loss adds a sum over samples to a mean ({names}): the parts of micro-batches cannot be weighted "
                f"alike. {_REMEDY}"
            )
        first, *self.others[k] = means
        assert first.count is not None
        self.by_value |= first.by_value
        self.add_mean(k, first.count)
        if isinstance(first.count, float) and first.count > 0:
            return loss
        counts = torch.as_tensor(first.count, device=loss.device) > 0
        if first.numerator is not None:  # the gradient of 0 / 0
            first.numerator.register_prehook(lambda grads: tuple(torch.where(counts, grad, 0.0) for grad in grads))
        return torch.where(counts, loss, torch.zeros_like(loss))

    def add_mean(self, k: int, count: Count) -> None:
        """The loss of micro-batch ``k`` is a mean over ``count`` elements."""
        self._note(k, "mean", count, count)

    def add_pair(self, k: int, count: Count) -> None:
        """The loss of micro-batch ``k`` is a sum, with the count that its function has returned."""
        self.by_value = True
        self._note(k, "pair", 1.0, count.detach().double() if isinstance(count, Tensor) else float(count))

    def _note(self, k: int, kind: str, numerator: Count, count: Count) -> None:
        self.kinds[k], self.numerators[k], self.counts[k] = kind, numerator, count

    @property
    def summed(self) -> bool:
        return "sum" in self.kinds

    def check(self) -> None:
        """Raise an error if no weights make the micro-batches' losses that of the mini-batch."""
        kinds = {kind for kind in self.kinds if kind}
        if len(kinds) > 1:
            what = " and ".join(f"a {kind}" for kind in sorted(kinds)).replace("a pair", "(sum, count)")
            raise PlanError(f"the losses of micro-batches differ: {what}, each of some micro-batches. {_REMEDY}")
        if len({len(terms) for terms in self.others.values()}) > 1:
            raise PlanError(f"the losses of micro-batches have different numbers of terms. {_REMEDY}")
        if not any(self.others.values()):  # reading a count would wait for the GPU
            return
        rows = [[float(self.counts[k]), *(float(term.count or 0) for term in self.others[k])] for k in self.others]
        first, *others = zip(*rows, strict=True)
        for j, counts in enumerate(others):
            ratio = sum(counts) / (sum(first) or 1.0)
            if any(abs(n - ratio * c) > 1e-9 * max(n, c) for n, c in zip(counts, first, strict=True)):
                term = next(iter(self.others.values()))[j]
                text = (
                    f"the loss has means over different elements: micro-batches average over {list(first)} and, in "
                    f"its term {term.name}, over {list(counts)}. One weight per micro-batch cannot give the loss of "
                    "the mini-batch"
                )
                if term.by_value:
                    raise PlanError(f"{text}. {_REMEDY}")
                warnings.warn(f"{text}: it is weighted by the former. {_REMEDY}", stacklevel=2)

    def merge(self, joined: Any) -> Any:
        """The joined outputs with one loss in place of one per micro-batch."""
        count = len(self.sizes)
        if self.own_loss == "scalar" and isinstance(joined, Tensor) and joined.shape == (count,):
            return self._mean(joined)
        losses = joined.get("loss") if isinstance(joined, MutableMapping) and self.own_loss == "entry" else None
        if count > 1 and isinstance(losses, Tensor) and losses.shape == (count,):
            joined["loss"] = self._mean(losses)
        return joined

    def _mean(self, losses: Tensor) -> Tensor:
        self.check()
        numerators, counts = (
            torch.stack([torch.as_tensor(n, dtype=torch.float64, device=losses.device) for n in numbers])
            for numbers in (self.numerators, self.counts)
        )
        total = torch.where(numerators > 0, losses * numerators.to(losses.dtype), 0.0).sum()
        return total if self.summed else total / counts.sum().to(losses.dtype)
