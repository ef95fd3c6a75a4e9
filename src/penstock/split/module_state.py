"""Leaving a model as it was: what a forward does to its modules while it is traced is undone."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from penstock._torch import DisableTorchFunction

__all__ = ["ModuleState"]


class ModuleState:
    """The attributes of modules, and the state of the random generators, as they are now.

    While stages run (``alone`` is false), others may be drawing random numbers: their generators are then left alone.
    """

    def __init__(self, modules: Iterable[nn.Module], alone: bool = True) -> None:
        self.alone = alone
        self.modules = [(module, dict(vars(module)), _contents(vars(module))) for module in modules]
        with DisableTorchFunction():  # this may run within a trace
            self.torch = torch.get_rng_state()
        self.python = random.getstate()
        numpy: Any = sys.modules.get("numpy.random")
        self.numpy = None if numpy is None else numpy.get_state()

    def changed(self, module: nn.Module) -> list[str]:
        """The attributes of one of the modules that are not what they were."""
        for own, attributes, contents in self.modules:
            if own is module:
                now = vars(own)
                names = [name for name in {**attributes, **now} if now.get(name, now) is not attributes.get(name, now)]
                names += [name for name, items in contents.items() if name in now and not _same(now[name], items)]
                return list(dict.fromkeys(names))
        return []

    def random_drawn(self) -> bool:
        """Whether Python's or NumPy's generator, or torch's, has moved."""
        if not self.alone:
            return False
        numpy: Any = sys.modules.get("numpy.random")
        moved = self.numpy is not None and str(numpy.get_state()) != str(self.numpy)
        with DisableTorchFunction():
            drawn = not torch.equal(torch.get_rng_state(), self.torch)
        return moved or drawn or random.getstate() != self.python

    def restore(self) -> None:
        for module, attributes, contents in self.modules:
            now = vars(module)
            if now.keys() != attributes.keys() or any(now[name] is not value for name, value in attributes.items()):
                now.clear()
                now.update(attributes)
            for name, items in contents.items():
                if not _same(now[name], items):
                    _refill(now[name], items)
        if not self.alone:
            return
        with DisableTorchFunction():
            torch.set_rng_state(self.torch)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


def _contents(attributes: dict[str, Any]) -> dict[str, list[Any]]:
    """What is in the lists, dicts and sets among attributes: a forward may fill them."""
    return {
        name: list(value.items()) if isinstance(value, dict) else list(value)
        for name, value in attributes.items()
        if isinstance(value, (dict, list, set)) and value is not attributes
    }


def _same(container: Any, items: list[Any]) -> bool:
    if isinstance(container, dict):
        now = list(container.items())
        return len(now) == len(items) and all(a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True))
    return len(container) == len(items) and all(a is b for a, b in zip(container, items, strict=True))


def _refill(container: Any, items: list[Any]) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(items)
    else:
        container.update(items)
