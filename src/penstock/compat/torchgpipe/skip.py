"""Skip connections: layers that stash and pop tensors by name, and checks that stashes and pops match."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import new_class
from typing import Any, ClassVar

from torch import nn

import penstock as ps

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]

Namespace, pop, stash = ps.Namespace, ps.pop, ps.stash

_USE_ERRORS = {
    "stash not declared": "{} has not been declared as stashable",
    "pop not declared": "{} has not been declared as poppable",
    "left to stash": "{} must be stashed but have not",
    "left to pop": "{} must be popped but have not",
    "not stashed": "{} has not been stashed",
}

_MATCH_ERRORS = {
    "both in one layer": "'{first}' declared '{name}' both as stashable and as poppable",
    "stashed twice": "'{last}' redeclared '{name}' as stashable but not isolated by namespace",
    "popped twice": "'{last}' redeclared '{name}' as poppable but not isolated by namespace",
    "not stashed": "'{last}' declared '{name}' as poppable but it was not stashed",
    "popped before stashed": "'{last}' declared '{name}' as poppable but it was not stashed\n"
    "* no module declared '{name}' as poppable but stashed",
    "not popped": "no module declared '{name}' as poppable but stashed",
}


class Skippable(nn.Module):
    """The base of classes made by ``skippable``: a wrapper around the layer, which is ``self.module``."""

    module_cls: ClassVar[type[nn.Module]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except ps.SkipUseError as error:
            if error.fault is None:
                raise
            names = ", ".join(f"'{name}'" for name in error.names)
            raise ps.SkipUseError(_USE_ERRORS[error.fault].format(names), error.fault, error.names) from error

    def forward(self, input: Any) -> Any:
        return self.module(input)

    def __repr__(self) -> str:
        return f"@skippable({self.module})"


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Class decorator: the layer's ``forward`` is a generator that stashes and pops tensors of these names.

    ``yield stash("name", tensor)`` stores a tensor or None; ``tensor = yield pop("name")`` retrieves it.
    """
    declare = ps.skippable(stash, pop)

    def decorate(module_cls: type[nn.Module]) -> type[Skippable]:
        body = {
            "module_cls": module_cls,
            "__module__": module_cls.__module__,
            "__qualname__": module_cls.__qualname__,
            "__doc__": module_cls.__doc__,
        }
        return declare(new_class(module_cls.__name__, (Skippable,), exec_body=lambda own: own.update(body)))

    return decorate


def verify_skippables(module: nn.Sequential) -> None:
    """Raise one ``TypeError`` that lists every stash without a pop and every pop without a stash."""
    try:
        ps.verify_skippables(nn.Sequential(OrderedDict(module.named_children())))
    except ps.SkipError as error:
        lines = []
        for fault in error.faults:
            first, last = (fault.modules[i].rsplit(" (", 1)[0] for i in (0, -1))
            lines.append(f"* {_MATCH_ERRORS[fault.kind].format(name=fault.name, first=first, last=last)}")
        raise TypeError("one or more pairs of stash and pop do not match:\n\n" + "\n".join(lines)) from None
