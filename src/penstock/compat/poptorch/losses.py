"""The loss that a PopTorch model computes in its forward: how it is marked, and how it is found."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from penstock.compat.poptorch.errors import Error, require
from penstock.engine.message import flatten
from penstock.engine.recompute.keep import keep

__all__ = ["identity_loss", "loss_of", "recomputationCheckpoint"]

_MARK = "_poptorch_loss"
_REDUCTIONS = {0: "sum", 1: "mean", 2: "none"}


def identity_loss(x: Tensor, reduction: str | int) -> Tensor:
    """``x`` reduced by ``"sum"``, ``"mean"`` or ``"none"``, marked as the loss that a training model is trained by."""
    if has_torch_function_unary(x):  # a trace records the call, so that the mark is set when the model runs
        function: Any = identity_loss
        traced: Tensor = handle_torch_function(function, (x,), x, reduction)
        return traced
    name = _REDUCTIONS.get(reduction, "") if isinstance(reduction, int) else reduction
    require(name in _REDUCTIONS.values(), f"Unsupported reduction type! 'sum', 'mean' or 'none', not {reduction!r}")
    loss = x.sum() if name == "sum" else x.mean() if name == "mean" else x.view_as(x)
    setattr(loss, _MARK, True)
    return loss


def loss_of(output: Any) -> Tensor:
    """The loss in a model's output: what ``identity_loss`` marked, or else the one number that has a gradient."""
    tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
    able = [leaf for leaf in tensors if leaf.requires_grad]
    found = [leaf for leaf in tensors if hasattr(leaf, _MARK)]
    found = found or [leaf for leaf in able if leaf.dim() == 0] or [leaf for leaf in able if leaf.numel() == 1]
    if not found:
        raise Error(
            "Couldn't find a loss in graph: a training model's forward must return its loss, one number that depends "
            "on the parameters. Return it beside the outputs, or mark it with poptorch.identity_loss"
        )
    if len({id(leaf) for leaf in found}) > 1:
        raise Error(
            f"Multiple independent losses found in graph: {len(found)} of the outputs could be the loss. Mark the one "
            "to train by with poptorch.identity_loss(loss, reduction='none')"
        )
    return found[0] if found[0].numel() == 1 else found[0].sum()


def recomputationCheckpoint(*tensors: Tensor) -> Any:
    """Values that are saved where the forward is recomputed, instead of being computed again (``penstock.keep``)."""
    kept = [keep(tensor) for tensor in tensors]
    return kept[0] if len(kept) == 1 else tuple(kept)
