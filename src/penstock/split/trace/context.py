"""Grad mode and autocast that a forward switches for some of its operations: seen at the trace, set when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

AMBIENT = (True, (True, torch.float64), (True, torch.float64))
"""Grad mode and autocast during a trace: an odd state, so that whatever the forward switches is seen to differ."""


def context_now() -> tuple[Any, ...]:
    casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return (torch.is_grad_enabled(), *casts)


@contextmanager
def ambient() -> Iterator[None]:
    """The odd state, for the time of a trace."""
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    with torch.enable_grad():
        try:
            for kind, _, _ in before:
                torch.set_autocast_enabled(kind, True)
                torch.set_autocast_dtype(kind, torch.float64)
            yield
        finally:
            for kind, enabled, dtype in before:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)


def switched_as(context: tuple[Any, ...]) -> ExitStack:
    """Grad mode and autocast as the forward had set them for an operation."""
    stack = ExitStack()
    if context[0] != AMBIENT[0]:
        stack.enter_context(torch.set_grad_enabled(context[0]))
    for kind, now, usual in zip(("cpu", "cuda"), context[1:], AMBIENT[1:], strict=True):
        if now != usual:
            enabled, dtype = now
            stack.enter_context(torch.autocast(kind, dtype=dtype if enabled else None, enabled=enabled))
    return stack
