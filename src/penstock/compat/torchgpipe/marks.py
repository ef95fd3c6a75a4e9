"""What autograd's graph shows of micro-batches that run again: nodes of the names that torchgpipe's graph has.

output ──Join──Join──▶ the pipeline        one pair for each micro-batch; they do nothing,
          │     └─ Checkpoint ─ Recompute   the pipeline's own node runs its backwards
          └─ Checkpoint ─ Recompute
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.compat.torchgpipe.dependency import join
from penstock.compat.torchgpipe.microbatch import Batch, TensorOrTensors
from penstock.compat.torchgpipe.phony import get_phony

__all__ = ["show_recomputed"]


def show_recomputed(output: TensorOrTensors, count: int) -> TensorOrTensors:
    """The output, with a mark in its graph for each of ``count`` micro-batches."""
    batch = Batch(output)
    for i, tensor in enumerate(batch):
        if isinstance(tensor, Tensor) and tensor.requires_grad:  # and no tuple in a tuple
            for _ in range(count):
                mark = Recompute.apply(get_phony(tensor.device, requires_grad=True))  # type: ignore[no-untyped-call]
                tensor = join(tensor, Checkpoint.apply(mark))  # type: ignore[no-untyped-call]
            batch[i] = tensor
            break
    return batch.tensor_or_tensors


class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, phony: Tensor) -> Tensor:
        return phony.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


class Recompute(Checkpoint):
    pass
