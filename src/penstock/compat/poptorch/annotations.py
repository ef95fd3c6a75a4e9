"""Blocks: ``Block``, ``BeginBlock``, ``BlockFunction``, over Penstock's own, with IPUs in the place of devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from penstock.compat.poptorch.errors import Error, require
from penstock.split import marks as native
from penstock.split.trace.state import recorder

__all__ = ["BeginBlock", "Block", "BlockFunction", "device_of", "ipu_of", "removeBlocks"]

F = TypeVar("F", bound=Callable[..., Any])


def device_of(ipu_id: int | None) -> str | None:
    """The device that stands for an IPU in a plan, until it is known which devices there are."""
    if ipu_id is None:
        return None
    require(isinstance(ipu_id, int) and ipu_id >= 0, f"an IPU is a number from 0 on, got {ipu_id!r}")
    return f"ipu:{ipu_id}"


def ipu_of(device: str) -> int:
    return int(device.rpartition(":")[2])


class Block(native.Block):
    """A scope whose operations form the block ``user_id``, on the IPU ``ipu_id``. Outside a PopTorch model: nothing.

    Without a name, blocks are numbered in the order of the forward: "0", "1", …
    """

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__(None if user_id is None else _id(user_id), device_of(ipu_id))

    def start(self) -> None:
        """Begin the block here; it lasts until another one is entered."""
        trace = recorder()
        if trace is not None:
            trace.begin(self)

    @staticmethod
    def useAutoId() -> None:
        """Blocks without a name are always numbered."""


class BlockFunction(native.BlockFunction):
    """A decorator: what the function or method does forms the block ``user_id``."""

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__(None if user_id is None else _id(user_id), device_of(ipu_id))


def BeginBlock(layer_to_call: F, user_id: str | None = None, ipu_id: int | None = None) -> F:
    """From each call of a module or function on, the block is ``user_id``. The same module is given back."""
    if isinstance(layer_to_call, nn.Module) and native.begin_block_of(layer_to_call) is not None:
        raise Error("module has already been assigned to a block.")
    if not callable(layer_to_call):
        raise Error("module is not an instance of torch.nn.Module or function.")
    return native.BeginBlock(layer_to_call, None if user_id is None else _id(user_id), device_of(ipu_id))


def removeBlocks(module: nn.Module) -> None:
    """Take off what ``BeginBlock`` put on a module and on those inside it."""
    for part in module.modules():
        native.remove_begin_block(part)


def _id(user_id: object) -> str:
    require(isinstance(user_id, str) and user_id, f"Block IDs are supposed to be strings but got {user_id!r}")
    return str(user_id)
