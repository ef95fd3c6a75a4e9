"""Layers that stash and pop values. The layer itself is the ``.module`` of what the decorator makes of its class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from types import new_class
from typing import Any, ClassVar, Self

from torch import nn

from penstock.compat.torchgpipe.microbatch import Batch
from penstock.compat.torchgpipe.skip.tracker import SkipTracker, tracker_in_use, tracking
from penstock.split import skip as core
from penstock.split.flatten import layers_of
from penstock.split.skip import Pop as pop
from penstock.split.skip import SkipFault, SkipKey, SkipUseError, skip_faults
from penstock.split.skip import Stash as stash

__all__ = ["Skippable", "pop", "skippable", "stash", "verify_skippables"]

USE = {
    "stash not declared": "{} has not been declared as stashable",
    "pop not declared": "{} has not been declared as poppable",
    "left to stash": "{} must be stashed but have not",
    "left to pop": "{} must be popped but have not",
    "not stashed": "{} has not been stashed",
}

MATCH = {
    "both in one layer": "'{first}' declared '{name}' both as stashable and as poppable",
    "stashed twice": "'{last}' redeclared '{name}' as stashable but not isolated by namespace",
    "popped twice": "'{last}' redeclared '{name}' as poppable but not isolated by namespace",
    "not stashed": "'{last}' declared '{name}' as poppable but it was not stashed",
    "popped before stashed": "'{last}' declared '{name}' as poppable but it was not stashed",
    "not popped": "no module declared '{name}' as poppable but stashed",
}


class Skippable(core.Skippable, nn.Module):
    """The base of what ``skippable`` makes: a module around the layer, which does what the layer asks for."""

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            cls.forward = _tracked(cls.forward)  # type: ignore[method-assign]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)

    @property
    def namespaces(self) -> Mapping[str, core.Namespace]:
        return self._skip_namespaces

    def namespaced(self, name: str) -> SkipKey:
        """The name with the namespace that it is in."""
        return self._skip_namespaces.get(name), name

    def stashable(self) -> Iterator[SkipKey]:
        """What the layer stashes."""
        return iter(self.stashes())

    def poppable(self) -> Iterator[SkipKey]:
        """What the layer pops."""
        return iter(self.pops())

    def isolate(self, ns: core.Namespace | None, *, only: Iterable[str] | None = None) -> Self:  # type: ignore[override]
        """Put the layer's names, or ``only`` these, into a namespace; the layer itself is returned."""
        if ns is not None:
            return super().isolate(ns, only)
        kept = dict(self._skip_namespaces)
        for name in list(kept) if only is None else only:
            kept.pop(name, None)
        self._skip_namespaces = kept
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except SkipUseError as error:
            if error.fault is None:
                raise
            names = ", ".join(f"'{name}'" for name in error.names)
            raise SkipUseError(USE[error.fault].format(names), error.fault, error.names) from error

    def forward(self, input: Any) -> Any:
        return self.module(input)

    def __repr__(self) -> str:
        return f"@skippable({self.module})"


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """A class decorator: the layer's forward stashes and pops values of these names, by ``yield``.

    ``yield stash("name", tensor)`` keeps a tensor, or None; ``tensor = yield pop("name")`` gets what was kept.
    """
    stashed, popped = list(stash), list(pop)
    declare = core.skippable(stash if isinstance(stash, str) else stashed, pop if isinstance(pop, str) else popped)

    def decorate(module_cls: type[nn.Module]) -> type[Skippable]:
        body = {
            "module_cls": module_cls,
            "stashable_names": frozenset(stashed),
            "poppable_names": frozenset(popped),
            "__module__": module_cls.__module__,
            "__qualname__": module_cls.__qualname__,
            "__doc__": module_cls.__doc__,
        }
        return declare(new_class(module_cls.__name__, (Skippable,), exec_body=lambda own: own.update(body)))

    return decorate


def _tracked(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose values come from the tracker that is in use, and go to it."""

    @wraps(forward)
    def tracked(self: Skippable, input: Any) -> Any:
        tracker = tracker_in_use()
        return forward(self, input) if tracker is None else _through(tracker, self, forward, input)

    return tracked


def _through(tracker: SkipTracker, layer: Skippable, forward: Callable[..., Any], input: Any) -> Any:
    batch = Batch(input)
    values: dict[SkipKey, Any] = {}
    for ns, name in layer.pops():
        with suppress(KeyError):  # of which the layer is told when it pops it
            values[ns, name] = tracker.load(batch, ns, name)
    with tracking(tracker, values):
        batch = Batch(forward(layer, batch.value))
    for ns, name in layer.stashes():
        tracker.save(batch, ns, name, values.pop((ns, name)))
    return batch.value


def verify_skippables(module: nn.Sequential) -> None:
    """A TypeError with every stash and pop of the module's layers that have no match."""
    faults = skip_faults(layers_of(module))
    if faults:
        told = "\n".join(f"* {_told(fault)}" for fault in faults)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{told}")


def _told(fault: SkipFault) -> str:
    first, last = (fault.modules[i].rsplit(" (", 1)[0] for i in (0, -1))
    told = MATCH[fault.kind].format(name=fault.name, first=first, last=last)
    if fault.kind == "popped before stashed":
        told += f"\n* {MATCH['not popped'].format(name=fault.name)}"
    return told
