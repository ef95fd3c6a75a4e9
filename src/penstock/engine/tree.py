"""Values that cross edges: tensors, and tuples, lists and dicts of tensors, None and plain Python values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch.utils._pytree as pytree
from torch import Tensor

__all__ = ["LEAF", "Row", "Spec", "detached", "flatten", "unflatten"]


@dataclass(frozen=True)
class Row:
    """The shapes of several values side by side, each with its number of leaves."""

    specs: tuple[Spec, ...]
    sizes: tuple[int, ...]

    def cut(self, leaves: Sequence[Any]) -> list[list[Any]]:
        """The leaves of each value."""
        ends = list(accumulate(self.sizes, initial=0))
        return [list(leaves[a:b]) for a, b in pairwise(ends)]


Spec: TypeAlias = "pytree.TreeSpec | Row | None"

LEAF: Spec = None
"""The shape of a value that is one tensor: by far the most common one, so it takes no walk."""


def flatten(value: Any) -> tuple[list[Any], Spec]:
    """The leaves of a value, and what is needed to put it together again."""
    if isinstance(value, Tensor):
        return [value], LEAF
    leaves, spec = pytree.tree_flatten(value)
    return leaves, spec


def unflatten(leaves: list[Any], spec: Spec) -> Any:
    """The inverse of ``flatten``; of a ``Row``, the tuple of its values."""
    if isinstance(spec, Row):
        return tuple(unflatten(part, own) for part, own in zip(spec.cut(leaves), spec.specs, strict=True))
    return leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)


def detached(value: Any) -> Any:
    """The value with its tensors apart from any graph."""
    leaves, spec = flatten(value)
    return unflatten([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
