"""Which operations change a value in place, and of which values a value is a view."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

_IN_PLACE = {
    getattr(operator, name)
    for name in (
        "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor", "setitem",
    )
}  # fmt: skip

_VIEWS = {
    "view", "view_as", "reshape", "transpose", "permute", "squeeze", "unsqueeze", "flatten", "unflatten", "t", "narrow",
    "select", "chunk", "split", "unbind", "expand", "expand_as", "contiguous", "detach", "diagonal", "movedim",
}  # fmt: skip


def changed_by(node: fx.Node) -> fx.Node | None:
    """The value that an operation changes in place."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    name = str(node.target)
    if node.op == "call_method" and name.endswith("_") and not name.endswith("__"):
        return first
    if node.op == "call_function":
        if node.target in _IN_PLACE or node.kwargs.get("inplace") is True:
            return first
        own = getattr(node.target, "__name__", "")
        if own.endswith("_") and not own.endswith("__"):
            return first
    if node.op == "call_module" and node.meta.get("inplace"):
        return first
    return None


def roots(node: fx.Node) -> Iterator[fx.Node]:
    """A value and those that it is a view of, or is the changed form of."""
    while True:
        yield node
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node):
            return
        name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
        view = name in _VIEWS or (node.op == "call_function" and node.target is operator.getitem)
        if not view and changed_by(node) is None:
            return
        node = first
