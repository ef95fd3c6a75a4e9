"""A model as a line of layers: what every front end makes of a model, and what is cut into stages.

    model ──front end──▶ Line ──balance──▶ groups of layers ──▶ Plan, and one module per stage

A stage's module is called with one value per edge into it, in the order of the edges' sources, and gives one value
per edge out of it, in the order of their destinations. The first stage is called with the value that ``arguments``
made of the model's arguments; the last one gives the model's output. A value alone is not in a tuple:

    first stage   module(value) -> x                    one edge out
    a middle one  module(x, skip) -> (y, other)         two edges in, two edges out
    last stage    module(y, other) -> output
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.split.plan import Edge

__all__ = ["Groups", "Line", "bind"]

Groups = Sequence[Sequence[str]]
"""The layers of each stage."""


class Line(ABC):
    """The layers of a model in the order in which they run."""

    model: nn.Module
    layers: tuple[str, ...]
    recipe: Mapping[str, Any]
    """What finds the same line in the same model again; JSON. ``recipe["front"]`` names the front end."""
    fixed: Mapping[str, Any] = MappingProxyType({})
    """Arguments that the stages always give the model."""

    @abstractmethod
    def members(self, layer: str) -> Iterable[tuple[str, Tensor]]:
        """The parameters and buffers that a layer uses, by their names in the model, under every name they have."""

    @abstractmethod
    def edges(self, groups: Groups) -> tuple[Edge, ...]:
        """What crosses between these stages. Every stage has an edge to the next, if only with nothing in it."""

    @abstractmethod
    def stage(self, groups: Groups, index: int) -> nn.Module:
        """One stage: the model's own modules, under their own names, called as said above."""

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What enters the first stage when the model is called like this: the arguments by their names."""
        return bind(self.model, args, kwargs)

    def crossing(self, cut: int) -> float:
        """What it costs to cut before layer number ``cut``: the size of what crosses, or how many values do."""
        return 1.0

    def devices(self) -> Mapping[str, str]:
        """The devices that layers were marked for."""
        return {}


def bind(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by the names that the model's forward has for them; defaults are left out.

    ``*args`` stays a tuple under its name, ``**kwargs`` is spread out.
    """
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise PlanError(f"{type(model).__name__} takes {signature}: {error}") from error
    arguments = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments
