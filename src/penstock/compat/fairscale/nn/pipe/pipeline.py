"""As in torchgpipe, but for a pipeline that is made once, for any micro-batches."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from penstock.compat.torchgpipe import pipeline as once
from penstock.compat.torchgpipe.microbatch import Batch
from penstock.compat.torchgpipe.pipeline import clock_cycles, copy, depend, wait
from penstock.compat.torchgpipe.skip.layout import SkipLayout
from penstock.compat.torchgpipe.stream import AbstractStream
from penstock.compat.torchgpipe.worker import create_workers, stop_workers

__all__ = ["Pipeline", "clock_cycles", "copy", "depend", "wait"]


class Pipeline:
    """Takes micro-batches through partitions, which are on their devices already, in threads that stay.

    ``copy_streams[j][i]`` is the stream of micro-batch i on device j, ``checkpoint_stop`` the number of micro-batches
    whose forwards run again in backward, where the partitions are in training mode.
    """

    def __init__(
        self,
        partitions: Sequence[nn.Module],
        devices: Sequence[torch.device],
        copy_streams: Sequence[Sequence[AbstractStream]],
        skip_layout: SkipLayout,
        checkpoint_stop: int,
    ) -> None:
        self.partitions, self.devices, self.copy_streams = partitions, devices, copy_streams
        self.skip_layout, self.checkpoint_stop = skip_layout, checkpoint_stop
        self.in_queues, self.out_queues = create_workers(devices)
        weakref.finalize(self, stop_workers, self.in_queues)  # in any thread: it must not wait

    def run(self, batches: list[Batch]) -> None:
        """Run all clocks, and put the outputs in the place of the micro-batches."""
        stop = self.checkpoint_stop if any(part.training for part in self.partitions) else 0
        once.Pipeline(batches, self.partitions, self.devices, self.copy_streams, self.skip_layout, stop).run_in(
            self.in_queues, self.out_queues
        )
