"""From a line and its groups to the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from penstock.split.plan import Plan, StageSpec
from penstock.split.ties import Shared, find_ties

if TYPE_CHECKING:
    from penstock.split.line import Groups, Line

__all__ = ["plan_of"]


def plan_of(line: Line, groups: Groups, shared: Shared = ()) -> Plan:
    """The plan whose stage ``i`` has the layers ``groups[i]``; parameters that ``shared`` names together are one."""
    specs = []
    for layers in groups:
        members: dict[int, Tensor] = {id(tensor): tensor for layer in layers for _, tensor in line.members(layer)}
        count = sum(tensor.numel() for tensor in members.values() if isinstance(tensor, nn.Parameter))
        specs.append(
            StageSpec(tuple(layers), count, sum(tensor.numel() * tensor.element_size() for tensor in members.values()))
        )
    marked = line.devices()
    devices = [next((marked[layer] for layer in layers if layer in marked), None) for layers in groups]
    wanted = tuple(device for device in devices if device is not None)
    return Plan(
        tuple(specs),
        line.edges(groups),
        find_ties(line, groups, shared),
        devices=wanted if len(wanted) == len(groups) else None,
        recipe={**line.recipe, **({"shared_weights": [list(names) for names in shared]} if shared else {})},
        line=line,
    )
