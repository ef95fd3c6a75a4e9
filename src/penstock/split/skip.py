"""Skips between the layers of an ``nn.Sequential``: values that go around the layers between.

    @ps.skippable(stash=["early"])              @ps.skippable(pop=["early"])
    class Down(nn.Module):                      class Up(nn.Module):
        def forward(self, x):                       def forward(self, x):
            yield ps.stash("early", x)                  early = yield ps.pop("early")
            return self.conv(x)                         return self.conv(x + early)

    nn.Sequential(Down(), …, Up())    Down ──x──▶ … ──x──▶ Up
                                       └──────"early"──────▲

A stash that is popped in a later stage is an edge straight to that stage. Without a pipeline the values are kept for
the thread that runs the layers, until they are popped.
"""

from __future__ import annotations

import threading
import types
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, ClassVar, Literal, Self, TypeVar

from torch import nn

from penstock.errors import PenstockError, PlanError

__all__ = ["Key", "Namespace", "SkipUseError", "Skippable", "held", "holding", "pop", "skippable", "stash"]

M = TypeVar("M", bound=nn.Module)
Fault = Literal["stash not declared", "pop not declared", "left to stash", "left to pop", "not stashed"]


class SkipUseError(PenstockError, RuntimeError):
    """A layer stashes or pops other values than it declared, or one that is not there.

    Attributes say what it did wrong, and with which names, where that can be said.
    """

    def __init__(self, message: str, fault: Fault | None = None, names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.fault = fault
        self.names = tuple(names)


@dataclass(frozen=True)
class Namespace:
    """Names of skips apart from all others of the same spelling. Copies of it are the same namespace."""

    _id: str = field(default_factory=lambda: uuid.uuid4().hex, repr=False)


Key = tuple[Namespace | None, str]
"""A skip's name in its namespace; None is the one that all names are in that were not isolated."""


@dataclass(frozen=True)
class Stash:
    name: str
    value: Any


@dataclass(frozen=True)
class Pop:
    name: str


def stash(name: str, value: Any) -> Stash:
    """``yield ps.stash("name", value)`` in a skippable layer's forward: keep a tensor (or None) for a later layer."""
    return Stash(name, value)


def pop(name: str) -> Pop:
    """``value = yield ps.pop("name")`` in a skippable layer's forward: what an earlier layer stashed."""
    return Pop(name)


class _Here(threading.local):
    """The values that are stashed and not yet popped, in this thread."""

    def __init__(self) -> None:
        self.values: dict[Key, Any] = {}


_here = _Here()


def held() -> dict[Key, Any]:
    """The values that are stashed and not yet popped, in this thread."""
    return _here.values


@contextmanager
def holding(values: dict[Any, Any]) -> Iterator[None]:
    """Layers that run in this thread meanwhile stash into ``values``, and pop from them."""
    before, _here.values = _here.values, values
    try:
        yield
    finally:
        _here.values = before


class Skippable:
    """What ``skippable`` makes of a layer's class: its forward may stash and pop values."""

    _skip_stash: ClassVar[tuple[str, ...]] = ()
    _skip_pop: ClassVar[tuple[str, ...]] = ()
    _skip_namespaces: Mapping[str, Namespace] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("forward")
        if own is not None:
            cls.forward = _driven(own)  # type: ignore[attr-defined]

    def isolate(self, namespace: Namespace, only: Iterable[str] | None = None) -> Self:
        """Put this layer's names (``only`` these of them) into a namespace; the layer itself is returned."""
        if not isinstance(namespace, Namespace):
            raise PlanError(f"isolate takes a Namespace, got {type(namespace).__name__}: make one with ps.Namespace()")
        declared = dict.fromkeys((*self._skip_stash, *self._skip_pop))
        names = list(declared) if only is None else _names("only", only)
        unknown = [name for name in names if name not in declared]
        if unknown:
            raise PlanError(f"{_kind(self)} declares {_list(declared)}, but {_list(unknown)} was to be isolated")
        self._skip_namespaces = {**self._skip_namespaces, **dict.fromkeys(names, namespace)}
        return self

    def stashes(self) -> list[Key]:
        """What this layer stashes."""
        return [(self._skip_namespaces.get(name), name) for name in self._skip_stash]

    def pops(self) -> list[Key]:
        """What this layer pops."""
        return [(self._skip_namespaces.get(name), name) for name in self._skip_pop]


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """A class decorator: the layer's forward stashes and pops values of these names, each once.

    ``forward`` is a generator: ``yield ps.stash("name", tensor)`` keeps a tensor, or None, for the layer that pops that
    name, ``tensor = yield ps.pop("name")`` gets it, ``return`` gives the output as always. The class that comes out is
    a subclass of the one that went in: parameters, arguments and ``isinstance`` are the same. (As with any decorator
    that does so, write ``super().__init__()``, not ``super(Name, self).__init__()``.)

    ``layer.isolate(ps.Namespace())`` keeps the names of one layer apart from those of others, so that a layer, or a
    group of layers that share a namespace, can stand in a model several times.
    """
    stashed, popped = _names("stash", stash), _names("pop", pop)

    def decorate(cls: type[M]) -> type[M]:
        if not isinstance(cls, type) or not issubclass(cls, nn.Module):
            raise PlanError(f"skippable decorates a class of nn.Modules, got {cls!r}")
        body = {
            "forward": getattr(cls.forward, "_skip_forward", cls.forward),
            "_skip_stash": stashed,
            "_skip_pop": popped,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        }
        bases = (cls,) if issubclass(cls, Skippable) else (Skippable, cls)
        made: type[M] = types.new_class(cls.__name__, bases, exec_body=lambda namespace: namespace.update(body))
        return made

    return decorate


def _driven(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that does what the generator ``forward`` asks for, and gives what it returns."""

    @wraps(forward)
    def driven(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        todo = {Stash: dict.fromkeys(self._skip_stash), Pop: dict.fromkeys(self._skip_pop)}
        if isinstance(result, Generator):
            try:
                result = _drive(self, result, todo)
            except BaseException:
                _here.values.clear()  # the call that these were for is over
                raise
        left = [f"{verb} {_list(todo[kind])}" for kind, verb in ((Stash, "stash"), (Pop, "pop")) if todo[kind]]
        if left:
            raise SkipUseError(
                f"{_kind(self)} declares to {' and to '.join(left)}, but its forward ended without",
                "left to stash" if todo[Stash] else "left to pop",
                todo[Stash] or todo[Pop],
            )
        return result

    driven._skip_forward = forward  # type: ignore[attr-defined]
    return driven


def _drive(layer: Skippable, forward: Generator[Any, Any, Any], todo: Mapping[type, dict[str, None]]) -> Any:
    step: Callable[[], Any] = partial(next, forward)
    while True:
        try:
            asked = step()
        except StopIteration as end:
            return end.value
        try:
            answer = _done(layer, asked, todo)
        except SkipUseError as error:  # thrown in where it yields, so that the traceback has that line
            step = partial(forward.throw, error)
        else:
            step = partial(forward.send, answer)
            del asked, answer


def _done(layer: Skippable, asked: Any, todo: Mapping[type, dict[str, None]]) -> Any:
    """Do what a forward asks for."""
    if not isinstance(asked, (Stash, Pop)):
        raise SkipUseError(
            f"the forward of {_kind(layer)} yields a {type(asked).__name__}: it may only yield ps.stash(…) and "
            "ps.pop(…), and must return its output"
        )
    name, kind = asked.name, type(asked)
    verb, done = ("stash", "stashed") if kind is Stash else ("pop", "popped")
    if name not in todo[kind]:
        declared = layer._skip_stash if kind is Stash else layer._skip_pop
        if name in declared:
            raise SkipUseError(f"{_kind(layer)} has {done} '{name}' already: a value is {done} once")
        raise SkipUseError(
            f"{_kind(layer)} does not declare to {verb} '{name}': say @skippable({verb}=['{name}', …])",
            "stash not declared" if kind is Stash else "pop not declared",
            [name],
        )
    key = (layer._skip_namespaces.get(name), name)
    if isinstance(asked, Stash):
        _here.values[key] = asked.value
        answer = None
    elif key in _here.values:
        answer = _here.values.pop(key)
    else:
        isolated = " in its namespace" if key[0] is not None else ""
        raise SkipUseError(
            f"{_kind(layer)} pops '{name}', but no layer before it has stashed that{isolated}", "not stashed", [name]
        )
    del todo[kind][name]
    return answer


def _names(what: str, given: Iterable[str]) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given)
    if isinstance(given, str) or any(not isinstance(name, str) for name in names):
        raise PlanError(f"{what} must be a list of names, got {given!r}")
    if len(set(names)) < len(names):
        raise PlanError(f"{what} has a name twice: {list(names)}")
    return names


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "no names"


def _kind(layer: Any) -> str:
    return type(layer).__name__
