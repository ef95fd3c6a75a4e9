"""Blanks: zeros in the place of values that only another stage has, told apart from values by where they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device)
"""Values that cross edges as they are."""

_SHAPE = "penstock.shape"


class Blanks:
    """The blanks of one call. ``like`` is a value that is here; a tensor's mark is good for this call only."""

    def __init__(self) -> None:
        self.like: Any = None
        self._zeros: Any = None

    def forget(self) -> None:
        self.like = self._zeros = None

    def hidden(self) -> Tensor | None:
        """The first tensor of ``like``: the hidden state."""
        return next(tensors(self.like), None)

    def hidden_blank(self, origin: str) -> Tensor:
        """A blank like the hidden state."""
        first = next(tensors(self._tree()))
        blank: Tensor = self.mark(first.view_as(first), origin)
        return blank

    def tree_blank(self, origin: str) -> Any:
        """A blank like all of ``like``."""
        return self.mark(pytree.tree_map_only(Tensor, lambda leaf: leaf.view_as(leaf), self._tree()), origin)

    def shape_blank(self, shape: Sequence[int], dtype: torch.dtype, origin: str) -> Tensor:
        """A blank of a given shape, on the hidden state's device. It takes no memory."""
        hidden = self.hidden()
        device = None if hidden is None else hidden.device
        blank: Tensor = self.mark(torch.zeros((), dtype=dtype, device=device).expand(tuple(shape)), origin)
        return blank

    def described_blank(self, description: Any, origin: str) -> Any:
        """A blank of the shapes that ``describe`` noted."""
        hidden = self.hidden()
        device = None if hidden is None else hidden.device

        def made(leaf: Any) -> Any:
            if not _is_shape(leaf):
                return leaf
            return torch.zeros(leaf[_SHAPE], dtype=getattr(torch, leaf["dtype"]), device=device)

        return self.mark(pytree.tree_map(made, description, is_leaf=_is_shape), origin)

    def argument(self, value: Any, origin: str) -> Any:
        """An argument of the model, of which perhaps only the shape was sent."""
        return self.shape_blank(value[_SHAPE], getattr(torch, value["dtype"]), origin) if _is_shape(value) else value

    def mark(self, value: Any, origin: str) -> Any:
        """Make the tensors in ``value`` blanks."""
        for leaf in tensors(value):
            leaf._penstock_blank = (self, origin)  # type: ignore[attr-defined]
        return value

    def origin(self, value: Any) -> str | None:
        """Where the first blank in ``value`` comes from; None where there is none."""
        if isinstance(value, Tensor):
            mark: tuple[Blanks, str] | None = getattr(value, "_penstock_blank", None)
            return mark[1] if mark is not None and mark[0] is self else None
        if isinstance(value, (tuple, list, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                found = self.origin(item)
                if found is not None:
                    return found
        return None

    def _tree(self) -> Any:
        # Real memory, one for all: a forward may write into what its parts gave.
        if self._zeros is None:
            self._zeros = pytree.tree_map_only(Tensor, torch.zeros_like, self.like)
        return self._zeros


def describe(value: Any) -> Any:
    """The shapes of the tensors in a value, which can be sent instead of it; None where it cannot be described."""
    if not all(leaf is None or isinstance(leaf, (Tensor, *PLAIN)) for leaf in pytree.tree_leaves(value)):
        return None
    return pytree.tree_map_only(Tensor, _described, value)


def _described(tensor: Tensor) -> dict[str, Any]:
    return {_SHAPE: tuple(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _is_shape(value: Any) -> bool:
    return isinstance(value, dict) and _SHAPE in value


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
