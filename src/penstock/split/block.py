"""Blocks: named parts of a forward, from which stages are made by name.

    with ps.Block("B1"):            # a scope
        x = self.layer1(x)
    @ps.BlockFunction("B2")         # a function, a method or a forward
    ps.BeginBlock(self.layer3, "B3")    # from the call of this module on

What runs before any block belongs to the first one that is entered; what runs after a block has ended, and in no
other, belongs to that block still. In a block within a block the inner one counts. Blocks without a name are
numbered, "0", "1", …, in the order in which they are met.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import nn

from penstock.errors import PlanError
from penstock.split.trace.state import recorder

__all__ = ["BeginBlock", "Block", "BlockFunction", "Stage", "begun", "decorated", "unmark"]

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE = "_penstock_block"


class Block:
    """A scope whose operations form the block ``name``. Outside ``ps.split`` it does nothing."""

    def __init__(self, name: str | None = None, device: str | torch.device | None = None) -> None:
        self.name = None if name is None else checked_name(name)
        self.device = checked_device(f"block {name!r}", device)

    def __enter__(self) -> Self:
        trace = recorder()
        if trace is not None:
            trace.enter(self)
        return self

    def __exit__(self, *error: object) -> None:
        trace = recorder()
        if trace is not None:
            trace.leave()


class BlockFunction:
    """A decorator: what the function or method does forms the block ``name``."""

    def __init__(self, name: str | None = None, device: str | torch.device | None = None) -> None:
        self.block = Block(name, device)

    def __call__(self, function: F) -> F:
        if not callable(function):
            raise PlanError(f"BlockFunction({self.block.name!r}) decorates functions, got {type(function).__name__}")
        block = self.block

        @functools.wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            with block:
                return function(*args, **kwargs)

        setattr(within, _ATTRIBUTE, block)
        return within  # type: ignore[return-value]


def BeginBlock(layer: F, name: str | None = None, device: str | torch.device | None = None) -> F:
    """From each call of ``layer`` on, until another block is entered, the block is ``name``.

    A module is given back as it is, with the same parameters and names; a function is given back wrapped.
    """
    block = Block(name, device)
    if isinstance(layer, nn.Module):
        before = begun(layer)
        if before is not None:
            kind = type(layer).__name__
            raise PlanError(f"this {kind} already begins block {before.name!r}: it cannot begin {name!r} as well")
        layer.__dict__[_ATTRIBUTE] = block
        return layer
    if not callable(layer):
        raise PlanError(f"BeginBlock takes a module or a function, got {type(layer).__name__}")
    if hasattr(layer, _ATTRIBUTE):
        raise PlanError(f"this function already begins block {getattr(layer, _ATTRIBUTE).name!r}, not {name!r} as well")

    @functools.wraps(layer)
    def beginning(*args: Any, **kwargs: Any) -> Any:
        trace = recorder()
        if trace is not None:
            trace.begin(block)
        return layer(*args, **kwargs)

    setattr(beginning, _ATTRIBUTE, block)
    return beginning  # type: ignore[return-value]


def begun(module: nn.Module) -> Block | None:
    """The block that begins with a module's call."""
    return module.__dict__.get(_ATTRIBUTE)


def unmark(module: nn.Module) -> None:
    """Take off what ``BeginBlock`` put on a module."""
    module.__dict__.pop(_ATTRIBUTE, None)


def decorated(module: nn.Module) -> Block | None:
    """The block that a module's forward is decorated with."""
    return getattr(module.forward, _ATTRIBUTE, None)


class Stage:
    """The blocks of one stage, and where it goes: ``ps.Stage("B1", "B2").on("cuda:0")``."""

    def __init__(self, *blocks: str, device: str | torch.device | None = None) -> None:
        if not blocks:
            raise PlanError("a stage needs blocks: ps.Stage('B1', 'B2')")
        self.blocks = tuple(checked_name(block) for block in blocks)
        self.device = checked_device(f"the stage of {', '.join(self.blocks)}", device)

    def on(self, device: str | torch.device) -> Stage:
        """The same stage, on ``device``."""
        return Stage(*self.blocks, device=device)

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self.blocks))
        return f"Stage({names})" + (f".on({self.device!r})" if self.device else "")


def checked_name(name: object) -> str:
    """A block's name, which is a string with something in it."""
    if not isinstance(name, str) or not name:
        raise PlanError(f"a block's name is a string that is not empty, got {name!r}")
    return name


def checked_device(name: str, device: object) -> str | None:
    """A device's name."""
    if device is None:
        return None
    if not isinstance(device, (str, torch.device)):
        raise PlanError(f"the device of {name} is a string or a torch.device, got {device!r}")
    try:
        return str(torch.device(device))
    except RuntimeError as error:
        raise PlanError(f"{name} names a device {device!r} that torch does not know: {error}") from error
