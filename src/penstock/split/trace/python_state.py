"""The Python values besides its arguments that a forward reads. A recording holds for as long as they are the same.

    self.scale             an attribute of a module
    self.config.dropout    an object: all its attributes, and those of the objects and containers within it
    TEMPERATURE            a global variable that the user's own code names
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from operator import is_
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from penstock.split.sample import PLAIN, containers_in, contents
from penstock.split.trace.state import is_users_code


def same_objects(values: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(values) == len(others) and all(map(is_, values, others))


def _global_names(code: CodeType, scope: dict[str, Any]) -> list[str]:
    """The global variables that a function of the user's names, without modules and None."""
    values = {name: scope.get(name) for name in code.co_names} if is_users_code(code.co_filename) else {}
    return [n for n, v in values.items() if v is not None and (isinstance(v, PLAIN) or contents(v) is not None)]


def global_values(modules: Iterable[nn.Module]) -> dict[str, list[Any]]:
    """The global variables that the methods of modules name, each with its value and those of the containers in it."""
    found: dict[str, list[Any]] = {}
    for kind in {kind for module in modules for kind in type(module).__mro__}:
        for function in (value for value in vars(kind).values() if isinstance(value, FunctionType)):
            for name in _global_names(function.__code__, function.__globals__):
                value = function.__globals__[name]
                found[name] = [value, *(item for _, items in containers_in(value) for item in items)]
    return found


class PythonState:
    """The values that the recordings of a model have read so far."""

    def __init__(self) -> None:
        self._reads: dict[tuple[int, str], tuple[Any, dict[str, Any], str]] = {}
        self._flags: dict[int, Tensor] = {}
        self._codes: set[CodeType] = set()
        self._containers: list[Any] = []
        self._values: list[Any] | None = None  # at the time of the digest
        self._numbers: dict[int, int] = {}  # of values that have no text, by identity
        self._count = 0
        self._digest = ""

    def add(self, owner: Any, holder: dict[str, Any], name: str) -> None:
        """``name`` was read, from ``holder`` or from the class of ``owner``."""
        if (id(holder), name) not in self._reads:
            self._reads[id(holder), name] = owner, holder, name
            self._values = None

    def add_flag(self, parameter: Tensor) -> None:
        """It was read whether a parameter is trained."""
        self._flags[id(parameter)] = parameter
        self._values = None

    def add_globals(self, code: CodeType, scope: dict[str, Any]) -> None:
        """Add the global variables that a function of the user's names."""
        if code not in self._codes:
            self._codes.add(code)
            for name in _global_names(code, scope):
                self.add(None, scope, name)

    def add_running(self, frame: FrameType | None, last: CodeType) -> None:
        """Add the global variables of the functions that are running, from ``frame`` out to that of ``last``."""
        while frame is not None and frame.f_code is not last:
            self.add_globals(frame.f_code, frame.f_globals)
            frame = frame.f_back

    def _read(self) -> list[Any]:
        reads = self._reads.values()
        values = [d[name] if name in d else getattr(type(owner), name, None) for owner, d, name in reads]
        return [*values, *(parameter.requires_grad for parameter in self._flags.values())]

    def digest(self) -> str:
        """A text that is another one when one of the values was changed."""
        values = self._read()
        for container in self._containers:
            values += contents(container) or ()
        if self._values is None or not same_objects(values, self._values):
            read = self._read()
            inside = [entry for value in read for entry in containers_in(value)]
            self._containers = [container for container, _ in inside]
            values = [*read, *(item for _, items in inside for item in items)]
            self._numbers = {id(value): self._number(value) for value in values if not isinstance(value, PLAIN)}
            self._values = values  # from here on the old ones may be freed, and their identities used again
            names = [name for _, _, name in self._reads.values()]
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
        if callable(value) or isinstance(value, ModuleType) or contents(value) is not None:
            return getattr(value, "__qualname__", type(value).__qualname__)
        return type(value).__qualname__, self._numbers[id(value)]
