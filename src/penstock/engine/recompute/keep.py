"""``ps.keep(x)``: a value that a recomputed stage saves, so that the operator that computed it does not run again.

    F   a ─mm─▶ b ─gelu─▶ c ─mm─▶ keep(d) ─▶ …      operator 2 computed d: its result is saved
    R   a ─mm─▶ b ─gelu─▶ c ─  ─▶ d ─▶ …            operator 2 is skipped, and the saved d is its result

Autograd records all operators, so the backward is the same. A dispatch mode identifies the operators; it is entered
only in stages that were seen to call ``keep``.
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

T = TypeVar("T")


def keep(value: T) -> T:
    """Return ``value``; if the stage is recomputed, it is saved instead of being computed again."""
    if has_torch_function_unary(value):  # a trace records the call, for the stage to make
        function: Any = keep
        kept: T = handle_torch_function(function, (value,), value)
        return kept
    keeper = forward_state.keeper
    if keeper is not None and isinstance(value, Tensor):
        keeper.keep(value)
    return value


class KeptValues:
    """The values that the forward of one micro-batch has marked with ``keep``."""

    def __init__(self) -> None:
        self.used = False  # whether the stage's forward calls ``keep``
        self.saved: dict[int, tuple[Tensor, int]] = {}  # value and version, by the history of its operator
        self._history: _OpHistory | None = None

    def forward(self, *, recomputing: bool) -> AbstractContextManager[Any]:
        """Around a forward: save the marked values; when ``recomputing``, use the saved ones."""
        if not recomputing:
            self.saved.clear()
        self._history = _OpHistory(self.saved if recomputing else {})
        return self._history

    def keep(self, value: Tensor) -> None:
        self.used = True
        if self._history is None or forward_state.recomputing:
            return
        history = self._history.made.get(_memory_key(value))
        if history is not None:
            self.saved[history] = (value.detach(), value._version)


def _memory_key(tensor: Tensor) -> tuple[int, int, torch.Size]:
    return storage_id(tensor), int(tensor.storage_offset()), tensor.shape


class _OpHistory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Identifies an operator by all operators before it: a recompute that differs from the first run skips none."""

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
                    "a value marked by ps.keep was changed in place afterwards: mark a copy instead, ps.keep(x.clone())"
                )
            return value.detach()
        result = func(*args, **(kwargs or {}))
        # Random operators run again, so that later ones draw the same numbers.
        if isinstance(result, Tensor) and torch.Tag.nondeterministic_seeded not in func.tags and not func.is_view:
            self.made[_memory_key(result)] = self.history
        return result
