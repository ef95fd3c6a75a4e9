"""What a step leaves behind, and gradients for inputs that want them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.engine.channel.control import Control
from penstock.engine.channel.group import speaks_nccl
from penstock.engine.doing import LOSS
from penstock.engine.head import Head
from penstock.engine.message import Message, edge_of

__all__ = ["Outcome", "origins_of", "send_back", "share_loss"]


@dataclass(frozen=True)
class Outcome:
    """The mini-batch's loss, the factor that puts its gradients right, its outputs, its samples and micro-batches.

    Where a pipeline has replicas, loss and samples are those of all; the rest is this one's.
    """

    loss: Tensor | None  # None: an evaluation without one
    factor: float | None  # None: they are right
    outputs: Any
    samples: int
    microbatches: int


def origins_of(messages: Sequence[Message]) -> list[list[GradientEdge]]:
    """Where in the caller's graph the inputs come from that want a gradient.

    To be asked before a stage changes them in place: a part of a tensor cannot tell afterwards.
    """
    return [[edge_of(message.leaves[i]) for i in message.wants] for message in messages]


def send_back(
    origins: Sequence[Sequence[GradientEdge]], grads: Sequence[Sequence[Tensor | None]], factor: float | None
) -> None:
    """Give the gradients of the micro-batches to the tensors of the mini-batch that they were cut from."""
    pairs = [
        (origin, grad if factor is None else grad * factor)
        for edges, row in zip(origins, grads, strict=True)
        for origin, grad in zip(edges, row, strict=True)
        if grad is not None
    ]
    if pairs:
        torch.autograd.backward([origin for origin, _ in pairs], [grad for _, grad in pairs])


def share_loss(
    head: Head | None, control: Control, last: int, device: torch.device
) -> tuple[Tensor | None, float | None, int]:
    """The loss, the factor and the samples that the ``last`` rank, which has the head, knows of, on all ranks."""
    control.doing.phase = LOSS
    if head is None:
        there, loss, factor, wide, samples = control.take_row(last, 5)
        dtype = torch.float64 if wide else torch.float32
        value = torch.tensor(loss, dtype=dtype, device=device) if there else None
        return value, factor or None, int(samples)
    if speaks_nccl(device):  # the host did not wait for what was received: now it does
        others = [rank for place, rank in enumerate(control.ranks) if place != last]
        with control.doing.waiting(others, "for its GPU, and that for what comes from"):
            torch.cuda.current_stream(device).synchronize()
    value, factor_here = head.finish()
    if value is None:
        row = [0.0, 0.0, 0.0, 0.0, head.batch]
    else:
        row = [1.0, float(value), factor_here or 0.0, float(value.dtype == torch.float64), head.batch]
    for rank in range(len(control.ranks)):
        if rank != last:
            control.send_row(rank, row)
    return value, factor_here, head.batch
