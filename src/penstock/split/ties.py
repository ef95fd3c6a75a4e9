"""Parameters that live in several stages, found by identity before the model is cut."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from penstock.split.plan import Tie

__all__ = ["find_ties"]


def find_ties(model: nn.Module, groups: Sequence[Sequence[str]]) -> tuple[Tie, ...]:
    """One tie per parameter that occurs in more than one of the stages ``groups`` (lists of layer names)."""
    seen: dict[int, dict[str, int]] = {}
    for stage, layers in enumerate(groups):
        for layer in layers:
            for name, parameter in model.get_submodule(layer).named_parameters(layer, remove_duplicate=False):
                seen.setdefault(id(parameter), {})[name] = stage
    ties = (Tie(tuple(names), tuple(sorted(set(names.values())))) for names in seen.values())
    return tuple(tie for tie in ties if len(tie.stages) > 1)
