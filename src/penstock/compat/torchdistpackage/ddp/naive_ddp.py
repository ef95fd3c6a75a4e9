"""``NaiveDDP``: gradients averaged over replicas, after as many backwards as it is told to wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock._torch import queue_callback
from penstock.compat.torchdistpackage.dist.process_topo import tpc
from penstock.engine.deferred import reduce_gradients

__all__ = ["NaiveDDP"]


class NaiveDDP(nn.Module):
    """A module whose replicas start equal, and whose gradients are reduced over ``process_group``.

    If none is given, that is the data group of ``tpc``; the world where ``tpc`` was not set up. Gradients are reduced
    at the end of each ``num_grad_acc_iter``-th backward. In ``forward_backward`` that is at its end, once, if its
    micro-batches make the number full.
    ``sync`` makes no difference here: a backward has reduced what it is to reduce when it ends.
    """

    def __init__(
        self,
        module: nn.Module,
        sync: bool = False,
        *,
        process_group: dist.ProcessGroup | None = None,
        reduce_op: str = "avg",
        num_grad_acc_iter: int = 1,
    ) -> None:
        super().__init__()
        if reduce_op.lower() not in ("avg", "sum"):
            raise ValueError(f"reduce_op must be 'avg' or 'sum', got {reduce_op!r}")
        if num_grad_acc_iter < 1:
            raise ValueError(f"num_grad_acc_iter must be 1 at least, got {num_grad_acc_iter}")
        self.module = module
        self.process_group = _replicas() if process_group is None else process_group
        self.mean = reduce_op.lower() == "avg"
        self.num_grad_acc_iter = num_grad_acc_iter
        self.require_backward_grad_sync = True
        self._count = 0  # of backwards since the last reduction
        self._begun = False  # whether a backward is under way
        if self.process_group is not None:
            first = dist.get_process_group_ranks(self.process_group)[0]
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.data, first, self.process_group)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here are not counted, and reduce nothing."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def reduce_gradients(self) -> None:
        """For a program that asks for it: what is complete has been reduced already."""

    def after_backwards(self, count: int = 1) -> None:
        """So many backwards are over: reduce, if that makes the number full."""
        self._count += count
        if self._count >= self.num_grad_acc_iter:
            self._count = 0
            if self.process_group is not None:
                reduce_gradients(self.module.parameters(), self.process_group, mean=self.mean)

    def _arrived(self, parameter: torch.Tensor) -> None:
        if self.require_backward_grad_sync and not self._begun:
            self._begun = True
            queue_callback(self._over)

    def _over(self) -> None:
        self._begun = False
        self.after_backwards()


def _replicas() -> dist.ProcessGroup | None:
    """The group of this process's replicas; None where there are none."""
    if tpc.is_mode_inited("global"):
        return tpc.get_group("data") if tpc.is_mode_inited("data") else None
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialized"
    return world
