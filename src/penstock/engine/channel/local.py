"""Lanes inside one process: a message is handed over, and moved if the other stage is on another device."""

from __future__ import annotations

from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from penstock.engine.channel.base import ChannelOps, WaitTimer
from penstock.engine.message import Message

__all__ = ["Cancelled", "LocalChannel", "LockstepChannel"]


class Cancelled(Exception):
    """Another rank failed: there is nothing left to wait for."""


class LocalChannel:
    """One edge in one direction. Every micro-batch has a cell of its own, so any order of taking is right."""

    def __init__(
        self, microbatches: int, src: torch.device, dst: torch.device, waited: WaitTimer | None = None
    ) -> None:
        self._waited = waited or WaitTimer()  # told how long the rank that takes has to wait
        self._cells: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(microbatches)]
        self._landed: dict[int, Any] = {}
        self._move = None if src == dst else _DeviceCopier(src, dst)
        self._cancelled = False

    def at(self, microbatch: int) -> ChannelOps:
        return ChannelOps(*(partial(call, microbatch) for call in (self.send, self.land, self.take)))

    def send(self, microbatch: int, leaves: Any) -> None:
        if self._move is not None:
            leaves = self._move(leaves)
        self._cells[microbatch].put(leaves)
        if self._cancelled:
            raise Cancelled

    def land(self, microbatch: int) -> None:
        """Wait for the message of one micro-batch."""
        message = _timed_get(self._cells[microbatch], self._waited)
        if self._cancelled:
            raise Cancelled
        if self._move is not None:
            self._move.landed(message)
        self._landed[microbatch] = message

    def take(self, microbatch: int) -> Any:
        if microbatch not in self._landed:  # sent by this rank itself
            self.land(microbatch)
        return self._landed.pop(microbatch)

    def cancel(self) -> None:
        """Wake whoever waits here, and stop whoever comes later, even for a message that is there."""
        self._cancelled = True
        for cell in self._cells:
            cell.put(None)


class LockstepChannel(LocalChannel):
    """A lane whose sender goes on when no more than ``room`` messages wait for somebody who is ready to take them."""

    def __init__(
        self,
        microbatches: int,
        src: torch.device,
        dst: torch.device,
        waited: WaitTimer,
        sender_waited: WaitTimer,
        room: int,
    ) -> None:
        super().__init__(microbatches, src, dst, waited)
        self._sender_waited = sender_waited
        self._ready: SimpleQueue[None] = SimpleQueue()
        for _ in range(room):
            self._ready.put(None)

    def at(self, microbatch: int) -> ChannelOps:
        return super().at(microbatch)._replace(taken=self.taken)

    def land(self, microbatch: int) -> None:
        self._ready.put(None)
        super().land(microbatch)

    def taken(self) -> None:
        """Wait until the sender may go on."""
        _timed_get(self._ready, self._sender_waited)
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        super().cancel()
        self._ready.put(None)


def _timed_get(queue: SimpleQueue[Any], waited: WaitTimer) -> Any:
    """What comes out of a queue. The clock is read where it has to be waited for."""
    if not queue.empty():
        return queue.get()
    start = perf_counter()
    found = queue.get()
    waited.seconds += perf_counter() - start
    return found


class _DeviceCopier:
    """Copies between devices, beside the compute of both.

    source stream   ──made──●                         the copy waits until the value is made,
    copy streams            └──copy──●                and compute on the other side until it has landed
    target stream   ───────────────  └──used──
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
                return tensor.to(self.dst)  # to the host: waits until it is there
        with torch.cuda.stream(self.streams[self.dst]), torch.cuda.stream(source):
            return tensor.to(self.dst, non_blocking=True)

    def landed(self, message: Any) -> None:
        """Make compute on the target wait for the copies of this message, and keep its memory until then."""
        if self.dst.type != "cuda":
            return
        compute = torch.cuda.current_stream(self.dst)
        for stream in self.streams.values():
            compute.wait_stream(stream)
        for leaf in message.leaves if isinstance(message, Message) else message:
            if isinstance(leaf, Tensor):
                leaf.record_stream(compute)
