"""Skip connections between the layers of an ``nn.Sequential``.

    @ps.skippable(stash=["early"])              @ps.skippable(pop=["early"])
    class Down(nn.Module):                      class Up(nn.Module):
        def forward(self, x):                       def forward(self, x):
            yield ps.stash("early", x)                  early = yield ps.pop("early")
            return self.conv(x)                         return self.conv(x + early)

    nn.Sequential(Down(), …, Up())    Down ──x──▶ … ──x──▶ Up
                                       └──────"early"──────▲

A value that is popped in a later stage has an edge straight to that stage. Without a pipeline, stashed values are kept
in a thread-local dict until they are popped. Every stash must be popped once, by a later layer.
"""

from __future__ import annotations

import threading
import types
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from torch import nn

from penstock.errors import PenstockError, PlanError
from penstock.split.flatten import is_plain_sequential, layers_of
from penstock.split.lazy import Lazy

M = TypeVar("M", bound=nn.Module)


class SkipUseError(PenstockError, RuntimeError):
    """A layer stashes or pops a value that it did not declare, or pops one that was not stashed.

    ``fault`` is "stash not declared", "pop not declared", "left to stash", "left to pop", "not stashed" or None, and
    ``names`` are the names that it is about.
    """

    def __init__(self, message: str, fault: str | None = None, names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.fault = fault
        self.names = tuple(names)


@dataclass(frozen=True)
class Namespace:
    """Separates names of skips from equal names elsewhere. A copy is the same namespace."""

    _id: str = field(default_factory=lambda: uuid.uuid4().hex, repr=False)


SkipKey = tuple[Namespace | None, str]  # the namespace of a skip (None: the default one) and its name


@dataclass(frozen=True)
class SkipRequest:
    """A stash or a pop, for which a layer's forward yields."""

    verb: str
    name: str
    value: Any = None


def stash(name: str, value: Any) -> SkipRequest:
    """``yield ps.stash("name", value)`` in a skippable layer's forward keeps a tensor (or None) for a later layer."""
    return SkipRequest("stash", name, value)


def pop(name: str) -> SkipRequest:
    """``value = yield ps.pop("name")`` in a skippable layer's forward gets the value that an earlier layer stashed."""
    return SkipRequest("pop", name)


_thread = threading.local()


def stashed_values() -> dict[SkipKey, Any]:
    """The values of this thread that are stashed and not yet popped."""
    values: dict[SkipKey, Any] = _thread.__dict__.setdefault("values", {})
    return values


@contextmanager
def use_stash(values: dict[Any, Any]) -> Iterator[None]:
    """Let layers in this thread stash into ``values`` and pop from it."""
    before, _thread.values = stashed_values(), values
    try:
        yield
    finally:
        _thread.values = before


class Skippable:
    """The base class that ``skippable`` adds to a layer: its forward may stash and pop values."""

    _skip_stash: ClassVar[tuple[str, ...]] = ()
    _skip_pop: ClassVar[tuple[str, ...]] = ()
    _skip_namespaces: Mapping[str, Namespace | None] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("forward")
        if own is not None:
            cls.forward = _generator_forward(own)  # type: ignore[attr-defined]

    def isolate(self, namespace: Namespace | None, only: Iterable[str] | None = None) -> Self:
        """Move this layer's names (or ``only`` some) to a namespace, or to the default one. Returns the layer."""
        declared = dict.fromkeys((*self._skip_stash, *self._skip_pop))
        names = list(declared) if only is None else _names("only", only)
        unknown = [name for name in names if name not in declared]
        if unknown:
            kind = type(self).__name__
            raise PlanError(f"{kind} declares {_quoted(declared)}, but {_quoted(unknown)} was to be isolated")
        self._skip_namespaces = {**self._skip_namespaces, **dict.fromkeys(names, namespace)}
        return self

    def stashes(self) -> list[SkipKey]:
        return [(self._skip_namespaces.get(name), name) for name in self._skip_stash]

    def pops(self) -> list[SkipKey]:
        return [(self._skip_namespaces.get(name), name) for name in self._skip_pop]


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """A class decorator: the layer's forward stashes and pops values with these names, each once.

    ``forward`` is a generator: ``yield ps.stash("name", tensor)`` keeps a tensor, or None, for the layer that pops that
    name, ``tensor = yield ps.pop("name")`` gets it, ``return`` returns the output. The decorator returns a subclass, so
    write ``super().__init__()``, not ``super(Name, self).__init__()``.

    ``layer.isolate(ps.Namespace())`` separates the names of one layer, or of several that share the namespace, from
    those of others, so that the same layers can occur in a model several times.
    """
    stashed, popped = _names("stash", stash), _names("pop", pop)

    def decorate(cls: type[M]) -> type[M]:
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


def _generator_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that runs the generator ``forward`` and returns its return value."""

    @wraps(forward)
    def driven(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        todo = {"stash": dict.fromkeys(self._skip_stash), "pop": dict.fromkeys(self._skip_pop)}
        if isinstance(result, Generator):
            answers: list[Any] = [None]  # popped at once, so that a value is freed with its last user
            try:
                while True:
                    answers.append(_handle_request(self, result.send(answers.pop()), todo))
            except StopIteration as end:
                result = end.value
            except BaseException:
                stashed_values().clear()  # values of a failed call
                raise
        left = [verb for verb, names in todo.items() if names]
        if left:
            each = " and to ".join(f"{verb} {_quoted(todo[verb])}" for verb in left)
            kind = type(self).__name__
            raise SkipUseError(
                f"{kind} declares to {each}, but its forward ended without", f"left to {left[0]}", todo[left[0]]
            )
        return result

    driven._skip_forward = forward  # type: ignore[attr-defined]
    return driven


def _handle_request(layer: Skippable, request: Any, todo: Mapping[str, dict[str, None]]) -> Any:
    """Stash or pop a value; returns the value of the layer's ``yield``."""
    kind = type(layer).__name__
    if not isinstance(request, SkipRequest):
        raise SkipUseError(f"the forward of {kind} yields a {type(request).__name__}: it must return its output")
    name, verb = request.name, request.verb
    if name not in todo[verb]:
        if name in (layer._skip_stash if verb == "stash" else layer._skip_pop):
            done = "stashed" if verb == "stash" else "popped"
            raise SkipUseError(f"{kind} has {done} '{name}' already: a value is {done} once")
        raise SkipUseError(
            f"{kind} does not declare to {verb} '{name}': say @skippable({verb}=['{name}', …])",
            f"{verb} not declared",
            [name],
        )
    key, values, answer = (layer._skip_namespaces.get(name), name), stashed_values(), None
    if verb == "stash":
        values[key] = request.value
    elif key in values:
        answer = values.pop(key)
    else:
        isolated = " in its namespace" if key[0] is not None else ""
        raise SkipUseError(
            f"{kind} pops '{name}', but no layer before it has stashed that{isolated}", "not stashed", [name]
        )
    del todo[verb][name]
    return answer


def _names(what: str, given: Iterable[str]) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given)
    if isinstance(given, str) or any(not isinstance(name, str) for name in names):
        raise PlanError(f"{what} must be a list of names, got {given!r}")
    return names


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "no names"


_RunOrder = tuple[int, ...]


@dataclass(frozen=True)
class SkipFault:
    """A name whose stash and pop do not match, and the modules that declare it."""

    kind: str
    name: str
    namespace: Namespace | None
    modules: tuple[str, str]
    """The stashing and the popping module; the first and second of a repeated one; or the only one, twice."""

    def __str__(self) -> str:
        name, (first, last) = f"'{self.name}'", self.modules
        return {
            "not popped": f"{name} is stashed by {first}, but no layer pops it",
            "not stashed": f"{name} is popped by {first}, but no layer stashes it",
            "popped before stashed": f"{name} is popped by {last} before {first} stashes it",
            "stashed twice": f"{name} is stashed by {first} and again by {last}: isolate one of them in a namespace",
            "popped twice": f"{name} is popped by {first} and again by {last}: stash it under two names",
            "both in one layer": f"{name} is both stashed and popped by {first}, which needs no skip for that",
        }[self.kind]


class SkipError(PlanError, TypeError):
    """Stashes and pops of a model's layers do not match; ``faults`` lists all errors."""

    def __init__(self, faults: Sequence[SkipFault]) -> None:
        super().__init__("stash and pop do not match:\n" + "\n".join(f"  - {fault}" for fault in faults))
        self.faults = tuple(faults)

    def __reduce__(self) -> tuple[type[SkipError], tuple[tuple[SkipFault, ...]]]:
        return SkipError, (self.faults,)


@dataclass(frozen=True)
class Skip:
    """A value from one layer to a later one; ``label`` is unique in the model."""

    key: SkipKey
    label: str
    src: str
    dst: str


class _SkipUse(NamedTuple):
    """A stash or pop in a layer, by one of its modules. ``order`` is the module's position in nested Sequentials."""

    layer: str
    module: str
    order: _RunOrder


def verify_skippables(model: nn.Module) -> None:
    """Raise a ``SkipError`` with every stash and pop of ``model``, an ``nn.Sequential``, that do not match."""
    if not is_plain_sequential(model):
        raise PlanError(f"the skips of an nn.Sequential can be verified, but this is a {type(model).__name__}")
    match_skips(layers_of(model))


def match_skips(layers: Mapping[str, nn.Module]) -> list[Skip]:
    """The skips between layers in this order, ordered by source; an error if stash and pop do not match."""
    stashes: dict[SkipKey, list[_SkipUse]] = {}
    pops: dict[SkipKey, list[_SkipUse]] = {}
    for number, (layer, module) in enumerate(layers.items()):
        for name, part, order in _skippables(layer, module, (number,)):
            use = _SkipUse(layer, f"{name} ({type(part).__name__})", order)
            for key in part.stashes():
                stashes.setdefault(key, []).append(use)
            for key in part.pops():
                pops.setdefault(key, []).append(use)
    faults = []
    for key in dict.fromkeys((*stashes, *pops)):
        stashed, popped = stashes.get(key, []), pops.get(key, [])
        found = [("stashed twice", stashed[0], use) for use in stashed[1:]]
        found += [("popped twice", popped[0], use) for use in popped[1:]]
        if not popped:
            found.append(("not popped", stashed[0], stashed[0]))
        elif not stashed:
            found.append(("not stashed", popped[0], popped[0]))
        elif stashed[0].module == popped[0].module:
            found.append(("both in one layer", stashed[0], stashed[0]))
        elif popped[0].order < stashed[0].order:
            found.append(("popped before stashed", stashed[0], popped[0]))
        faults += [SkipFault(kind, key[1], key[0], (first.module, last.module)) for kind, first, last in found]
    if faults:
        raise SkipError(faults)
    spaces = list(dict.fromkeys(key[0] for key in stashes if key[0] is not None))
    skips = []
    for key, (stash,) in stashes.items():
        space, name = key
        label = name if space is None else f"{name}@{spaces.index(space) + 1}"
        skips.append(Skip(key, label, stash.layer, pops[key][0].layer))
    return skips


def _skippables(name: str, module: nn.Module, order: _RunOrder) -> Iterator[tuple[str, Skippable, _RunOrder]]:
    """The skippable modules in a layer. Their order is known inside plain Sequentials only."""
    if isinstance(module, Lazy):
        outline = module.outline()
        if outline is None:
            return
        module = outline
    if isinstance(module, Skippable):
        yield name, module, order
    plain = is_plain_sequential(module)
    for number, (child, part) in enumerate(layers_of(module).items()):
        yield from _skippables(f"{name}.{child}", part, (*order, number) if plain else order)
