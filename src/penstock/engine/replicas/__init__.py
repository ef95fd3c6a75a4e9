"""The replicas of a pipeline: the same stages in other processes, on other parts of the mini-batch.

replica 0   stage 0 ── stage 1 ── stage 2        samples 0 … 7
               ┆          ┆          ┆           the rank of each stage talks with its twins: gradients are summed,
replica 1   stage 0 ── stage 1 ── stage 2        losses are weighted by what all replicas have
                                                 samples 8 … 12
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from penstock.engine.channel.base import ChannelError
from penstock.engine.channel.control import ControlChannel
from penstock.engine.channel.groups import Group
from penstock.engine.failure.status import RankStatus

__all__ = ["PendingSum", "ReplicaGroup", "broadcast_from_first"]

PendingSum = Callable[[], list[float]]  # numbers on their way: called, it waits for them


class ReplicaGroup:
    """This rank and its twins, one in each replica. All of them make the same calls in the same order."""

    def __init__(self, ranks: Sequence[int], rank: int, numbers: Group, group: Group, status: RankStatus) -> None:
        """``ranks`` are the twins' in the world; ``numbers`` is their group on the CPU, ``group`` on their device."""
        self.count = len(ranks)
        self.control = ControlChannel(numbers, ranks, status)
        self.status = status
        self.others = [r for r in ranks if r != rank]
        self.numbers = numbers
        self.group = group

    def start(self, row: Sequence[float]) -> PendingSum:
        """Start to add up a row of numbers over the replicas."""
        total = torch.tensor(row, dtype=torch.float64)
        return partial(self._finish, self._start(self.numbers, total), total)

    def sum(self, row: Sequence[float]) -> list[float]:
        """The sums of a row of numbers over the replicas."""
        return self.start(row)()

    def start_sum(self, tensor: Tensor) -> Any:
        """Start to make a tensor its sum over the replicas; to be waited for with ``wait``."""
        return self._start(self._group_for(tensor), tensor)

    def wait(self, work: Any) -> Any:
        """Wait for what was started, and give what it gives; on a GPU, its stream waits."""
        start = perf_counter()
        try:
            with self.status.waiting(self.others):
                found = work.wait()
            self.control.wait_timer.seconds += perf_counter() - start
            return found
        except RuntimeError as error:
            raise ChannelError(None, str(error)) from None

    def gather(self, value: Any) -> list[Any]:
        """Every replica's value, in the order of the replicas."""
        return self.control.gather(value)

    def equalise(self, tensors: Iterable[Tensor]) -> None:
        """Give every replica the values of the first."""
        for tensor in tensors:
            broadcast_from_first([tensor], self._group_for(tensor), self.wait)

    def close(self) -> None:
        self.control.close()
        self.numbers = self.group = None

    def _group_for(self, tensor: Tensor) -> Group:
        """Weights that live on the host have their gradients there, too."""
        return self.numbers if tensor.device.type == "cpu" else self.group

    def _finish(self, work: Any, total: Tensor) -> list[float]:
        self.wait(work)
        return total.tolist()

    def _start(self, group: Group, tensor: Tensor) -> Any:
        try:
            return group.allreduce([tensor])
        except RuntimeError as error:
            raise ChannelError(None, str(error)) from None


def broadcast_from_first(tensors: Iterable[Tensor], group: Group, wait: Callable[[Any], Any] | None = None) -> None:
    """Give every process of a group the values of its first; ``wait`` waits for what was started."""
    try:
        pairs = [(tensor.detach(), tensor.detach().contiguous()) for tensor in tensors]
        for work in [group.broadcast(dense, 0) for _, dense in pairs]:
            if wait is not None:
                wait(work)
            else:
                work.wait()
        for tensor, dense in pairs:
            if dense.data_ptr() != tensor.data_ptr():
                tensor.copy_(dense)
    except RuntimeError as error:
        raise ChannelError(None, str(error)) from None
