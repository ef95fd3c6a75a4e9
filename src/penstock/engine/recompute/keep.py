"""``ps.keep(x)``: a value that a recomputed stage saves, so that the operator that made it does not run again.

    F   a ─mm─▶ b ─gelu─▶ c ─mm─▶ keep(d) ─▶ …      operator 2 made d: its result is saved
    R   a ─mm─▶ b ─gelu─▶ c ─  ─▶ d ─▶ …            operator 2 is passed over, and the saved d stands in its place

Autograd still sees all operators, so the backward is the same. Following them takes a mode of torch's that sees each
one, which is entered only in stages that have been seen to call ``keep``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from penstock._torch import TorchDispatchMode, storage_id
from penstock.engine.forward_context import forward_state
from penstock.errors import PlanError

__all__ = ["KeptValues", "keep"]

T = TypeVar("T")


def keep(value: T) -> T:
    """Mark a tensor that is saved where the stage is recomputed, instead of being computed again. Returns it."""
    if has_torch_function_unary(value):  # a trace records the call, to make it when the stage runs
        function: Any = keep
        kept: T = handle_torch_function(function, (value,), value)
        return kept
    keeper = forward_state.keeper
    if keeper is not None and isinstance(value, Tensor):
        keeper.keep(value)
    return value


class KeptValues:
    """What the forwards of one micro-batch in flight have marked to be kept."""

    def __init__(self) -> None:
        self.used = False  # whether this stage's forward marks anything; learned when it does
        self.saved: dict[int, tuple[Tensor, int]] = {}  # by the history of operators that led to each
        self._counting: _OpHistory | None = None

    def forward(self, *, again: bool) -> AbstractContextManager[Any]:
        """Around a forward: count its operators and save what is marked, or, ``again``, use what was saved."""
        if not again:
            self.saved.clear()
        self._counting = _OpHistory(self.saved if again else {})
        return self._counting

    def keep(self, value: Tensor) -> None:
        self.used = True
        if self._counting is None or forward_state.recomputing:
            return
        history = self._counting.made.get(_memory_key(value))
        if history is not None:
            self.saved[history] = (value.detach(), value._version)

    def clear(self) -> None:
        self.saved.clear()
        self._counting = None


def _memory_key(tensor: Tensor) -> tuple[int, int, torch.Size]:
    return storage_id(tensor), int(tensor.storage_offset()), tensor.shape


class _OpHistory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows an operator by all that ran before it: a second forward that runs otherwise finds nothing saved."""

    def __init__(self, saved: dict[int, tuple[Tensor, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved = saved
        self.history = 0
        self.made: dict[tuple[int, int, torch.Size], int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.history = hash((self.history, func, *(arg.shape for arg in args if isinstance(arg, Tensor))))
        if self.history in self.saved:
            value, version = self.saved[self.history]
            if value._version != version:
                raise PlanError(
                    "a value that ps.keep marked was changed in place afterwards: mark a copy of it, ps.keep(x.clone())"
                )
            return value.detach()
        result = func(*args, **(kwargs or {}))
        # What draws random numbers runs again, so that what comes after it draws the same.
        if isinstance(result, Tensor) and torch.Tag.nondeterministic_seeded not in func.tags and not func.is_view:
            self.made[_memory_key(result)] = self.history
        return result
