"""Which layers go to which stage: as the user says, or so that the heaviest stage is as light as it can be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from penstock.errors import PlanError
from penstock.split.line import Line
from penstock.split.partition import partition

__all__ = ["divide"]


def divide(line: Line, *, balance: Sequence[int] | None, stages: int | None) -> list[tuple[str, ...]]:
    """The layers of each stage: ``balance[i]`` of them in stage ``i``, or ``stages`` stages of even weight."""
    if (balance is None) == (stages is None):
        raise PlanError("say how to cut: either balance=[2, 2] (layers per stage) or stages=2, not both")
    sizes = _given(line, balance) if balance is not None else _even(line, stages)
    groups: list[tuple[str, ...]] = []
    start = 0
    for size in sizes:
        groups.append(line.layers[start : start + size])
        start += size
    return groups


def _given(line: Line, balance: Sequence[int]) -> list[int]:
    if isinstance(balance, str) or not isinstance(balance, Iterable):
        raise PlanError(f"balance must be a list with the number of layers of each stage, got {balance!r}")
    sizes = list(balance)
    if not sizes or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in sizes):
        raise PlanError(f"every stage needs at least one layer: balance={sizes}")
    if sum(sizes) != len(line.layers):
        raise PlanError(
            f"balance={sizes} is for {sum(sizes)} layers, but the model has {len(line.layers)}: "
            f"make the numbers add up to {len(line.layers)}"
        )
    return sizes


def _even(line: Line, stages: int | None) -> list[int]:
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise PlanError(f"stages must be a positive number, got {stages!r}")
    if stages > len(line.layers):
        raise PlanError(f"{stages} stages asked for, but the model has only {len(line.layers)} layers to divide")
    # A layer without parameters is not free: one unit keeps such layers from all landing in one stage.
    weights = []
    for layer in line.layers:
        own = {id(tensor): tensor.numel() for _, tensor in line.members(layer) if isinstance(tensor, nn.Parameter)}
        weights.append(1 + sum(own.values()))
    return partition(weights, stages)
