"""The front ends: which one takes a model, and how a saved plan finds its line again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import PlanError
from penstock.split.block import begun
from penstock.split.cutpoint import cut_points
from penstock.split.flatten import is_plain
from penstock.split.line import Line
from penstock.split.sequential import SequentialLine
from penstock.split.trace.errors import CannotTrace, mentions_marks
from penstock.split.trace.line import TraceLine, trace_line
from penstock.split.trial import call_of
from penstock.split.trunk.line import TrunkLine, trunk_line
from penstock.split.whole import WholeLine

__all__ = ["line_from", "line_of"]


def line_of(
    model: nn.Module,
    *,
    stages: int | None = None,
    cuts: Sequence[str] | None = None,
    blocks: str | None = None,
    sample: Any = None,
) -> Line:
    """The line of a model, by the front end that was asked for, or the one that suits it.

    A Sequential without marks is cut between its layers, a model that says where its trunk is, there; all others are
    traced. One that cannot be traced can still be one stage.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"expected an nn.Module to split, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule) or getattr(model, "_orig_mod", None) is not None:
        kind = "compiled" if hasattr(model, "_orig_mod") else "scripted"
        raise PlanError(f"a {kind} model cannot be cut: split the model it was made of, and compile its blocks")
    if blocks is not None and cuts is not None:
        raise PlanError("say where to cut once: either cuts=[…] (before these modules) or blocks=… (a list of blocks)")
    if blocks is not None:
        return trunk_line(model, blocks)
    if cuts is None and not _marked(model):
        if is_plain(model):
            return SequentialLine(model)
        if getattr(model, "_no_split_modules", None):
            return trunk_line(model, None)
    try:
        return trace_line(model, stages=stages, cuts=cuts, sample=None if sample is None else call_of(sample))
    except CannotTrace as error:
        if stages != 1 or cuts is not None or error.marked or mentions_marks(model) or begun(model):
            raise
        if type(model).forward is nn.Module.forward:  # a list of modules, which nobody can call
            raise
    return WholeLine(model)


def _marked(model: nn.Module) -> bool:
    """Whether there are marks on the model's modules. Those inside of a forward show when it is traced."""
    return bool(cut_points(model)) or any(begun(module) is not None for module in model.modules())


_FRONTS: dict[str, Callable[[nn.Module, Mapping[str, Any]], Line]] = {
    "sequential": lambda model, recipe: line_of(model),
    "trace": TraceLine.from_recipe,
    "trunk": TrunkLine.from_recipe,
    "whole": lambda model, recipe: WholeLine(model),
}


def line_from(model: nn.Module, recipe: Mapping[str, Any]) -> Line:
    """The line that ``recipe``, of a saved plan, describes."""
    front = recipe.get("front")
    if front not in _FRONTS:
        raise PlanError(f"the plan was made by a front end {front!r} that is not known here")
    return _FRONTS[front](model, recipe)
