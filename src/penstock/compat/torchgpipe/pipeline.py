"""The order in which GPipe's forwards run, clock by clock; and a pipeline of the parts in here that runs them so.

``GPipe`` runs on Penstock's own schedules. ``Pipeline`` is for programs that have their own in the place of ``GPipe``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from penstock.compat.torchgpipe.checkpoint import Checkpointing
from penstock.compat.torchgpipe.copy import Copy, Wait
from penstock.compat.torchgpipe.dependency import fork, join
from penstock.compat.torchgpipe.microbatch import Batch
from penstock.compat.torchgpipe.skip.layout import SkipLayout, inspect_skip_layout
from penstock.compat.torchgpipe.skip.tracker import SkipTrackerThroughPotals, use_skip_tracker
from penstock.compat.torchgpipe.stream import AbstractStream, current_stream, use_device
from penstock.compat.torchgpipe.worker import InQueue, OutQueue, Task, spawn_workers

__all__ = ["Pipeline", "clock_cycles", "copy", "depend", "wait"]

Clock = list[tuple[int, int]]


def clock_cycles(m: int, n: int) -> Iterator[Clock]:
    """For each clock, the (micro-batch, partition) pairs that may run at once: those that add up to it.

    m=3, n=3::

        0  (0,0)
        1  (1,0) (0,1)
        2  (2,0) (1,1) (0,2)
        3        (2,1) (1,2)
        4              (2,2)
    """
    for clock in range(m + n - 1):
        yield [(clock - j, j) for j in range(n) if 0 <= clock - j < m]


def depend(fork_from: Batch, join_to: Batch) -> None:
    """Let the backward of ``join_to`` come before that of ``fork_from``."""
    source, target = fork_from.anchor, join_to.anchor
    fork_from[source], phony = fork(fork_from[source])
    join_to[target] = join(join_to[target], phony)


def copy(batch: Batch, prev_stream: AbstractStream, next_stream: AbstractStream) -> None:
    """Move a batch to the device of ``next_stream``."""
    batch[:] = Copy.apply(prev_stream, next_stream, *batch)  # type: ignore[no-untyped-call]


def wait(batch: Batch, prev_stream: AbstractStream, next_stream: AbstractStream) -> None:
    """Let ``next_stream`` wait for what ``prev_stream`` does to a batch."""
    batch[:] = Wait.apply(prev_stream, next_stream, *batch)  # type: ignore[no-untyped-call]


class Pipeline:
    """Takes micro-batches through partitions, which are on their devices already.

        fence    depend ─ copy skips ─ copy ─┐       in this thread, on the copy streams
        compute  ┌───────────────────────────┘
                 wait ─ partition ─ wait             the partition in a worker, on its device's current stream

    ``copy_streams[j][i]`` is the stream of micro-batch i on device j, ``checkpoint_stop`` the number of micro-batches
    whose forwards run again in backward. ``run`` puts the outputs in the place of the micro-batches.
    """

    def __init__(
        self,
        batches: list[Batch],
        partitions: Sequence[nn.Module],
        devices: Sequence[torch.device] | None = None,
        copy_streams: Sequence[Sequence[AbstractStream]] | None = None,
        skip_layout: SkipLayout | None = None,
        checkpoint_stop: int = 0,
    ) -> None:
        self.batches, self.partitions = batches, partitions
        self.devices = [torch.device("cpu")] * len(partitions) if devices is None else devices
        self.copy_streams = copy_streams or [[current_stream(device)] * len(batches) for device in self.devices]
        self.skip_layout = inspect_skip_layout(partitions) if skip_layout is None else skip_layout
        self.checkpoint_stop = checkpoint_stop

    def run(self) -> None:
        """Run all clocks. An exception in a partition is raised at the end of its clock."""
        with spawn_workers(self.devices) as (in_queues, out_queues):
            self.run_in(in_queues, out_queues)

    def run_in(self, in_queues: Sequence[InQueue], out_queues: Sequence[OutQueue]) -> None:
        """The same with workers that there are."""
        skip_trackers = [SkipTrackerThroughPotals(self.skip_layout, i) for i in range(len(self.batches))]
        for schedule in clock_cycles(len(self.batches), len(self.partitions)):
            self.fence(schedule, skip_trackers)
            self.compute(schedule, skip_trackers, in_queues, out_queues)

    def fence(self, schedule: Clock, skip_trackers: Sequence[SkipTrackerThroughPotals]) -> None:
        """Move what the partitions of a clock need to their devices."""
        for i, j in schedule:
            if i != 0:
                depend(self.batches[i - 1], self.batches[i])
            stream = self.copy_streams[j][i]
            for source, ns, name in self.skip_layout.copy_policy(j):
                skip_trackers[i].copy(self.batches[i], self.copy_streams[source][i], stream, ns, name)
            if j != 0:
                copy(self.batches[i], self.copy_streams[j - 1][i], stream)

    def compute(
        self,
        schedule: Clock,
        skip_trackers: Sequence[SkipTrackerThroughPotals],
        in_queues: Sequence[InQueue],
        out_queues: Sequence[OutQueue],
    ) -> None:
        """Run the partitions of a clock, all at once."""
        streams = [current_stream(device) for device in self.devices]
        for i, j in schedule:
            if j != 0:
                wait(self.batches[i], self.copy_streams[j][i], streams[j])
            in_queues[j].put(self._task(i, j, streams[j], skip_trackers[i]))
        failure: BaseException | None = None
        for i, j in schedule:
            payload: Any
            ok, payload = out_queues[j].get()
            if failure is not None:
                continue
            if not ok:
                failure = payload[1]
                continue
            task, batch = payload
            if j != len(self.partitions) - 1:
                wait(batch, streams[j], self.copy_streams[j][i])
            with use_device(self.devices[j]):
                task.finalize(batch)
            self.batches[i] = batch
        if failure is not None:
            try:
                raise failure
            finally:
                del failure, payload  # its traceback has this frame

    def _task(self, i: int, j: int, stream: AbstractStream, skip_tracker: SkipTrackerThroughPotals) -> Task:
        batch, partition = self.batches[i], self.partitions[j]

        def run(input: Any) -> Any:
            with use_skip_tracker(skip_tracker), record_function(f"chunk{i}-part{j}"):
                return partition(input)

        if i >= self.checkpoint_stop:
            return Task(stream, compute=lambda: batch.call(run), finalize=None)
        checkpointing = Checkpointing(run, batch)
        return Task(stream, compute=checkpointing.checkpoint, finalize=checkpointing.recompute)
