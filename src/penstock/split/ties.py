"""Parameters that live in several stages: found by identity before the model is cut, or said to be one by name."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from penstock.errors import PlanError
from penstock.near import did_you_mean
from penstock.split.line import Groups, Line
from penstock.split.plan import Tie

__all__ = ["Shared", "find_ties"]

Shared = Sequence[Sequence[str]]
"""Names of separate parameters that are to be one, such as ``[("embed.weight", "head.weight")]``."""


def find_ties(line: Line, groups: Groups, shared: Shared = ()) -> tuple[Tie, ...]:
    """One tie per parameter that occurs in several stages, or under several names that are said to be one."""
    stages: dict[str, set[int]] = {}
    parameters: dict[str, nn.Parameter] = {}
    for stage, layers in enumerate(groups):
        for layer in layers:
            for name, tensor in line.members(layer):
                if isinstance(tensor, nn.Parameter):
                    parameters[name] = tensor
                    stages.setdefault(name, set()).add(stage)
    family = {name: id(parameter) for name, parameter in parameters.items()}
    named: set[int] = set()
    for names in shared:
        _check(names, parameters)
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


def _check(names: Sequence[str], parameters: dict[str, nn.Parameter]) -> None:
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
