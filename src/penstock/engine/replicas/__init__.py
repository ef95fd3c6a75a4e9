"""The replicas of a pipeline: the same stages in other processes, on other samples of the mini-batch.

replica 0   stage 0 ── stage 1 ── stage 2        samples 0 … 7
               ┆          ┆          ┆           gradients are summed over the ranks with the same stage,
replica 1   stage 0 ── stage 1 ── stage 2        losses are weighted by the whole mini-batch
                                                 samples 8 … 12
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from penstock.engine.channel.base import ChannelError, Group, WaitTimer
from penstock.engine.channel.control import ControlChannel
from penstock.engine.failure.status import RankStatus

PendingSum = Callable[[], list[float]]  # waits for the sums, and returns them


class ReplicaGroup:
    """The ranks with the same stages, one in each replica. All of them make the same calls in the same order."""

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        cpu_group: Group,
        group: Group,
        status: RankStatus,
        wait_timer: WaitTimer,
    ) -> None:
        """``ranks`` are world ranks; ``cpu_group`` is for numbers and host tensors, ``group`` for the device's."""
        self.count = len(ranks)
        self.control = ControlChannel(cpu_group, ranks, status, wait_timer)
        self.others = [r for r in ranks if r != rank]
        self.cpu_group = cpu_group
        self.group = group

    def start_sum(self, numbers: Sequence[float]) -> PendingSum:
        """Start to sum each of ``numbers`` over the replicas."""
        total = torch.tensor(numbers, dtype=torch.float64)
        # No closure: the frames of an error would keep it, and the connection with it.
        return partial(self._wait_sum, self.start_allreduce(total), total)

    def _wait_sum(self, work: Any, total: Tensor) -> list[float]:
        self.wait(work)
        return total.tolist()

    def sum(self, numbers: Sequence[float]) -> list[float]:
        return self.start_sum(numbers)()

    def start_allreduce(self, tensor: Tensor) -> Any:
        """Start to replace a tensor by its sum over the replicas. Pass the result to ``wait``."""
        with channel_errors():
            return self._group_for(tensor).allreduce([tensor])

    def wait(self, work: Any) -> Any:
        """Wait for a collective and return its result. On a GPU the current stream waits."""
        start = perf_counter()
        with channel_errors(), self.control.status.waiting(self.others):
            result = work.wait()
        self.control.wait_timer.seconds += perf_counter() - start
        return result

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast the first replica's values to all replicas."""
        for tensor in tensors:
            broadcast_from_first([tensor], self._group_for(tensor), self.wait)

    def close(self) -> None:
        self.control.close()
        self.cpu_group = self.group = None

    def _group_for(self, tensor: Tensor) -> Group:
        return self.cpu_group if tensor.device.type == "cpu" else self.group


def broadcast_from_first(
    tensors: Iterable[Tensor], group: Group, wait: Callable[[Any], Any] = lambda work: work.wait()
) -> None:
    """Broadcast the values of the first process of a group to all of its processes."""
    with channel_errors():
        pairs = [(tensor.detach(), tensor.detach().contiguous()) for tensor in tensors]
        for work in [group.broadcast(dense, 0) for _, dense in pairs]:
            wait(work)
        for tensor, dense in pairs:
            if dense.data_ptr() != tensor.data_ptr():
                tensor.copy_(dense)


@contextmanager
def channel_errors(peer: int | None = None) -> Iterator[None]:
    """Raise errors of collectives as errors of a channel, with ``peer`` if it is known."""
    try:
        yield
    except RuntimeError as error:
        raise ChannelError(peer, str(error)) from None
