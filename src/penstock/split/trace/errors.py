"""The error for a forward that cannot be recorded: the line, the reason and the remedy."""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

import torch
from torch import nn

from penstock.errors import PlanError
from penstock.split.trace.state import place_of, source_line


class CannotTrace(PlanError):
    """A forward that cannot be recorded, at least not for this kind of call.

    ``marked``: it was seen to have marks. ``definite``: other inputs would not help.
    """

    def __init__(self, message: str, *, marked: bool = False, definite: bool = False) -> None:
        super().__init__(message)
        self.marked, self.definite = marked, definite


REMEDY = "Mark the cuts elsewhere, or move this part into a module of its own without cuts inside"


def is_data_dependent(error: BaseException) -> bool:
    """Whether fake tensors cannot compute a result because it depends on data."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error)
    return (
        not names.isdisjoint(("DataDependentOutputException", "DynamicOutputShapeException"))
        or "data-dependent" in text
        or "Cannot access data pointer" in text
        or ".numpy() is not supported" in text
        or ".tolist() is not supported" in text
    )


def cannot_trace(
    module: nn.Module, error: Exception, call: str | None, path: str = "", place: str | None = None
) -> CannotTrace:
    """The error for a forward that raised ``error`` while it was recorded, at ``place``."""
    name = f"{path} ({type(module).__name__})" if path else type(module).__name__
    place = place or place_of(error) or _defined(module)
    line = source_line(place)
    text = str(error).strip().splitlines()
    reason = text[0].rstrip(".") if text else type(error).__name__
    definite = is_data_dependent(error)
    if definite:
        reason = f"its path depends on data that is known only when the model runs ({reason})"
    else:
        reason = f"{type(error).__name__}: {reason}"
    shown = f" `{line}`" if line else ""
    called = f", called as {call}" if call is not None else ""
    message = f"{place}:{shown} {name}.forward cannot be traced here{called}: {reason}. {REMEDY}"
    return CannotTrace(message, definite=definite)


def _defined(module: nn.Module) -> str:
    function = inspect.unwrap(type(module).forward)
    code: Any = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else "an unknown line"


def mentions_marks(module: nn.Module) -> bool:
    """Whether the forward of a module, or of one inside it, speaks of cuts or blocks: then it is not to be skipped."""
    from penstock.split.marks import Block, BlockFunction, CutPoint, begin_block_of, cut, cut_points, forward_block_of

    inside = (part for part in module.modules() if part is not module)
    if cut_points(module) or any(begin_block_of(part) or forward_block_of(part) for part in inside):
        return True
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        function = inspect.unwrap(type(part).forward)
        code: Any = getattr(function, "__code__", None)
        scope = getattr(function, "__globals__", {})
        if not isinstance(code, CodeType):
            continue
        for name in code.co_names:
            value = scope.get(name)
            if value is cut or (isinstance(value, type) and issubclass(value, (Block, BlockFunction, CutPoint))):
                return True
            package = getattr(value, "__name__", "") if inspect.ismodule(value) else ""
            if package.split(".")[0] == "penstock" and {"cut", "Block"} & set(code.co_names):
                return True
    return False
