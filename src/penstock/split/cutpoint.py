"""Marks in a forward at which the model may be cut: ``ps.CutPoint()`` and ``ps.cut(x)``.

x = self.blocks[0](x)
x = self.cuts[0](x)      # the layers of the line are what lies between marks:
x = self.blocks[1](x)    #   blocks.0 | blocks.1 …
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from penstock.split.trace.state import recorder

__all__ = ["CutPoint", "cut", "cut_points"]

T = TypeVar("T")

DEPTH = 4
"""How deep plain lists and dicts are searched for cut points."""


class CutPoint(nn.Module):
    """A mark: called on an activation, it gives the activation itself. Each is used once in a model's forward.

    It may be an attribute, stand in an ``nn.ModuleList``, or in a plain list, tuple or dict.
    """

    def forward(self, value: T) -> T:
        return value


def cut(value: T) -> T:
    """``value`` itself: the model may be cut here. Outside ``ps.split`` this does nothing."""
    trace = recorder()
    if trace is not None:
        trace.mark(None, value)
    return value


def cut_points(model: nn.Module) -> dict[int, str]:
    """The cut points of a model by identity, with the names by which the model reaches them."""
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, CutPoint):
            found.setdefault(id(module), path)
        for attribute, value in vars(module).items():
            if attribute not in ("_modules", "_parameters", "_buffers"):
                for name, point in _within(value, DEPTH):
                    found.setdefault(id(point), f"{prefix}{attribute}{name}")
    return found


def _within(value: Any, depth: int) -> Iterator[tuple[str, CutPoint]]:
    if isinstance(value, CutPoint):
        yield "", value
    elif depth and isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from ((f"[{i}]{name}", point) for name, point in _within(item, depth - 1))
    elif depth and isinstance(value, Mapping):
        for key, item in value.items():
            yield from ((f"[{key!r}]{name}", point) for name, point in _within(item, depth - 1))
