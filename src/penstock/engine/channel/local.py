"""Channels within one process: queues, with a copy where the other stage is on another device."""

from __future__ import annotations

from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from penstock.engine.channel.base import ChannelOps, WaitTimer
from penstock.engine.message import Message


class Cancelled(Exception):
    """Raised in a rank's thread when another rank has failed."""


class LocalChannel:
    """One edge in one direction. Each micro-batch has its own queue, so messages may be received in any order."""

    def __init__(
        self, microbatches: int, src: torch.device, dst: torch.device, wait_timer: WaitTimer | None = None
    ) -> None:
        self._wait_timer = wait_timer or WaitTimer()  # of the receiving rank
        self._queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(microbatches)]
        self._received: dict[int, Any] = {}
        self._copier = None if src == dst else _DeviceCopier(src, dst)
        self._cancelled = False

    def ops(self, microbatch: int) -> ChannelOps:
        return ChannelOps(*(partial(method, microbatch) for method in (self.send, self.wait_recv, self.get)))

    def send(self, microbatch: int, leaves: Any) -> None:
        if self._copier is not None:
            leaves = self._copier(leaves)
        self._queues[microbatch].put(leaves)
        if self._cancelled:
            raise Cancelled

    def wait_recv(self, microbatch: int) -> None:
        message = _timed_get(self._queues[microbatch], self._wait_timer)
        if self._cancelled:
            raise Cancelled
        if self._copier is not None:
            self._copier.wait_copies(message)
        self._received[microbatch] = message

    def get(self, microbatch: int) -> Any:
        if microbatch not in self._received:  # sent by this rank itself
            self.wait_recv(microbatch)
        return self._received.pop(microbatch)

    def close(self) -> None:
        self._received.clear()

    def cancel(self) -> None:
        """Raise ``Cancelled`` in every thread that waits here, and in every later call."""
        self._cancelled = True
        for queue in self._queues:
            queue.put(None)


class LockstepChannel(LocalChannel):
    """A channel whose sender waits until the receiver has requested all but ``room`` of its messages."""

    def __init__(self, *args: Any, sender_wait_timer: WaitTimer, room: int) -> None:
        super().__init__(*args)
        self._sender_wait_timer = sender_wait_timer
        self._ready: SimpleQueue[None] = SimpleQueue()
        for _ in range(room):
            self._ready.put(None)

    def ops(self, microbatch: int) -> ChannelOps:
        return super().ops(microbatch)._replace(wait_taken=self.wait_taken)

    def wait_recv(self, microbatch: int) -> None:
        self._ready.put(None)
        super().wait_recv(microbatch)

    def wait_taken(self) -> None:
        _timed_get(self._ready, self._sender_wait_timer)
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        super().cancel()
        self._ready.put(None)


def _timed_get(queue: SimpleQueue[Any], wait_timer: WaitTimer) -> Any:
    """The next item of a queue. The time is measured only if the queue is empty."""
    if not queue.empty():
        return queue.get()
    start = perf_counter()
    item = queue.get()
    wait_timer.seconds += perf_counter() - start
    return item


class _DeviceCopier:
    """Copies messages between devices, on separate streams.

    source stream   ─compute─●                        the copy waits for the value,
    copy streams             └──copy──●               and the target's compute stream waits for the copy
    target stream   ────────────────  └─compute─
    """

    def __init__(self, src: torch.device, dst: torch.device) -> None:
        self.src, self.dst = src, dst
        self.streams = {d: torch.cuda.Stream(d) for d in (src, dst) if d.type == "cuda"}  # type: ignore[no-untyped-call]

    def __call__(self, message: Any) -> Any:
        if isinstance(message, Message):
            return message._replace(leaves=self(message.leaves))
        return [self._copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in message]

    def _copy(self, tensor: Tensor) -> Tensor:
        if self.src.type != "cuda":
            return tensor.to(self.dst)
        source = self.streams[self.src]
        source.wait_stream(torch.cuda.current_stream(self.src))
        tensor.record_stream(source)
        if self.dst.type != "cuda":
            with torch.cuda.stream(source):
                return tensor.to(self.dst)  # to the host: blocks until the copy is complete
        with torch.cuda.stream(self.streams[self.dst]), torch.cuda.stream(source):
            return tensor.to(self.dst, non_blocking=True)

    def wait_copies(self, message: Any) -> None:
        """Make the target's compute stream wait for the copies of this message, and keep their memory until then."""
        if self.dst.type != "cuda":
            return
        compute = torch.cuda.current_stream(self.dst)
        for stream in self.streams.values():
            compute.wait_stream(stream)
        for leaf in message.leaves if isinstance(message, Message) else message:
            if isinstance(leaf, Tensor):
                leaf.record_stream(compute)
