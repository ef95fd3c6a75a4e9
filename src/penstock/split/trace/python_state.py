"""The Python values besides its arguments that a forward reads. A recording holds for as long as they are the same.

    self.scale             an attribute of a module
    self.config.dropout    an object: all its attributes, and those of the objects and containers within it
    TEMPERATURE            a global variable that the user's own code names, also in functions and methods that it calls
    settings.SCALE         an attribute of a module of the user's own
    factor                 a variable of the function in which a class or a function was made
    SCALE.get()            a ContextVar that one of these is
    os.environ["SCALE"]    an environment variable
    vars(self)["scale"]    all attributes of a module, where a forward reads its dictionary
"""

from __future__ import annotations

import inspect
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.split.module_state import PLAIN, cell_contents, containers_in, contents, is_generator, same_values
from penstock.split.trace.state import is_users_code

_NOT_WATCHED = frozenset((*vars(nn.Module()), *dir(nn.Module)))  # parameters, modules, hooks, the mode, methods


def is_watched(name: str) -> bool:
    """Whether an attribute of a module is one that its user has set."""
    return name not in _NOT_WATCHED and name[:2] != "__"


def forward_function(module: nn.Module) -> Any:
    """The function behind a module's forward, without decorators."""
    found: Any = inspect.unwrap(vars(module).get("forward", type(module).forward))
    return getattr(found, "__func__", found)


Variable = tuple[Any, str, Callable[[], Any]]  # a key, a name, and the function that reads it
Scopes = dict[tuple[CodeType, int], dict[str, Any]]  # the global variables of functions, by these and their owners


def attribute_of(module: nn.Module, name: str) -> Variable:
    """An attribute of a module, or whether there is one."""
    own, kind = object.__getattribute__(module, "__dict__"), type(module)

    def read() -> Any:
        return own[name] if name in own else getattr(kind, name, None)

    def read_member() -> Any:  # it may become a parameter or buffer
        return getattr(module, name, None)

    return (id(own), name), name, read if name in own or hasattr(kind, name) else read_member


def dictionary_of(module: nn.Module) -> Iterator[Variable]:
    """All attributes of a module, and their names."""
    own = object.__getattribute__(module, "__dict__")
    yield (id(own), "__dict__"), "__dict__", lambda: " ".join(filter(is_watched, own))
    yield from (attribute_of(module, name) for name in own if is_watched(name))


def environment_variable(name: str) -> Variable:
    return ("environ", name), name, lambda: os.environ.get(name)


def whole_environment() -> Variable:
    return ("environ", None), "environ", lambda: dict(os.environ)


def variables_of(function: Any, owner: Any = None, seen: Scopes | None = None) -> Iterator[Variable]:
    """The variables outside of a function of the user's that it names, or that functions and methods it names do.

    ``owner`` is the object whose methods it may call. ``seen`` gets the functions.
    """
    seen = {} if seen is None else seen
    code: Any = getattr(function, "__code__", None)
    if not isinstance(function, FunctionType) or (code, id(owner)) in seen or not is_users_code(code.co_filename):
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        yield id(cell), name, lambda cell=cell: cell_contents(cell)  # type: ignore[misc]
        yield from variables_of(cell_contents(cell), owner, seen)
    yield from _variables_of_code(code, function.__globals__, owner, seen)


def _variables_of_code(code: CodeType, scope: dict[str, Any], owner: Any, seen: Scopes) -> Iterator[Variable]:
    if (code, id(owner)) in seen:
        return
    seen[code, id(owner)] = scope
    if owner is not None and "__getattribute__" in code.co_names:  # object.__getattribute__(self, name)
        yield from dictionary_of(owner)
    for name in code.co_names:
        value = scope.get(name)
        if isinstance(value, ModuleType):
            if is_users_code(getattr(value, "__file__", None) or "<"):
                inside = vars(value)
                for inner in set(code.co_names) & inside.keys():
                    yield (id(inside), inner), inner, lambda inside=inside, inner=inner: inside.get(inner)  # type: ignore[misc]
                    yield from variables_of(inside[inner], None, seen)
        elif isinstance(value, FunctionType):
            yield from variables_of(value, None, seen)
        elif _may_change(value):
            yield (id(scope), name), name, lambda name=name: scope.get(name)  # type: ignore[misc]
        if owner is None or name in vars(nn.Module):
            continue
        member = inspect.getattr_static(type(owner), name, None)
        if isinstance(member, FunctionType):
            yield from variables_of(member, owner, seen)
        elif _may_change(member):
            yield (type(owner), name), name, lambda name=name: getattr(type(owner), name, None)  # type: ignore[misc]
    for inner_code in code.co_consts:
        if isinstance(inner_code, CodeType):
            yield from _variables_of_code(inner_code, scope, owner, seen)


def _may_change(value: Any) -> bool:
    return value is not None and (isinstance(value, PLAIN) or contents(value) is not None or is_generator(value))


def scopes_with_type(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """The global variables of the functions that forwards run and that may ask for the type of a value."""
    found: dict[int, dict[str, Any]] = {}
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):  # its forward is not Python
            continue
        function, seen = forward_function(module), Scopes()
        for _ in variables_of(function, module, seen):
            pass
        if isinstance(function, FunctionType):
            seen[function.__code__, id(module)] = function.__globals__
        found |= {id(scope): scope for (code, _), scope in seen.items() if "type" in code.co_names}
    return [scope for scope in found.values() if "type" not in scope]


def outer_values(modules: Iterable[nn.Module]) -> dict[Any, tuple[str, list[Any]]]:
    """The variables outside of the forwards of modules: their names, values, and the values of containers in them."""
    found: dict[Any, tuple[str, list[Any]]] = {}
    for module in modules:
        for key, name, read in variables_of(forward_function(module), module):
            value = read()
            found[key] = name, [value, *(item for _, items in containers_in(value) for item in items)]
    return found


class PythonState:
    """The values that the recordings of a model have read so far."""

    def __init__(self) -> None:
        self._reads: dict[Any, tuple[str, Callable[[], Any]]] = {}
        self._codes: Scopes = {}
        self._containers: list[Any] = []
        self._values: list[Any] | None = None  # at the time of the digest
        self._numbers: dict[int, int] = {}  # of values that have no text, by identity
        self._count = 0
        self._digest = ""

    def add(self, key: Any, name: str, read: Callable[[], Any]) -> None:
        if key not in self._reads:
            self._reads[key] = name, read
            self._values = None

    def add_flags(self, parameters: Iterable[Tensor]) -> None:
        """It was read whether parameters are trained."""
        for parameter in parameters:
            self.add(id(parameter), "requires_grad", lambda parameter=parameter: parameter.requires_grad)  # type: ignore[misc]

    def add_forward(self, module: nn.Module) -> None:
        """The forward of a module is recorded."""
        function = forward_function(module)
        self.add((id(module), "forward"), "forward", lambda: forward_function(module))
        for variable in variables_of(function, module):
            self.add(*variable)

    def add_running(self, frame: FrameType | None, last: CodeType) -> None:
        """Add the global variables of the functions that are running, from ``frame`` out to that of ``last``."""
        while frame is not None and frame.f_code is not last:
            if (frame.f_code, id(None)) not in self._codes and is_users_code(frame.f_code.co_filename):
                for variable in _variables_of_code(frame.f_code, frame.f_globals, None, self._codes):
                    self.add(*variable)
            frame = frame.f_back

    def values(self) -> list[Any]:
        return [read() for _, read in self._reads.values()]

    def digest(self) -> str:
        """A text that is another one when one of the values was changed."""
        values = self.values()
        for container in self._containers:
            values += contents(container) or (len(container) if hasattr(container, "__len__") else 0,)
        if self._values is None or not same_values(values, self._values):
            read = self.values()
            inside = [entry for value in read for entry in containers_in(value)]
            self._containers = [container for container, _ in inside]
            values = [*read, *(item for _, items in inside for item in items)]
            self._numbers = {id(value): self._number(value) for value in values if not isinstance(value, PLAIN)}
            self._values = values  # from here on the old ones may be freed, and their identities used again
            names = [name for name, _ in self._reads.values()]
            self._digest = f"{zlib.crc32(repr((names, [self._text(value) for value in values])).encode()):x}"
        return self._digest

    def _number(self, value: Any) -> int:
        """A number for an object, which it keeps while it is among the values."""
        self._count += id(value) not in self._numbers
        return self._numbers.get(id(value), self._count)

    def _text(self, value: Any) -> Any:
        if isinstance(value, PLAIN):
            return repr(value)
        if isinstance(value, FunctionType):
            code = value.__code__
            return value.__module__, value.__qualname__, code.co_firstlineno, code.co_code, code.co_consts
        if isinstance(value, (type, BuiltinFunctionType, ModuleType)):
            return getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
        if not callable(value) and contents(value) is not None:
            return type(value).__qualname__
        return type(value).__qualname__, self._numbers[id(value)]
