"""Names of skips apart from others of the same spelling."""

from __future__ import annotations

from abc import ABCMeta
from functools import total_ordering
from typing import Any

from penstock.split import skip as core

__all__ = ["Namespace"]


@total_ordering
class Namespace(core.Namespace, metaclass=ABCMeta):
    """A namespace for ``layer.isolate``. Their order has no meaning; ``None`` is the one that all names are in."""

    @property
    def id(self) -> str:
        return self._id

    def __lt__(self, other: Any) -> bool:
        return isinstance(other, core.Namespace) and self._id < other._id

    def __repr__(self) -> str:
        return f"<Namespace '{self._id}'>"


Namespace.register(type(None))
