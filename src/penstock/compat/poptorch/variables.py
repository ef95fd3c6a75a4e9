"""``optimizer.variable_attrs``: which settings of an optimizer may change once a model is trained with it."""

from __future__ import annotations

from typing import Any

from penstock.compat.poptorch.errors import Error

__all__ = ["VariableAttributes", "check_constants"]


class VariableAttributes:
    """Settings are variable, unless they were marked as constant: then ``setOptimizer`` refuses other values."""

    def __init__(self, optimizer: Any) -> None:
        self._names = set(optimizer.param_groups[0]) - {"params"} | set(optimizer._extras)
        self._constant: set[str] = set()

    def isConstant(self, attr: str) -> bool:
        """Whether a setting was marked as constant."""
        return self._known(attr) in self._constant

    def markAsConstant(self, attr: str) -> None:
        """Let a setting stay as it is."""
        self._constant.add(self._known(attr))

    def markAsVariable(self, attr: str) -> None:
        """Let a setting change with ``setOptimizer``."""
        self._constant.discard(self._known(attr))

    def constants(self, optimizer: Any) -> dict[str, Any]:
        """The values of an optimizer's constants."""
        return {name: _value(optimizer, name) for name in sorted(self._constant)}

    def _known(self, attr: str) -> str:
        if attr not in self._names:
            raise Error(f"the optimizer has no attribute {attr!r}: it has {', '.join(sorted(self._names))}")
        return attr


def _value(optimizer: Any, name: str) -> Any:
    extras = getattr(optimizer, "_extras", {})
    return extras[name] if name in extras else [group.get(name) for group in optimizer.param_groups]


def check_constants(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse that a constant has another value than it had before."""
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            raise Error(f"{name} was marked as constant: it is {before[name]}, and cannot become {now[name]}")
