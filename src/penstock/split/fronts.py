"""The front ends: which one takes a model, and how a saved plan finds its line again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from penstock.errors import PlanError
from penstock.split.line import Line
from penstock.split.sequential import SequentialLine

__all__ = ["line_from", "line_of"]


def line_of(model: nn.Module) -> Line:
    """The line of a model, by the front end that suits it."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"expected an nn.Module to split, got {type(model).__name__}")
    own_forward = type(model).forward is not nn.Sequential.forward or "forward" in model.__dict__
    if not isinstance(model, nn.Sequential) or own_forward:
        raise PlanError(
            f"{type(model).__name__} is not a plain nn.Sequential, whose forward runs its layers one after the other: "
            "write it as an nn.Sequential of its parts"
        )
    return SequentialLine(model)


_FRONTS: dict[str, Callable[[nn.Module, Mapping[str, Any]], Line]] = {
    "sequential": lambda model, recipe: line_of(model),
}


def line_from(model: nn.Module, recipe: Mapping[str, Any]) -> Line:
    """The line that ``recipe``, of a saved plan, describes."""
    front = recipe.get("front")
    if front not in _FRONTS:
        raise PlanError(f"the plan was made by a front end {front!r} that is not known here")
    return _FRONTS[front](model, recipe)
