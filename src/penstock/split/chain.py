"""A model as a chain of layers: what every front end makes of a model, and what is cut into stages.

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
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.split.lazy import build, members
from penstock.split.plan import Edge, Plan, StageSpec, Tie
from penstock.suggest import did_you_mean

__all__ = [
    "CountedOutput",
    "Groups",
    "LayerChain",
    "SharedWeights",
    "WholeModelChain",
    "bind_arguments",
    "build_plan",
    "find_ties",
]

Groups = Sequence[Sequence[str]]
"""The layers of each stage."""


class LayerChain(ABC):
    """The layers of a model in the order in which they run."""

    model: nn.Module
    layers: tuple[str, ...]
    recipe: Mapping[str, Any]
    """What finds the same chain in the same model again; JSON. ``recipe["front"]`` names the front end."""
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
        return bind_arguments(self.model, args, kwargs)

    def crossing(self, cut: int) -> float:
        """What it costs to cut before layer number ``cut``: the size of what crosses, or how many values do."""
        return 1.0

    def devices(self) -> Mapping[str, str]:
        """The devices that layers were marked for."""
        return {}


def bind_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
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


# A model that is one stage: nothing is cut, so nothing need be known of its forward.


class WholeModelChain(LayerChain):
    """One layer, the whole model, for models whose forward cannot be followed."""

    layers = ("model",)
    recipe = {"front": "whole"}  # noqa: RUF012

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def members(self, layer: str) -> Iterable[tuple[str, Tensor]]:
        return members(self.model, "")

    def edges(self, groups: Groups) -> tuple[Edge, ...]:
        if len(groups) > 1:
            raise PlanError(f"the model is one layer, which cannot be cut into {len(groups)} stages")
        return ()

    def stage(self, groups: Groups, index: int) -> nn.Module:
        return _WholeModelStage(build(self.model))

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, kwargs


class _WholeModelStage(nn.Module):
    """Calls the model. What the model holds is held here as well, under the same names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["_penstock_model"] = model
        for held in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[held] = getattr(model, held)

    @property
    def training(self) -> bool:
        model: nn.Module | None = self.__dict__.get("_penstock_model")
        return True if model is None else model.training

    @training.setter
    def training(self, value: bool) -> None:
        model: nn.Module | None = self.__dict__.get("_penstock_model")
        if model is not None:
            model.training = value

    def forward(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = value
        return self.__dict__["_penstock_model"](*args, **kwargs)


# A model's output with what its loss is a mean over: micro-batches of different counts weigh differently.


@dataclass(frozen=True)
class CountedOutput:
    """The last stage's output where the model computed its own loss.

    ``count`` is over how much the loss was averaged (for labels: those that are not ignored), as a tensor without
    dimensions: the loss of the mini-batch is the mean of the micro-batches' losses, weighted by their counts. None: the
    loss is a sum, divided by a number that was given for the whole mini-batch; such losses are added.
    """

    output: Any
    count: Tensor | None


# Parameters that live in several stages: found by identity before the model is cut, or said to be one by name.

SharedWeights = Sequence[Sequence[str]]
"""Names of separate parameters that are to be one, such as ``[("embed.weight", "head.weight")]``."""


def find_ties(chain: LayerChain, groups: Groups, shared: SharedWeights = ()) -> tuple[Tie, ...]:
    """One tie per parameter that occurs in several stages, or under several names that are said to be one."""
    stages: dict[str, set[int]] = {}
    parameters: dict[str, nn.Parameter] = {}
    for stage, layers in enumerate(groups):
        for layer in layers:
            for name, tensor in chain.members(layer):
                if isinstance(tensor, nn.Parameter):
                    parameters[name] = tensor
                    stages.setdefault(name, set()).add(stage)
    family = {name: id(parameter) for name, parameter in parameters.items()}
    named: set[int] = set()
    for names in shared:
        _check_shared(names, parameters)
        one = family[names[0]]
        named.add(one)
        others = {family[name] for name in names}
        family = {name: one if key in others else key for name, key in family.items()}
    members: dict[int, list[str]] = {}
    for name, key in family.items():
        members.setdefault(key, []).append(name)
    ties = []
    for key, names in members.items():
        places = tuple(sorted(set().union(*(stages[name] for name in names))))
        if len(places) > 1 or (key in named and len(names) > 1):
            ties.append(Tie(tuple(names), places))
    return tuple(ties)


def _check_shared(names: Sequence[str], parameters: dict[str, nn.Parameter]) -> None:
    if isinstance(names, str) or len(names) < 2 or not all(isinstance(name, str) for name in names):
        raise PlanError(f"shared_weights takes pairs of names, such as ('a.weight', 'b.weight'), got {names!r}")
    for name in names:
        if name not in parameters:
            hint = did_you_mean(name, parameters)
            raise PlanError(f"shared_weights names {name!r}, which is not a parameter of the model{hint}")
    first, *others = (parameters[name] for name in names)
    for name, other in zip(names[1:], others, strict=True):
        if other.shape != first.shape or other.dtype != first.dtype:
            raise PlanError(
                f"shared_weights: {names[0]} is {first.dtype} of shape {tuple(first.shape)}, but {name} is "
                f"{other.dtype} of shape {tuple(other.shape)}: they cannot be one parameter"
            )


# From a chain and its groups to the plan.


def build_plan(chain: LayerChain, groups: Groups, shared: SharedWeights = ()) -> Plan:
    """The plan whose stage ``i`` has the layers ``groups[i]``; parameters that ``shared`` names together are one."""
    specs = []
    for layers in groups:
        members: dict[int, Tensor] = {id(tensor): tensor for layer in layers for _, tensor in chain.members(layer)}
        count = sum(tensor.numel() for tensor in members.values() if isinstance(tensor, nn.Parameter))
        specs.append(
            StageSpec(tuple(layers), count, sum(tensor.numel() * tensor.element_size() for tensor in members.values()))
        )
    marked = chain.devices()
    devices = [next((marked[layer] for layer in layers if layer in marked), None) for layers in groups]
    wanted = tuple(device for device in devices if device is not None)
    return Plan(
        tuple(specs),
        chain.edges(groups),
        find_ties(chain, groups, shared),
        devices=wanted if len(wanted) == len(groups) else None,
        recipe={**chain.recipe, **({"shared_weights": [list(names) for names in shared]} if shared else {})},
        chain=chain,
    )
