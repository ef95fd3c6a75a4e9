"""How much a stage keeps of a micro-batch between its forward and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from penstock.engine.slot import Slot
from penstock.engine.stage import StageEngine

__all__ = ["deferred_bytes", "saved_bytes"]


def saved_bytes(slot: Slot, engine: StageEngine) -> int:
    """The bytes of all tensors that a graph keeps for its backward, parameters and buffers apart.

    What was packed away by hooks, as checkpoints do it, is not unpacked, and does not count. Neither does what a
    function of the user's keeps as attributes, nor tensors that are not dense.
    """
    seen: set[Any] = set()
    kept: list[Tensor] = list(slot.inputs)
    ahead: list[Any] = [edge.node for edge in slot.roots]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        ahead += [following for following, _ in node.next_functions]
        kept += _tensors(node)
    return _total(kept, engine)


def deferred_bytes(slot: Slot, engine: StageEngine) -> int:
    """The bytes of all tensors that weight gradients wait with, between I and W: parameters and buffers apart."""
    entries = () if slot.queue is None else slot.queue.entries
    leaves = tree_leaves([arguments for _, arguments in entries])
    return _total([leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided], engine)


def _total(kept: Sequence[Tensor], engine: StageEngine) -> int:
    """What overlaps counts once."""
    own = {_place(tensor)[0] for tensor in (*engine.module.parameters(), *engine.module.buffers())}
    sizes: dict[object, dict[int, int]] = {}  # by memory, and where in it
    room: dict[object, int] = {}
    for tensor in kept:
        place, size = _place(tensor)
        if place not in own:
            views, at = sizes.setdefault(place, {}), int(tensor.storage_offset())
            views[at] = max(views.get(at, 0), tensor.nbytes)
            room[place] = size
    return sum(min(room[place], sum(views.values())) for place, views in sizes.items())


def _tensors(node: Any) -> list[Tensor]:
    saved = []
    for name in dir(node):
        if name.startswith("_raw_saved"):
            found = getattr(node, name, None)
            saved += list(found) if isinstance(found, tuple | list) else [found]
    tensors = [getattr(one, "data", None) for one in saved]  # what lies there: nothing is unpacked
    return [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.layout is torch.strided]


def _place(tensor: Tensor) -> tuple[object, int]:
    """The memory that a tensor is a view of, and its size: views that overlap count once."""
    try:
        memory = tensor.untyped_storage()
        return (str(tensor.device), memory.data_ptr()), memory.nbytes()
    except (RuntimeError, NotImplementedError):  # tensors without memory of their own
        return id(tensor), tensor.nbytes
