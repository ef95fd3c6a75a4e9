"""Parameters that live in several stages, found by identity before the model is cut."""

from __future__ import annotations

from torch import nn

from penstock.split.line import Groups, Line
from penstock.split.plan import Tie

__all__ = ["find_ties"]


def find_ties(line: Line, groups: Groups) -> tuple[Tie, ...]:
    """One tie per parameter that occurs in more than one of the stages."""
    seen: dict[int, dict[str, int]] = {}
    stages: dict[int, set[int]] = {}
    for stage, layers in enumerate(groups):
        for layer in layers:
            for name, tensor in line.members(layer):
                if isinstance(tensor, nn.Parameter):
                    seen.setdefault(id(tensor), {})[name] = stage
                    stages.setdefault(id(tensor), set()).add(stage)
    return tuple(Tie(tuple(seen[key]), tuple(sorted(places))) for key, places in stages.items() if len(places) > 1)
