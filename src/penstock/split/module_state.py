"""Snapshots of a model's modules and of random generators, to restore them after a trial run or a trace."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch import DisableTorchFunction


class ModuleState:
    """A snapshot of the attributes of modules and of the states of the random generators.

    With ``alone=False`` other threads may be drawing random numbers, so the generators are not restored.
    """

    def __init__(self, modules: Iterable[nn.Module], alone: bool = True) -> None:
        self.alone = alone
        self.modules = []  # with their attributes, and the contents of lists, dicts and sets among them
        for module in modules:
            containers = {k: v for k, v in vars(module).items() if isinstance(v, (dict, list, set))}
            contents = {k: list(v.items()) if isinstance(v, dict) else list(v) for k, v in containers.items()}
            self.modules.append((module, dict(vars(module)), contents))
        with DisableTorchFunction():  # this may run within a trace
            self.torch = torch.get_rng_state()
        self.python = random.getstate()
        numpy: Any = sys.modules.get("numpy.random")
        self.numpy = None if numpy is None else numpy.get_state()

    def changed(self, module: nn.Module) -> list[str]:
        """The attributes of one of the modules that have changed since."""
        for own, attributes, contents in self.modules:
            if own is module:
                now = vars(own)
                names = [name for name in {**attributes, **now} if now.get(name, now) is not attributes.get(name, now)]
                names += [name for name, items in contents.items() if name in now and not _same(now[name], items)]
                return list(dict.fromkeys(names))
        return []

    def random_drawn(self) -> bool:
        """Whether Python, NumPy or torch has drawn random numbers since."""
        if not self.alone:
            return False
        numpy: Any = sys.modules.get("numpy.random")
        numpy_drawn = self.numpy is not None and str(numpy.get_state()) != str(self.numpy)
        with DisableTorchFunction():
            torch_drawn = not torch.equal(torch.get_rng_state(), self.torch)
        return numpy_drawn or torch_drawn or random.getstate() != self.python

    def restore(self) -> None:
        for module, attributes, contents in self.modules:
            now = vars(module)
            if now.keys() != attributes.keys() or any(now[name] is not value for name, value in attributes.items()):
                now.clear()
                now.update(attributes)
            for name, items in contents.items():
                if not _same(now[name], items):
                    now[name].clear()
                    (now[name].extend if isinstance(now[name], list) else now[name].update)(items)
        if not self.alone:
            return
        with DisableTorchFunction():
            torch.set_rng_state(self.torch)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


def _same(container: Any, items: list[Any]) -> bool:
    if isinstance(container, dict):
        now = list(container.items())
        return len(now) == len(items) and all(a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True))
    return len(container) == len(items) and all(a is b for a, b in zip(container, items, strict=True))


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
