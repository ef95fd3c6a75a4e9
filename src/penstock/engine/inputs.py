"""A mini-batch as the user gives it, as the micro-batches that enter the first stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.engine.message import Message, overlapping
from penstock.engine.microbatch import batch_size, moved, scatter, sizes_of
from penstock.engine.tree import flatten, unflatten
from penstock.errors import PlanError

__all__ = ["cut", "cut_targets"]


def cut(
    value: Any, count: Callable[[int], int], device: torch.device, *, empty: bool = False
) -> tuple[tuple[int, ...], list[Message]]:
    """The sizes of the micro-batches, and their messages on ``device``; tensors stay in the caller's graph.

    ``count`` says how many there are of so many samples. ``empty``: a mini-batch may have no samples, and then no
    micro-batches.
    """
    if value is None:
        raise PlanError("there are no inputs: pass what the model takes")
    size = batch_size(value, "inputs")
    if size == 0 and empty:
        return (), []
    if size == 0:
        raise PlanError("the mini-batch is empty: its tensors have no entries along dimension 0")
    sizes = sizes_of(size or 1, count(size or 1))
    return sizes, [_message(part, device) for part in scatter(value, sizes)]


def _message(value: Any, device: torch.device) -> Message:
    leaves, spec = flatten(value)
    leaves = [moved(leaf, device) for leaf in leaves]
    wants = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return Message(leaves, spec, wants, overlapping(leaves) if len(leaves) > 1 else ())


def cut_targets(targets: Any, sizes: Sequence[int], device: torch.device) -> list[Any]:
    """The targets of each micro-batch, on the last stage's device."""
    size = batch_size(targets, "targets")
    if size is not None and size != sum(sizes):
        raise PlanError(f"the inputs have {sum(sizes)} samples, but the targets have {size}")
    if not sizes:
        return []
    leaves, spec = flatten(targets)
    return scatter(unflatten([moved(leaf, device) for leaf in leaves], spec), sizes)
