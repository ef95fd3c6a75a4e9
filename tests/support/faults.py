"""Something that happens in the middle of a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def hit_in_backward(x: Tensor, hit: Callable[[Tensor], None]) -> Tensor:
    """``x``, with ``hit`` called on its gradient when that comes by."""
    out: Tensor = _Hit.apply(x, hit)  # type: ignore[no-untyped-call]
    return out


class _Hit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, hit: Callable[[Tensor], None]) -> Tensor:
        ctx.hit = hit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.hit(grad)
        return grad, None
