"""The errors of PopTorch programs. Each is also a ``penstock.PlanError``."""

from __future__ import annotations

from penstock.errors import PlanError

__all__ = ["Error", "Frozen", "Unmet", "require"]


class Error(PlanError, RuntimeError):
    """``poptorch.Error``."""


class Unmet(PlanError, AssertionError):
    """What PopTorch asserts of its arguments, and what is not so."""


class Frozen(PlanError, AttributeError):
    """Options that a model or a loader uses already."""

    def __init__(self) -> None:
        super().__init__("Can't modify frozen Options: change a copy of them, options.clone()")


def require(condition: object, message: str) -> None:
    """PopTorch's ``assert``, which stays with ``python -O``."""
    if not condition:
        raise Unmet(message)
