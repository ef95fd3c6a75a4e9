"""An order between two lines of autograd's graph that share no value: a phony goes from one to the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.compat.torchgpipe.phony import get_phony

__all__ = ["Fork", "Join", "fork", "join"]


def fork(input: Tensor) -> tuple[Tensor, Tensor]:
    """The value, and a phony that depends on it."""
    if torch.is_grad_enabled() and input.requires_grad:
        value, phony = Fork.apply(input)  # type: ignore[no-untyped-call]
        return value, phony
    return input, get_phony(input.device, requires_grad=False)


def join(input: Tensor, phony: Tensor) -> Tensor:
    """The value, made to depend on a phony: its backward runs before that of the phony's origin."""
    if torch.is_grad_enabled() and (input.requires_grad or phony.requires_grad):
        joined: Tensor = Join.apply(input, phony)  # type: ignore[no-untyped-call]
        return joined
    return input


class Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> tuple[Tensor, Tensor]:
        return input.detach(), get_phony(input.device, requires_grad=False).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, phony: Tensor) -> Tensor:
        return input.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
