"""Values that cross edges: tensors, and tuples, lists and dicts of tensors, None and plain Python values."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

__all__ = ["LEAF", "Spec", "flatten", "unflatten"]

Spec = pytree.TreeSpec | None

LEAF: Spec = None
"""The shape of a value that is one tensor: by far the most common one, so it takes no walk."""


def flatten(value: Any) -> tuple[list[Any], Spec]:
    """The leaves of a value, and what is needed to put it together again."""
    if isinstance(value, Tensor):
        return [value], LEAF
    leaves, spec = pytree.tree_flatten(value)
    return leaves, spec


def unflatten(leaves: list[Any], spec: Spec) -> Any:
    """The inverse of ``flatten``."""
    return leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)
