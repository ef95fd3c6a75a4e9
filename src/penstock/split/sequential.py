"""Cutting an ``nn.Sequential``: between any two of its layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from penstock.errors import PlanError
from penstock.split.partition import partition
from penstock.split.plan import Edge, Plan, Stage
from penstock.split.ties import find_ties

__all__ = ["split_sequential"]


def split_sequential(
    model: nn.Module, *, balance: Sequence[int] | None = None, stages: int | None = None
) -> Plan:
    """A plan whose stage ``i`` has ``balance[i]`` layers, or ``stages`` stages of even parameter weight."""
    layers = _layers(model)
    sizes = _balance(layers, balance, stages)
    modules = list(layers.values())
    names = list(layers)
    groups: list[tuple[str, ...]] = []
    specs: list[Stage] = []
    for size in sizes:
        start = sum(len(group) for group in groups)
        members = nn.ModuleList(modules[start : start + size])
        parameters = list(members.parameters())
        buffers = list(members.buffers())
        count = sum(p.numel() for p in parameters)
        groups.append(tuple(names[start : start + size]))
        specs.append(Stage(groups[-1], count, sum(t.numel() * t.element_size() for t in parameters + buffers)))
    edges = tuple(Edge(i, i + 1) for i in range(len(specs) - 1))
    return Plan(tuple(specs), edges, find_ties(model, groups), model=model)


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers by name. ``named_children`` would leave out a layer that stands there twice."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"expected an nn.Module to split, got {type(model).__name__}")
    own_forward = type(model).forward is not nn.Sequential.forward or "forward" in model.__dict__
    if not isinstance(model, nn.Sequential) or own_forward:
        raise PlanError(
            f"{type(model).__name__} is not a plain nn.Sequential, whose forward runs its layers one after the other: "
            "write it as an nn.Sequential of its parts"
        )
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


def _balance(layers: dict[str, nn.Module], balance: Sequence[int] | None, stages: int | None) -> list[int]:
    if (balance is None) == (stages is None):
        raise PlanError("say how to cut: either balance=[2, 2] (layers per stage) or stages=2, not both")
    if balance is not None:
        if isinstance(balance, str) or not isinstance(balance, Iterable):
            raise PlanError(f"balance must be a list with the number of layers of each stage, got {balance!r}")
        sizes = list(balance)
        if not sizes or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in sizes):
            raise PlanError(f"every stage needs at least one layer: balance={sizes}")
        if sum(sizes) != len(layers):
            raise PlanError(
                f"balance={sizes} is for {sum(sizes)} layers, but the model has {len(layers)}: "
                f"make the numbers add up to {len(layers)}"
            )
        return sizes
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise PlanError(f"stages must be a positive number, got {stages!r}")
    if stages > len(layers):
        raise PlanError(f"{stages} stages asked for, but the model has only {len(layers)} layers to divide")
    # A layer without parameters is not free: one unit keeps such layers from all landing in one stage.
    weights = [1 + sum(p.numel() for p in layer.parameters()) for layer in layers.values()]
    return partition(weights, stages)
