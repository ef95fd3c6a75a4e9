"""How much a stage keeps of a micro-batch between its forward and its backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.engine.stage import Slot, StageEngine

__all__ = ["saved_bytes"]


def saved_bytes(slot: Slot, engine: StageEngine) -> int:
    """The bytes of all tensors that a graph keeps for its backward, parameters and buffers apart.

    What was packed away by hooks, as checkpoints do it, is not unpacked, and does not count. Neither does what a
    function of the user's keeps as attributes, nor what the stage's output holds that its graph does not.
    """
    own = {_place(tensor) for tensor in (*engine.module.parameters(), *engine.module.buffers())}
    kept = {_place(tensor): _size(tensor) for tensor in slot.inputs}
    seen: set[Any] = set()
    ahead: list[Any] = [edge.node for edge in slot.roots]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        ahead += [following for following, _ in node.next_functions]
        for tensor in _tensors(node):
            kept[_place(tensor)] = _size(tensor)
    return sum(size for place, size in kept.items() if place not in own)


def _tensors(node: Any) -> list[Tensor]:
    saved = []
    for name in dir(node):
        if name.startswith("_raw_saved"):
            found = getattr(node, name, None)
            saved += list(found) if isinstance(found, tuple | list) else [found]
    tensors = [getattr(one, "data", None) for one in saved]  # what lies there: nothing is unpacked
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def _place(tensor: Tensor) -> tuple[str, int]:
    """Tensors that share memory count once."""
    try:
        return str(tensor.device), tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, and other tensors without memory of their own
        return "", id(tensor)


def _size(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return tensor.nbytes
