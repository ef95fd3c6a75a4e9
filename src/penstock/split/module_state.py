"""Python state of modules: the values in objects and containers, random generators, snapshots to restore."""

from __future__ import annotations

import copy
import enum
import functools
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._torch import DisableTorchFunction


def own_generators(values: Iterable[Any]) -> list[Any]:
    """The random generators among values and in the containers and objects within them."""
    seen, found = set[int](), dict[int, Any]()
    for value in values:
        if type(value) in _QUICK_ATOMS or (isinstance(value, _MUTABLE) and not value):
            continue
        inside = [item for _, items in containers_in(value, seen) for item in items]
        found |= {id(one): one for one in (value, *inside) if is_generator(one)}
    return list(found.values())


def is_generator(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy.random")
    numpys = () if numpy is None else (numpy.Generator, numpy.RandomState)
    return isinstance(value, (random.Random, torch.Generator, *numpys)) and not isinstance(value, random.SystemRandom)


def _without_graph(value: Any) -> Any:
    """A copy of plain containers and of tensors. A tensor of an autograd graph is detached, to free the graph."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone() if value.grad_fn is None else value.detach()
    if type(value) in (list, tuple):
        return type(value)(map(_without_graph, value))
    return {key: _without_graph(item) for key, item in value.items()} if type(value) is dict else value


class State:
    """Something that ``read`` copies and ``write`` sets."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.key: Any = id(holder)

    def read(self) -> Any:
        raise NotImplementedError

    def write(self, value: Any) -> None:
        raise NotImplementedError

    def copy(self, value: Any) -> Any:
        return _without_graph(value)

    def changed_since(self, value: Any) -> State | None:
        """The part of the state that differs from an earlier value; None if nothing does."""
        raise NotImplementedError

    def part_of(self, value: Any) -> Any:
        """Of an earlier value of the whole, the one of this part."""
        return value


class GeneratorState(State):
    """The state of a random generator: of Python, of NumPy, or a torch.Generator."""

    def __init__(self, holder: Any) -> None:
        super().__init__(holder)
        self.bits: Any = None if isinstance(holder, ModuleType) else getattr(holder, "bit_generator", None)

    def read(self) -> Any:
        if self.bits is not None:
            return self.bits.state
        return self.holder.getstate() if hasattr(self.holder, "getstate") else self.holder.get_state()

    def write(self, value: Any) -> None:
        if self.bits is not None:
            self.bits.state = value
        else:
            (self.holder.setstate if hasattr(self.holder, "setstate") else self.holder.set_state)(value)

    def copy(self, value: Any) -> Any:
        return value

    def changed_since(self, value: Any) -> State | None:
        now = self.read()
        same = torch.equal(now, value) if isinstance(now, Tensor) else pickle.dumps(now) == pickle.dumps(value)
        return None if same else self


class RandomStates:
    """The states of the global random generators of torch, Python and NumPy, and of ``own`` ones."""

    def __init__(self, own: Sequence[Any] = ()) -> None:
        self.own = own
        every = (torch.default_generator, random, sys.modules.get("numpy.random"), *own)
        with DisableTorchFunction():  # this may run within a trace
            self._states = [(state, state.read()) for state in map(GeneratorState, every) if state.holder is not None]

    def drawn(self) -> bool:
        """Whether random numbers were drawn since."""
        with DisableTorchFunction():
            return any(state.changed_since(value) is not None for state, value in self._states)

    def restore(self) -> None:
        with DisableTorchFunction():
            for state, value in self._states:
                state.write(value)


PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)
_ATOMS = (*PLAIN, Tensor, nn.Module, ModuleType)
_QUICK_ATOMS = frozenset((type(None), bool, int, float, str, torch.Size))
_COMPARED = (bool, int, float, complex, str, bytes, torch.Size)
_DEPTH, _ITEMS = 6, 4096  # of containers within containers, and of values in one of them
_RECORDS = ("argparse", "types", "collections")  # modules of the standard library whose objects hold settings


def contents(value: Any) -> list[Any] | None:
    """The values in a container, an object, a class of the user's or a closure; None if it has none."""
    if type(value) in _QUICK_ATOMS:
        return None
    if isinstance(value, dict):
        items = [*value, *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        items = list(value)
    elif isinstance(value, _ATOMS):
        return None
    elif isinstance(value, FunctionType):
        items = [*(value.__defaults__ or ()), *map(cell_contents, value.__closure__ or ())]
    elif isinstance(value, ContextVar):
        items = [value.get(None)]
    elif isinstance(value, MethodType):
        items = [value.__func__, value.__self__]
    elif hasattr(value, "__array__") and hasattr(value, "tolist") and not isinstance(value, type):  # NumPy
        items = value.ravel().tolist()
    elif isinstance(value, functools.partial):
        items = [value.func, *value.args, *value.keywords.values()]
    else:
        kind = value if isinstance(value, type) else type(value)
        package = kind.__module__.partition(".")[0]
        if (package in sys.stdlib_module_names or package == "torch") and package not in (*_RECORDS, "__main__"):
            return None
        slots = [getattr(value, name, None) for one in kind.__mro__ for name in vars(one).get("__slots__", ())]
        own = [(name, item) for name, item in getattr(value, "__dict__", {}).items() if name[:2] != "__"]
        items = [item for name, item in own if not _is_cached(kind, name)] + slots
    return items if 0 < len(items) <= _ITEMS else None


def _is_cached(kind: type, name: str) -> bool:
    """Whether an attribute is the value of a cached property, which is computed from others when it is first read."""
    return isinstance(getattr(kind, name, None), functools.cached_property)


def cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is not assigned yet
        return None


def is_same(value: Any, other: Any) -> bool:
    """Whether two values are one object, or equal numbers or texts: those of an array are new objects every time."""
    return value is other or (type(value) is type(other) and isinstance(value, _COMPARED) and bool(value == other))


def same_values(values: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(values) == len(others) and all(map(is_same, values, others))


def containers_in(
    value: Any, seen: set[int] | None = None, *, closures: bool = True
) -> Iterator[tuple[Any, list[Any]]]:
    """``value`` and the containers and objects inside it that were not ``seen``, each with its contents."""
    seen, level = set() if seen is None else seen, [value]
    for _ in range(_DEPTH):
        below = []
        for one in level:
            skipped = id(one) in seen or (not closures and isinstance(one, FunctionType))
            items = None if skipped else contents(one)
            if items is not None:
                seen.add(id(one))
                below += items
                yield one, items
        level = below


_MUTABLE = (dict, set, list, deque)


def _has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, _ATOMS)


def _copy_contents(container: Any) -> Any:
    if isinstance(container, _MUTABLE):
        return copy.copy(container)
    return dict(vars(container)) if _has_attributes(container) else None


def _set_contents(container: Any, before: Any) -> None:
    """Give a container or object the contents that it had."""
    target = container if isinstance(container, _MUTABLE) else vars(container)
    target.clear()
    (target.extend if isinstance(target, (list, deque)) else target.update)(before)


class ModuleState:
    """A snapshot of the attributes of modules, with all that is in them, and of the states of the random generators."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = {id(m): (m, dict(vars(m)), dict[str, list[_ContainerState]]()) for m in modules}
        self.empty: dict[int, dict[str, Any]] = {}  # containers without contents: most hooks of most modules
        seen: set[int] = set()
        for key, (_, attributes, inside) in self.modules.items():
            for name, value in attributes.items():
                if type(value) in _QUICK_ATOMS or isinstance(value, _ATOMS):
                    continue
                if isinstance(value, _MUTABLE) and not value:
                    self.empty.setdefault(key, {})[name] = value
                    continue
                inner = containers_in(value, seen, closures=False)  # functions may keep a log, which stays
                found = [_ContainerState(one, _copy_contents(one), items) for one, items in inner]
                if not found and contents(value) is None and _has_attributes(value):
                    found = [_ContainerState(value, dict(vars(value)), [])]  # it is empty
                if found:
                    inside[name] = found
        attributes_of_all = (value for _, attributes, _ in self.modules.values() for value in attributes.values())
        self.random = RandomStates(own_generators(attributes_of_all))

    def changed(self, module: nn.Module, ignore_first: bool = False) -> list[str]:
        """The attributes of one of the modules that have changed since."""
        now, (_, attributes, inside) = vars(module), self.modules[id(module)]
        names = [name for name in {**attributes, **now} if now.get(name, now) is not attributes.get(name, now)]
        names = [name for name in names if not _is_cached(type(module), name)]
        names += [name for name, found in inside.items() if any(one.has_changed(ignore_first) for one in found)]
        names += [name for name, container in self.empty.get(id(module), {}).items() if container]
        return list(dict.fromkeys(names))

    def restore(self) -> None:
        for module, attributes, inside in self.modules.values():
            now = vars(module)
            if now.keys() != attributes.keys() or any(now[name] is not value for name, value in attributes.items()):
                now.clear()
                now.update(attributes)
            for one in (one for found in inside.values() for one in found if one.copied is not None):
                if one.has_changed() or len(_copy_contents(one.container)) != len(one.copied):
                    _set_contents(one.container, one.copied)
        for containers in self.empty.values():
            for container in containers.values():
                container.clear()
        self.random.restore()


class _ContainerState(NamedTuple):
    container: Any
    copied: Any
    items: list[Any]

    def has_changed(self, ignore_first: bool = False) -> bool:
        """With ``ignore_first``, None may have become a plain value: a setting that is chosen at the first call."""
        now = contents(self.container)
        if now is None:  # it is empty, or too large to look at each of its values
            is_sized = isinstance(self.container, _MUTABLE)
            return bool(self.items) or (is_sized and len(self.container) != len(self.copied))
        if len(now) != len(self.items):
            return True
        pairs = zip(now, self.items, strict=True)
        return not all(is_same(a, b) or (ignore_first and b is None and type(a) in PLAIN) for a, b in pairs)
