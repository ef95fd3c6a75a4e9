"""Python state that a forward changes: a recompute sees the state that the first run saw, and leaves no change.

    F   self.calls 3 ─▶ 4      the value before is saved for this micro-batch: 3
    R   self.calls 3 ─▶ 4      the first forward again
        self.calls 5           as before the recompute

State is: attributes of modules, and of objects in them; contents of lists, dicts, sets and deques; random generators of
modules, and the global ones of Python and NumPy. The first forward in each mode shows which of it changes. Later
forwards save this alone.
"""

from __future__ import annotations

import dis
import functools
import logging
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from penstock.engine.recompute.rng import generators_lock
from penstock.split.module_state import GeneratorState, State, cell_contents, is_generator, is_same

MAX_DEPTH = 3  # of objects and containers within the attribute of a module

OF_TORCH = frozenset(vars(nn.Module()))  # attributes: registered tensors, modules and hooks, and the training flag
_LIBRARIES = ("torch", "penstock", "builtins", "abc", "typing")
_PLAIN = (bool, int, float, complex, str, bytes)
_WITHOUT_STATE = (*_PLAIN, type(None), type, nn.Module, Tensor, FunctionType, MethodType, ModuleType)

SavedPythonState = list[tuple["State", Any]]
"""State that a forward changed, with its value before the forward."""


class PythonStateGuard:
    """The Python state of one stage's modules and of the loss function; the modules of torch have none.

    ``saving`` is entered around a forward that will be recomputed, ``restored`` around the recompute.
    """

    def __init__(self, module: nn.Module, loss_fn: Any = None) -> None:
        every = [*module.modules(), *(loss_fn.modules() if isinstance(loss_fn, nn.Module) else ())]
        self.modules = [part for part in every if not is_library(type(part))]
        self.loss_fn = loss_fn
        self.changing: list[State] = []
        self._mode: object = None
        self._known: list[object] = []

    def saving(self, mode: object, saved: SavedPythonState) -> AbstractContextManager[None]:
        """Leave in ``saved`` the values before the forward. ``mode`` is what the forward may depend on."""
        saved.clear()
        return nullcontext() if mode is self._mode and not self.changing else self._saving(mode, saved)

    @contextmanager
    def _saving(self, mode: object, saved: SavedPythonState) -> Iterator[None]:
        learning = not any(known is mode for known in self._known)
        with generators_lock if learning or _draws(self.changing) else nullcontext():
            saved += [(state, state.copy(state.read())) for state in self.changing]
            every = find_state(self.modules, self.loss_fn) if learning else []
            before = [state.read() for state in every]
            yield
            for state, value in zip(every, before, strict=True):
                changed = state.changed_since(value)
                if changed is not None and changed.key not in {known.key for known in self.changing}:
                    self.changing.append(changed)
                    saved.append((changed, changed.copy(changed.part_of(value))))
        if learning:
            self._known.append(mode)
        self._mode = mode

    def restored(self, saved: SavedPythonState) -> AbstractContextManager[None]:
        """Around a recompute: the state is that of the first run; afterwards it is the current one."""
        return _restored(saved) if saved else nullcontext()


@contextmanager
def _restored(saved: SavedPythonState) -> Iterator[None]:
    with generators_lock if _draws([state for state, _ in saved]) else nullcontext():
        current = [(state, state.read()) for state, _ in saved]
        for state, value in saved:
            state.write(state.copy(value))  # the recompute changes it, and may not be the last
        try:
            yield
        finally:
            for state, value in current:
                state.write(value)


def _draws(states: list[State]) -> bool:
    return any(isinstance(state, GeneratorState) for state in states)


def is_library(kind: type) -> bool:
    """Whether torch or Penstock define a class and all that it inherits from."""
    return all(base.__module__.partition(".")[0] in _LIBRARIES for base in kind.__mro__)


def find_state(modules: list[nn.Module], function: Any = None) -> list[State]:
    numpy: Any = sys.modules.get("numpy.random")
    found: dict[Any, State] = {}
    for generator in (random, numpy):
        if generator is not None:
            found[id(generator)] = GeneratorState(generator)
    for module in modules:
        state = Attributes(vars(module))
        found[state.key] = state
        for value in state.read().values():
            find_in(value, found, MAX_DEPTH)
    _find_in_function(function, found, MAX_DEPTH)
    return list(found.values())


def find_in(value: Any, found: dict[Any, State], depth: int) -> None:
    if isinstance(value, _WITHOUT_STATE) or depth == 0 or id(value) in found:
        return
    state: State | None = None
    if is_generator(value):
        state = GeneratorState(value)
    elif isinstance(value, (list, dict, set, deque)):
        state = _Container(value)
        for item in list(value.values() if isinstance(value, dict) else value):
            find_in(item, found, depth - 1)
    elif isinstance(value, tuple):
        for item in value:
            find_in(item, found, depth - 1)
    elif hasattr(value, "__dict__") and not callable(value) and not is_library(type(value)):
        state = Attributes(vars(value))
        for item in list(vars(value).values()):
            find_in(item, found, depth - 1)
    if state is not None:
        found[id(value)] = state


def _find_in_function(function: Any, found: dict[Any, State], depth: int) -> None:
    """The state of a loss function: of a closure, a partial, a method's object, or an object that can be called."""
    if depth == 0 or (getattr(function, "__module__", None) or "").partition(".")[0] in _LIBRARIES:
        return
    if isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            found[id(cell)] = _ClosureVariable(cell)
            _find_in_function(cell_contents(cell), found, depth - 1)
    elif isinstance(function, MethodType):
        _find_in_function(function.__self__, found, depth - 1)
    elif isinstance(function, functools.partial):
        _find_in_function(function.func, found, depth - 1)
    elif callable(function) and hasattr(function, "__dict__") and not isinstance(function, (type, nn.Module)):
        state = Attributes(vars(function))
        found[state.key] = state
        for value in list(vars(function).values()):
            _find_in_function(value, found, depth - 1)
    else:
        find_in(function, found, depth)


def find_read_state(modules: Iterable[nn.Module], loss_fn: Any) -> list[State]:
    """The Python state that forwards might change or read.

    It is that of the modules and their classes, and of the functions that these and the loss have: their global
    variables, default arguments and closures. Functions that they call are followed within a source file.
    """
    own = [part for part in modules if not is_library(type(part))]
    found: dict[Any, State] = {}
    functions: list[Any] = []
    for kind in dict.fromkeys(base for part in own for base in type(part).__mro__ if not is_library(base)):
        attributes: Any = vars(kind)
        found[kind] = Attributes(attributes)
        for name, value in attributes.items():
            functions.append(getattr(value, "__func__", getattr(value, "fget", value)))
            if not name.startswith("__"):
                find_in(value, found, MAX_DEPTH)
    while isinstance(loss_fn, functools.partial):
        find_in((loss_fn.args, loss_fn.keywords), found, MAX_DEPTH)
        loss_fn = loss_fn.func
    functions.append(getattr(loss_fn, "__func__", loss_fn))
    seen = set[Any]()
    for function in functions:  # to which functions that they call are added
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        names, cells = _global_names(function.__code__), function.__closure__ or ()
        found |= {id(cell): _ClosureVariable(cell) for cell in cells}
        if names:
            found[function] = Attributes(function.__globals__, names)
        values = [*map(function.__globals__.get, names), *map(cell_contents, cells)]
        for value in (*values, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if isinstance(value, FunctionType) and value.__module__ == function.__module__:
                functions.append(value)
            elif not isinstance(value, logging.Logger):  # it keeps a cache
                find_in(value, found, MAX_DEPTH - 1)
    return [*find_state(own, loss_fn), *found.values()]


@functools.cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    """The names of the global variables that a function uses."""
    return tuple({step.argval for step in dis.get_instructions(code) if step.opname.endswith("_GLOBAL")})


class Attributes(State):
    """The attributes of a module or another object: all of them, or one."""

    def __init__(self, holder: dict[str, Any], names: tuple[str, ...] = ()) -> None:
        super().__init__(holder)
        self.names = names
        self.key = (id(holder), names)

    def read(self) -> dict[str, Any]:
        names = self.names or [name for name in self.holder if name not in OF_TORCH]
        return {name: self.holder[name] for name in names if name in self.holder}

    def write(self, value: dict[str, Any]) -> None:
        for name in self.names:
            if name in value:
                self.holder[name] = value[name]
            else:
                self.holder.pop(name, None)

    def changed_since(self, value: dict[str, Any]) -> State | None:
        now, missing = self.read(), object()
        names = [name for name in {**value, **now} if not is_same(value.get(name, missing), now.get(name, missing))]
        return Attributes(self.holder, tuple(names)) if names else None

    def part_of(self, value: dict[str, Any]) -> dict[str, Any]:
        return {name: value[name] for name in self.names if name in value}


class _Container(State):
    """The contents of a list, dict, set or deque."""

    def read(self) -> list[Any]:
        return list(self.holder.items() if isinstance(self.holder, dict) else self.holder)

    def write(self, value: list[Any]) -> None:
        self.holder.clear()
        (self.holder.extend if isinstance(self.holder, (list, deque)) else self.holder.update)(value)

    def changed_since(self, value: list[Any]) -> State | None:
        now = self.read()
        if isinstance(self.holder, dict):
            now, value = [x for pair in now for x in pair], [x for pair in value for x in pair]
        return None if len(now) == len(value) and all(map(is_same, now, value)) else self


class _ClosureVariable(State):
    """A variable of the function that a closure was made in."""

    def read(self) -> Any:
        return cell_contents(self.holder)

    def write(self, value: Any) -> None:
        self.holder.cell_contents = value

    def changed_since(self, value: Any) -> State | None:
        return None if is_same(self.read(), value) else self
