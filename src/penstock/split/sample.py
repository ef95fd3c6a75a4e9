"""Runs of a model on a sample: its arguments, the values that it returns, and the state to restore afterwards."""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._torch import DisableTorchFunction, pytree
from penstock.errors import PlanError
from penstock.split.flatten import is_plain_sequential
from penstock.split.lazy import Lazy


class Arguments(NamedTuple):
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Broadcast:
    """``ps.Broadcast(mask)`` among the inputs or targets: a tensor that every micro-batch gets whole."""

    tensor: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor):
            raise PlanError(
                f"Broadcast takes a tensor, got a {type(self.tensor).__name__}: anything else goes to "
                "every micro-batch as it is"
            )


def sample_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of the call that ``sample`` describes."""
    sample = pytree.tree_map(lambda leaf: leaf.tensor if isinstance(leaf, Broadcast) else leaf, sample)
    if isinstance(sample, Tensor):
        return (sample,), {}
    if isinstance(sample, Arguments):
        return sample
    if isinstance(sample, tuple):
        return sample, {}
    if isinstance(sample, Mapping) and all(isinstance(key, str) for key in sample):
        return (), dict(sample)
    raise PlanError(f"sample is the arguments of a call: a tensor, a tuple or a dict, not a {type(sample).__name__}")


def sample_inputs(model: nn.Module, sample: Any) -> Any:
    """The inputs of a sample that is ``(inputs, targets)``, for a model with one argument; else the sample.

    A Sequential of user-defined layers may take a pair as its one value; torch's layers take a tensor.
    """
    if type(sample) is not tuple or len(sample) != 2:
        return sample
    if is_plain_sequential(model):
        first = next((part for part in model.modules() if not is_plain_sequential(part)), model)
        has_targets = type(first).__module__.startswith("torch.nn.")
    else:
        has_targets = not _accepts(model, sample) and _accepts(model, sample[:1])
    return sample[0] if has_targets else sample


def _accepts(model: nn.Module, args: tuple[Any, ...]) -> bool:
    try:
        inspect.signature(model.forward).bind(*args)
    except TypeError:
        return False
    return True


def named_leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a nested value with their paths: ``output['logits']``, ``output[0].state``."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", None)
        for i, item in enumerate(value):
            yield from named_leaves(item, f"{path}.{names[i]}" if names else f"{path}[{i}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from named_leaves(getattr(value, one.name), f"{path}.{one.name}")
    else:
        yield path, value


def backward_roots(output: Any) -> list[Tensor]:
    """The tensors that backward starts from: the loss if the output has one, else all that require a gradient."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    candidates = [loss] if isinstance(loss, Tensor) else [leaf for _, leaf in named_leaves(output, "output")]
    return [leaf for leaf in candidates if isinstance(leaf, Tensor) and leaf.requires_grad]


def accelerators_of(model: nn.Module, value: Any) -> set[torch.device]:
    """The accelerators that a model and its arguments are on; an error if tensors have no data yet."""
    values = (*model.named_parameters(), *model.named_buffers(), *named_leaves(value, "sample"))
    tensors = {name: tensor for name, tensor in values if isinstance(tensor, Tensor)}
    empty = [f"layer {name} is not built yet" for name, part in model.named_modules() if isinstance(part, Lazy)]
    empty += [f"{name} is on the meta device" for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        raise PlanError(f"{empty[0]}, so it cannot run: give it values, or leave the sample out")
    return {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}


def plain_error(model: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    """The error that the model raises for these arguments; None if it runs, or cannot be run here."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1 or torch.device("meta") in devices:
        return None
    accelerators = {device for device in devices if device.type != "cpu"}
    with preserve_state(model, accelerators), temporary_copies(model.buffers()):
        try:
            model(*args, **kwargs)
        except Exception as error:
            return error
    return None


def own_generators(values: Iterable[Any]) -> list[Any]:
    """The random generators among values and in the containers and objects within them."""
    seen, found = set[int](), dict[int, Any]()
    for value in values:
        if type(value) in _QUICK_ATOMS or (type(value) is dict and not value):
            continue
        inside = [item for _, items in containers_in(value, seen) for item in items]
        found |= {id(one): one for one in (value, *inside) if is_generator(one)}
    return list(found.values())


def is_generator(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy.random")
    numpys = () if numpy is None else (numpy.Generator, numpy.RandomState)
    return isinstance(value, (random.Random, torch.Generator, *numpys)) and not isinstance(value, random.SystemRandom)


class RandomStates:
    """The states of the global random generators of torch, Python and NumPy, and of ``own`` ones."""

    def __init__(self, own: Sequence[Any] = ()) -> None:
        self.own = own
        self.torch, self.others = self._now()

    def _now(self) -> tuple[Tensor, list[Any]]:
        numpy: Any = sys.modules.get("numpy.random")
        others = [random.getstate(), None if numpy is None else numpy.get_state()]
        with DisableTorchFunction():  # this may run within a trace
            return torch.get_rng_state(), [*others, *map(_generator_state, self.own)]

    def drawn(self) -> bool:
        """Whether random numbers were drawn since."""
        state, others = self._now()
        with DisableTorchFunction():
            return not torch.equal(state, self.torch) or str(others) != str(self.others)

    def restore(self) -> None:
        with DisableTorchFunction():
            torch.set_rng_state(self.torch)
        python, numpy, *own = self.others
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy.random"].set_state(numpy)
        for generator, state in zip(self.own, own, strict=True):
            if isinstance(generator, random.Random):
                generator.setstate(state)
            elif hasattr(generator, "bit_generator"):
                generator.bit_generator.state = state
            else:  # of torch, or of NumPy's older kind
                generator.set_state(state)


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)
_ATOMS = (*PLAIN, Tensor, nn.Module, ModuleType)
_QUICK_ATOMS = frozenset((type(None), bool, int, float, str, torch.Size))
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
        items = [item for name, item in getattr(value, "__dict__", {}).items() if name[:2] != "__"] + slots
    return items if 0 < len(items) <= _ITEMS else None


def cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is not assigned yet
        return None


def is_same(value: Any, other: Any) -> bool:
    """Whether two values are one object, or equal numbers or texts: those of an array are new objects every time."""
    return value is other or (type(value) is type(other) and type(value) in _QUICK_ATOMS and bool(value == other))


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
        seen: set[int] = set()
        for _, attributes, inside in self.modules.values():
            for name, value in attributes.items():
                if type(value) in _QUICK_ATOMS or isinstance(value, _ATOMS):
                    continue
                if isinstance(value, _MUTABLE) and not value:
                    inside[name] = [_ContainerState(value, copy.copy(value), [])]
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
        names += [name for name, found in inside.items() if any(one.has_changed(ignore_first) for one in found)]
        return list(dict.fromkeys(names))

    def restore(self) -> None:
        for module, attributes, inside in self.modules.values():
            now = vars(module)
            if now.keys() != attributes.keys() or any(now[name] is not value for name, value in attributes.items()):
                now.clear()
                now.update(attributes)
            for one in (one for found in inside.values() for one in found if one.copied is not None):
                if one.has_changed():
                    _set_contents(one.container, one.copied)
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


@contextmanager
def temporary_copies(tensors: Iterable[Tensor], device: torch.device | None = None) -> Iterator[None]:
    """Let parameters and buffers hold copies of their data, on ``device`` if given; restores the original data."""
    data = {id(tensor): (tensor, tensor.data) for tensor in tensors}
    try:
        for tensor, values in data.values():
            tensor.data = values.to(device or values.device, copy=True)
        yield
    finally:
        for tensor, values in data.values():
            tensor.data = values


@contextmanager
def preserve_state(model: nn.Module, devices: set[torch.device]) -> Iterator[Callable[[], None]]:
    """Restore a model's attributes, modes and gradients and the random generators, whatever runs inside.

    Yields a function that restores them at once. Inside, parameters have no gradients and their post-accumulate hooks
    are removed. The values of parameters and buffers are protected by ``temporary_copies``.
    """
    before = ModuleState(model.modules())
    modules = [(torch.get_device_module(device), device) for device in devices]
    generators = [(module.get_rng_state(device), module, device) for module, device in modules]
    parameters = [(p, p.grad, p.requires_grad, p._post_accumulate_grad_hooks) for p in model.parameters()]
    hook_dicts = [(hooks, dict(hooks)) for *_, hooks in parameters if hooks]

    def reset() -> None:
        before.restore()
        for state, module, device in generators:
            module.set_rng_state(state, device)
        for parameter, _, requires_grad, _ in parameters:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            parameter.grad = None

    try:
        for hooks, _ in hook_dicts:
            hooks.clear()
        reset()
        yield reset
    finally:
        reset()
        for parameter, grad, *_ in parameters:
            parameter.grad = grad
        for hooks, original in hook_dicts:
            hooks.update(original)
