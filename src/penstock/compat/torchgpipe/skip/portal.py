"""A way around autograd's graph for a tensor and, back, for its gradient.

    ──┬─────────── Join ─ … ─ Fork ─────── Join ─ … ─ Fork ─────────── f ──▶
      └─ PortalBlue ┘            └PortalCopy ┘           └PortalOrange ┘
           puts it in            moves it to             takes it out
                                 another device

Only phonies, tensors without data, go along the lines: the layers between do not hold the tensor, and the portal lets
go of it when it was used as often as was said. In backward the gradient goes through the portal from orange to blue.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.compat.torchgpipe.copy import Context as CopyContext
from penstock.compat.torchgpipe.copy import Copy
from penstock.compat.torchgpipe.phony import get_phony
from penstock.compat.torchgpipe.stream import AbstractStream, get_device

__all__ = ["Context", "Portal", "PortalBlue", "PortalCopy", "PortalOrange"]


class Portal:
    """Holds a tensor, or None, until it was used ``tensor_life`` times. ``index`` is the micro-batch's."""

    tensor: Tensor | None
    tensor_life: int

    def __init__(self, tensor: Tensor | None, tensor_life: int, index: int = 0) -> None:
        self.put_tensor(tensor, tensor_life)
        self.grad: Tensor | None = None
        self.index = index

    def blue(self) -> Tensor:
        """Use the tensor to put it in; a phony to join to the line that it comes from."""
        tensor = self.use_tensor()
        if tensor is None:
            return get_phony(torch.device("cpu"), requires_grad=False)
        phony: Tensor = PortalBlue.apply(self, tensor)  # type: ignore[no-untyped-call]
        return phony

    def orange(self, phony: Tensor) -> Tensor | None:
        """Use the tensor, and get it out; the phony is forked from the line that it goes to."""
        self.check_tensor_life()
        if self.tensor is None:
            return self.use_tensor()
        tensor: Tensor = PortalOrange.apply(self, phony)  # type: ignore[no-untyped-call]
        return tensor

    def copy(self, prev_stream: AbstractStream, next_stream: AbstractStream, phony: Tensor) -> Tensor:
        """Move the tensor to another device: from a phony that was forked, a phony to join."""
        if self.tensor is None:
            return get_phony(torch.device("cpu"), requires_grad=False)
        moved: Tensor = PortalCopy.apply(self, prev_stream, next_stream, phony)  # type: ignore[no-untyped-call]
        return moved

    def check_tensor_life(self) -> None:
        """A RuntimeError if the tensor was used as often as it may be."""
        if self.tensor_life <= 0:
            raise RuntimeError("tensor in portal has been removed")

    def put_tensor(self, tensor: Tensor | None, tensor_life: int) -> None:
        """Hold another tensor, for so many uses."""
        self.tensor_life = tensor_life
        self.tensor = tensor if tensor_life > 0 else None

    def use_tensor(self) -> Tensor | None:
        """The tensor; the last use lets go of it."""
        self.check_tensor_life()
        tensor = self.tensor
        self.put_tensor(tensor, self.tensor_life - 1)
        return tensor

    def put_grad(self, grad: Tensor) -> None:
        """Hold a gradient, for one use."""
        self.grad = grad

    def use_grad(self) -> Tensor:
        """The gradient, of which the portal lets go."""
        if self.grad is None:
            raise RuntimeError("grad in portal has been removed or never set")
        grad, self.grad = self.grad, None
        return grad


class Context(CopyContext):
    """What forward leaves for backward."""

    portal: Portal


class PortalBlue(torch.autograd.Function):
    """A tensor goes into its portal. It is an argument, so that its gradient has a way on from here."""

    @staticmethod
    def forward(ctx: Any, portal: Portal, tensor: Tensor) -> Tensor:
        ctx.portal = portal
        return get_phony(tensor.device, requires_grad=False).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None]:
        # There is none if nothing came of the tensor where it was taken out.
        return None, None if ctx.portal.grad is None else ctx.portal.use_grad()


class PortalOrange(torch.autograd.Function):
    """A tensor comes out of its portal."""

    @staticmethod
    def forward(ctx: Any, portal: Portal, phony: Tensor) -> Tensor:
        ctx.portal = portal
        tensor = portal.use_tensor()
        assert tensor is not None
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.portal.put_grad(grads[0])
        return None, None


class PortalCopy(torch.autograd.Function):
    """The tensor in a portal goes to another device, and its gradient comes back from there."""

    @staticmethod
    def forward(
        ctx: Any, portal: Portal, prev_stream: AbstractStream, next_stream: AbstractStream, phony: Tensor
    ) -> Tensor:
        ctx.portal = portal
        assert portal.tensor is not None
        (portal.tensor,) = Copy.forward(ctx, prev_stream, next_stream, portal.tensor)
        return get_phony(get_device(next_stream), requires_grad=False).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        portal = ctx.portal
        if portal.grad is not None:
            *_, portal.grad = Copy.backward(ctx, portal.grad)
        return None, None, None, None
