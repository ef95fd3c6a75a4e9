"""Copies from one stream to another, and waiting for them, as parts of autograd's graph.

compute 0  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓          Copy runs on the two streams that it is given, next to computation.
copy    0     └Wait ▒▒ Copy            Wait before it: the copy starts when what it copies is there.
copy    1           ▒▒ ┐               Wait after it: computation goes on when the copy is there.
compute 1     ▓▓▓▓▓▓▓▓ └Wait ▓▓▓▓      Both do the same in backward, in the other direction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.compat.torchgpipe.stream import (
    AbstractStream,
    current_stream,
    get_device,
    record_stream,
    use_stream,
    wait_stream,
)

__all__ = ["Context", "Copy", "Wait"]


class Context:
    """What forward leaves for backward."""

    prev_stream: AbstractStream
    next_stream: AbstractStream


class Copy(torch.autograd.Function):
    """Tensors of ``prev_stream``'s device, on that of ``next_stream``."""

    @staticmethod
    def forward(
        ctx: Any, prev_stream: AbstractStream, next_stream: AbstractStream, *input: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.prev_stream, ctx.next_stream = prev_stream, next_stream
        return _copied(input, prev_stream, next_stream)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_copied(grads, ctx.next_stream, ctx.prev_stream)


class Wait(torch.autograd.Function):
    """The same tensors; ``next_stream`` waits for ``prev_stream``, and in backward the other way round."""

    @staticmethod
    def forward(
        ctx: Any, prev_stream: AbstractStream, next_stream: AbstractStream, *input: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.prev_stream, ctx.next_stream = prev_stream, next_stream
        wait_stream(next_stream, prev_stream)
        return tuple(tensor.detach() for tensor in input)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wait_stream(ctx.prev_stream, ctx.next_stream)
        return None, None, *grads


def _copied(tensors: Iterable[Tensor], source: AbstractStream, target: AbstractStream) -> tuple[Tensor, ...]:
    device = get_device(target)
    user = current_stream(device)
    copies = []
    with use_stream(target), use_stream(source):  # between two devices, PyTorch makes each wait for the other
        for tensor in tensors:
            copy = tensor.to(device)
            if copy is tensor:
                wait_stream(target, source)
                copy = tensor.detach()
            copies.append(copy)
            record_stream(tensor, source)  # it was allocated on another stream
            record_stream(copy, user)  # it will be used on another one
    return tuple(copies)
