"""Support for tests of TorchDistPackage's pipelines: ranks, their inputs, and the plain model's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.compat.torchdistpackage import tpc
from penstock.engine.microbatch import microbatch_sizes

__all__ = ["line", "own_inputs", "summed"]


def line(n: int) -> int:
    """One pipeline of all ranks; this rank's place in it."""
    tpc.setup_process_groups([("pipe", n)])
    return tpc.get_pp_rank()


def own_inputs(x: Any, y: Any) -> list[Any]:
    return [x] if tpc.is_first_in_pipeline_group() else [y] if tpc.is_last_in_pipeline_group() else []


def summed(model: nn.Module, x: Tensor, y: Tensor, m: int, loss_fn: Callable[..., Tensor] = F.mse_loss) -> Tensor:
    """The gradients of the micro-batches' losses, undivided, are added to the plain model's; the last of the losses."""
    sizes = list(microbatch_sizes(len(x), m))
    for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
        loss = loss_fn(model(part), target)
        loss.backward()
    return loss.detach()
