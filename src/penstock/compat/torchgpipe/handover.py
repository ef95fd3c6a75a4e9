"""A global variable is no way to hand a value from one partition to another: found before anything runs.

def forward(self, input):           def forward(self, input):
    global skip_buf                     return layer8(input) + skip_buf
    skip_buf = input                    # of which micro-batch?
    return layer1(input)
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from torch import nn

from penstock.errors import PlanError

__all__ = ["refuse_handing_over"]

Variable = tuple[int, str]  # the module's globals, by identity, and the name


def refuse_handing_over(partitions: Iterable[nn.Module]) -> None:
    """An error if a layer's forward sets a global variable that a layer of another partition reads.

    A variable that a forward reads before it sets it, as a counter, hands nothing over.
    """
    sets: list[tuple[Variable, int, str]] = []
    reads: list[tuple[Variable, int, str]] = []
    for j, partition in enumerate(partitions):
        for layer in partition.modules():
            read, written = _used(layer)
            reads += [(variable, j, type(layer).__name__) for variable in read]
            sets += [(variable, j, type(layer).__name__) for variable in written - read]
    for variable, at, writer in sets:
        for same, j, reader in reads:
            if same == variable and j != at:
                raise PlanError(
                    f"{reader} in partition {j} reads the global variable {variable[1]!r}, which {writer} in partition "
                    f"{at} sets: partitions work on several micro-batches at a time, and the value may be of another "
                    "one. Pass it on with torchgpipe.skip: @skippable(stash=[…]), yield stash(…)"
                )


def _used(layer: nn.Module) -> tuple[set[Variable], set[Variable]]:
    """The global variables that a layer's forward reads, and those that it sets."""
    function: Any = getattr(layer.forward, "__func__", layer.forward)
    function = getattr(function, "_skip_forward", function)
    read: set[Variable] = set()
    written: set[Variable] = set()
    if isinstance(getattr(function, "__code__", None), CodeType):
        space = id(function.__globals__)
        for instruction in _instructions(function.__code__):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read.add((space, str(instruction.argval)))
            elif instruction.opname == "STORE_GLOBAL":
                written.add((space, str(instruction.argval)))
    return read, written


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)
