"""What is said where a forward cannot be traced: the line, the reason, and what to do."""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.fx.proxy import TraceError

from penstock.errors import PlanError
from penstock.split.trace.call import Call
from penstock.split.trace.state import place_of, source_line


class CannotTrace(PlanError):
    """A forward that cannot be traced, at least not for this kind of call."""

    marked = False  # whether it was seen to have marks


REMEDY = (
    "mark the cuts elsewhere, move this part into a module of its own without cuts inside, or, if the model threads a "
    'hidden state through a list of blocks, use blocks="…"'
)


def cannot_trace(module: nn.Module, error: Exception, call: Call | None, path: str = "") -> CannotTrace:
    """The error for a forward that raised ``error`` while it was traced."""
    name = f"{path} ({type(module).__name__})" if path else type(module).__name__
    place = place_of(error) or _defined(module)
    line = source_line(place)
    text = str(error).strip().splitlines()
    reason = text[0].rstrip(".") if text else type(error).__name__
    if isinstance(error, TraceError) or "control flow" in reason:
        reason = f"it needs to know a value that is known only when the model runs ({reason})"
    elif isinstance(error, NotImplementedError) and "made in forward" in reason:
        reason = f"it gives {reason}: return a tensor, a tuple, a dict or a dataclass"
    elif not isinstance(error, NotImplementedError):
        reason = f"{type(error).__name__}: {reason}"
    shown = f" `{line}`" if line else ""
    called = f", called as {call}" if call is not None else ""
    return CannotTrace(f"{place}:{shown} {name}.forward cannot be traced here{called}: {reason}. What to do: {REMEDY}")


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
