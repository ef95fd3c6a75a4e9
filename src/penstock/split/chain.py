"""``LayerChain``: a model as a sequence of layers, and the ``Plan`` made from groups of them.

    model ──front end──▶ LayerChain ──balance──▶ groups of layers ──▶ Plan, and one module per stage

A stage module takes one value per incoming edge, ordered by source stage, and returns one value per outgoing edge,
ordered by destination. The first stage takes the value that ``arguments`` builds from the model's arguments; the
last stage returns the model's output. A single value is not wrapped in a tuple:

    first stage    module(value) -> x                    one edge out
    middle stage   module(x, skip) -> (y, other)         two edges in, two edges out
    last stage     module(y, other) -> output
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from penstock.errors import PlanError, did_you_mean
from penstock.split.lazy import build, members
from penstock.split.plan import Edge, Plan, StageSpec, Tie

Groups = Sequence[Sequence[str]]
"""The layers of each stage."""


class LayerChain(ABC):
    """The layers of a model in execution order. Each front end is a subclass."""

    model: nn.Module
    layers: tuple[str, ...]
    recipe: Mapping[str, Any]
    """JSON data from which the front end ``recipe["front"]`` rebuilds the same chain for the same model."""
    fixed: Mapping[str, Any] = MappingProxyType({})
    """Arguments that the stages always pass to the model."""

    @abstractmethod
    def members(self, layer: str) -> Iterable[tuple[str, Tensor]]:
        """The parameters and buffers that a layer uses, under every name that they have in the model."""

    @abstractmethod
    def edges(self, groups: Groups) -> tuple[Edge, ...]:
        """The edges between these stages. Each stage has an edge to the next one, even without values."""

    @abstractmethod
    def stage(self, groups: Groups, index: int) -> nn.Module:
        """The module of one stage: it holds the model's own modules under their own names."""

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The input of the first stage for a call of the model: by default its arguments by name."""
        return bind_arguments(self.model, args, kwargs)

    def crossing(self, cut: int) -> float:
        """The cost of a cut before layer number ``cut``: the size or the number of the values that cross it."""
        return 1.0

    def devices(self) -> Mapping[str, str]:
        """The devices that the user gave to layers."""
        return {}


def bind_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by parameter name, without defaults.

    ``*args`` stays a tuple under its name; ``**kwargs`` is expanded.
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


class WholeModelChain(LayerChain):
    """A chain of one layer, the whole model, for models whose forward cannot be traced."""

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
    """Calls the model, and shares its parameters, buffers and modules under the same names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["_penstock_model"] = model
        for attribute in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[attribute] = getattr(model, attribute)

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


@dataclass(frozen=True)
class CountedOutput:
    """The output of the last stage when the model computes its own loss.

    ``count`` is a 0-d tensor: the number of elements that the loss was averaged over (labels that are not ignored). The
    loss of the mini-batch is the mean of the micro-batch losses weighted by it. With ``count=None`` the losses are
    added: the model divided a sum by a number that was given for the whole mini-batch.
    """

    output: Any
    count: Tensor | None


SharedWeights = Sequence[Sequence[str]]
"""Groups of names of parameters to be tied, such as ``[("embed.weight", "head.weight")]``."""


def find_ties(chain: LayerChain, groups: Groups, shared: SharedWeights = ()) -> tuple[Tie, ...]:
    """One tie per parameter that is used by several stages, or that ``shared`` gives several names."""
    stages: dict[str, set[int]] = {}
    parameters: dict[str, nn.Parameter] = {}
    for stage, layers in enumerate(groups):
        for layer in layers:
            for name, tensor in chain.members(layer):
                if isinstance(tensor, nn.Parameter):
                    parameters[name] = tensor
                    stages.setdefault(name, set()).add(stage)
    identity = {name: id(parameter) for name, parameter in parameters.items()}
    declared: set[int] = set()
    for names in shared:
        _check_shared(names, parameters)
        merged = {identity[name] for name in names}
        first = identity[names[0]]
        declared.add(first)
        identity = {name: first if key in merged else key for name, key in identity.items()}
    names_of: dict[int, list[str]] = {}
    for name, key in identity.items():
        names_of.setdefault(key, []).append(name)
    ties = []
    for key, own_names in names_of.items():
        used_by = tuple(sorted(set().union(*(stages[name] for name in own_names))))
        if len(used_by) > 1 or (key in declared and len(own_names) > 1):
            ties.append(Tie(tuple(own_names), used_by))
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


def build_plan(chain: LayerChain, groups: Groups, shared: SharedWeights = ()) -> Plan:
    """The plan whose stage ``i`` has the layers ``groups[i]``, with the ties that ``shared`` declares."""
    specs = []
    for layers in groups:
        tensors = {id(tensor): tensor for layer in layers for _, tensor in chain.members(layer)}.values()
        parameters = sum(tensor.numel() for tensor in tensors if isinstance(tensor, nn.Parameter))
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        specs.append(StageSpec(tuple(layers), parameters, size))
    device_of = chain.devices()
    devices = [next((device_of[layer] for layer in layers if layer in device_of), None) for layers in groups]
    known = tuple(device for device in devices if device is not None)
    return Plan(
        tuple(specs),
        chain.edges(groups),
        find_ties(chain, groups, shared),
        devices=known if len(known) == len(groups) else None,
        recipe={**chain.recipe, **({"shared_weights": [list(names) for names in shared]} if shared else {})},
        chain=chain,
    )
