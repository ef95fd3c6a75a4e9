"""Call a function in the middle of a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def call_in_backward(x: Tensor, callback: Callable[[Tensor], None]) -> Tensor:
    """``x``; the backward calls ``callback`` with its gradient."""
    out: Tensor = _CallInBackward.apply(x, callback)  # type: ignore[no-untyped-call]
    return out


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, callback: Callable[[Tensor], None]) -> Tensor:
        ctx.callback = callback
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.callback(grad)
        return grad, None
