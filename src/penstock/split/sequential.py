"""Cutting an ``nn.Sequential``: between any two of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from penstock.errors import PlanError
from penstock.split.line import Groups, Line
from penstock.split.plan import Edge

__all__ = ["SequentialLine"]


class SequentialLine(Line):
    """The layers of an ``nn.Sequential``."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers = tuple(_layers(model))
        self.recipe = {"front": "sequential"}

    def members(self, layer: str) -> Iterator[tuple[str, Tensor]]:
        module = self.model.get_submodule(layer)
        yield from module.named_parameters(layer, remove_duplicate=False)
        yield from module.named_buffers(layer, remove_duplicate=False)

    def edges(self, groups: Groups) -> tuple[Edge, ...]:
        return tuple(Edge(i, i + 1) for i in range(len(groups) - 1))

    def stage(self, groups: Groups, index: int) -> nn.Module:
        stage = nn.Sequential()
        for name in groups[index]:
            stage.add_module(name, self.model.get_submodule(name))
        stage.training = self.model.training  # its own flag only: a layer may be in another mode on purpose
        return stage

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The one value that an ``nn.Sequential`` takes; arguments that cannot be that are themselves the value."""
        if kwargs:
            return kwargs["input"] if set(kwargs) == {"input"} and not args else kwargs
        return args[0] if len(args) == 1 else args


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers by name. ``named_children`` would leave out a layer that stands there twice."""
    if model._forward_hooks or model._forward_pre_hooks or model._backward_hooks or model._backward_pre_hooks:
        raise PlanError(
            "the nn.Sequential itself has hooks, and no stage runs the whole of it: register them on its layers"
        )
    layers = {name: layer for name, layer in model._modules.items() if layer is not None}
    if not layers:
        raise PlanError("the nn.Sequential has no layers: there is nothing to split")
    for name, layer in layers.items():
        members = (*layer.parameters(), *layer.buffers())
        if any(isinstance(tensor, (UninitializedParameter, UninitializedBuffer)) for tensor in members):
            kind = type(layer).__name__
            raise PlanError(f"layer {name} ({kind}) does not know its size yet: run the model on a batch first")
    return layers
