"""The errors of PopTorch programs. Each is also a ``penstock.PlanError``."""

from __future__ import annotations

import penstock as ps

__all__ = ["Error", "FrozenOptions", "UnmetRequirement", "positive", "require"]


class Error(ps.PlanError, RuntimeError):
    """``poptorch.Error``."""


class UnmetRequirement(ps.PlanError, AssertionError):
    """An assertion of PopTorch about its arguments that does not hold."""


class FrozenOptions(ps.PlanError, AttributeError):
    """Options that a model or a loader uses already were to be changed."""

    def __init__(self) -> None:
        super().__init__("Can't modify frozen Options: change a copy of them, options.clone()")


def require(condition: object, message: str) -> None:
    """PopTorch's ``assert``, which ``python -O`` does not remove."""
    if not condition:
        raise UnmetRequirement(message)


def positive(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnmetRequirement(f"{name} must be a whole number of at least 1, got {value!r}")
    return value
