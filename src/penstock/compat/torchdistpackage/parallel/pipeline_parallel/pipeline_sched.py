"""``forward_backward``: this rank's part of a 1F1B pipeline, of functions that every rank has for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.compat.own_errors import own_errors
from penstock.compat.torchdistpackage.ddp.naive_ddp import NaiveDDP
from penstock.compat.torchdistpackage.dist.process_topo import tpc
from penstock.engine.deferred import deferring

__all__ = ["forward_backward", "forward_eval"]


def forward_backward(
    optimizer: Any,
    fwd_fn: Callable[[Any], Any],
    bwd_fn: Callable[[Any, Any], Any] | None,
    inputs: Any,
    num_microbatches: int = 1,
    forward_only: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    scatter_gather_tensors: bool = False,
) -> Any:
    """Run one mini-batch: the output of ``fwd_fn`` for the last micro-batch, without its graph.

    ``inputs``, a tensor or a list of them, is what this rank needs of the mini-batch; it is cut along dimension 0.
    ``fwd_fn`` gets what the rank before gave, then this rank's inputs: in a list, or alone where it is one value. Of
    a tuple that the rank before gave, each is one. What it gives goes to the next rank, and is the loss on the last,
    whose gradients are added up over micro-batches as they are: nothing is divided by their number.
    ``bwd_fn(output, grad)`` runs the backward, with None for ``grad`` on the last rank; autograd does it without one.
    Gradients are zeroed first where there is an ``optimizer``.

    Tensors travel with the dtypes, shapes and structure that they have. ``dtype`` and ``scatter_gather_tensors`` are
    not needed for that.
    """
    if optimizer is not None:
        optimizer.zero_grad()
    own = [*inputs] if isinstance(inputs, (list, tuple)) else [] if inputs is None else [inputs]
    pipeline = tpc.pipeline()
    after: dict[type[nn.Module], Any] = {NaiveDDP: partial(NaiveDDP.after_backwards, count=num_microbatches)}
    with nullcontext() if forward_only else deferring(after), own_errors():
        return pipeline.run(partial(_call, fwd_fn), bwd_fn, own, num_microbatches, training=not forward_only)


def forward_eval(fwd_fn: Callable[[Any], Any], inputs: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The forward of one mini-batch, in one piece: on the last rank this is the model's output."""
    return forward_backward(None, fwd_fn, None, inputs, num_microbatches=1, forward_only=True, dtype=dtype)


def _call(fwd_fn: Callable[[Any], Any], microbatch: int, value: Any, own: Sequence[Any]) -> Any:
    parts = [*(value if isinstance(value, (tuple, list)) else [value]), *own]
    return fwd_fn(parts[0] if len(parts) == 1 else parts)
