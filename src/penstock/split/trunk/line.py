"""Cutting a model along its trunk: between any two of the blocks that its hidden state goes through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.split.plan import Edge, Groups, LayerChain
from penstock.split.trunk.find import find_trunk, trunk_name
from penstock.split.trunk.layout import Layout
from penstock.split.trunk.stage import TrunkStage

__all__ = ["TrunkChain", "find_trunk", "trunk_chain"]


class TrunkChain(LayerChain):
    """The blocks of a model's trunk. What comes before them goes with the first one, what comes after with the last."""

    verify = True

    def __init__(self, model: nn.Module, blocks: str) -> None:
        self.model = model
        self._layout = Layout(model, blocks)
        self.layers = self._layout.names
        self.recipe = {"front": "trunk", "blocks": blocks}
        self.fixed = self._layout.fixed

    @classmethod
    def from_recipe(cls, model: nn.Module, recipe: Mapping[str, Any]) -> TrunkChain:
        return cls(model, trunk_name(model, recipe["blocks"]))

    def members(self, layer: str) -> Iterator[tuple[str, Tensor]]:
        yield from self._layout.members(self.layers.index(layer))

    def edges(self, groups: Groups) -> tuple[Edge, ...]:
        """The chain of hidden states; the model's arguments go from the first stage straight to each other one."""
        self._bounds(groups)
        edges = []
        for stage in range(1, len(groups)):
            if stage > 1:
                edges.append(Edge(0, stage, ("arguments",)))
            edges.append(Edge(stage - 1, stage, ("hidden", "arguments") if stage == 1 else ("hidden",)))
        return tuple(sorted(edges, key=lambda edge: (edge.src, edge.dst)))

    def stage(self, groups: Groups, index: int) -> nn.Module:
        return TrunkStage(self._layout, self._bounds(groups), index)

    def _bounds(self, groups: Groups) -> list[tuple[int, int]]:
        """Each stage's first block, and the one after its last."""
        bounds, start = [], 0
        for layers in groups:
            end = start + len(layers)
            if not layers or tuple(layers) != self.layers[start:end]:
                raise PlanError(f"a stage of a trunk is of blocks that follow each other, got {list(layers)}")
            bounds.append((start, end))
            start = end
        if start != len(self.layers):
            raise PlanError(f"the stages have {start} blocks, but the trunk has {len(self.layers)}")
        return bounds


def trunk_chain(model: nn.Module, blocks: str | None) -> TrunkChain:
    """The line of a model's blocks: the list called ``blocks``, or the one that the model itself points at."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"expected an nn.Module to split, got {type(model).__name__}")
    return TrunkChain(model, trunk_name(model, blocks))
