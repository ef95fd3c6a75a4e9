"""Copies that run as late as possible: a stand-in for CUDA streams on the CPU, which reveals missing waits."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.engine.offload.copies import CopyStreams

__all__ = ["LateCopies"]

Event = tuple["LateCopies", int, int]  # owner, stream, number of the copy on the stream


def _no_value(tensor: Tensor) -> float:
    return float("nan") if tensor.is_floating_point() or tensor.is_complex() else 85


class LateCopies(CopyStreams):
    """Queues every copy until its event, or the event of a later copy, is waited for.

    A queued copy holds neither its source nor its target: memory that is freed before the copy was waited for fails an
    assertion. The host sees a copy after ``synchronize``; a later copy to the device sees it, too.
    """

    def __init__(self) -> None:
        self.bytes_to_host = self.bytes_to_device = 0
        self.log: list[str] = []
        self.queues: tuple[list[tuple[object, ...]], ...] = ([], [])
        self.done = [0, 0]
        self.made = 0
        self.most_on_device = 0  # largest number of bytes of copies on the device at a time
        self._discarded: list[Tensor] = []
        self._unseen: list[tuple[int, Tensor, Tensor]] = []  # number of the copy out, its target, its value
        _all.add(self)
        self._targets: list[weakref.ref[Tensor]] = []

    def allocate_host(self, like: Tensor) -> Tensor:
        self.made += 1
        tensor = torch.empty_like(like, device="cpu")
        return tensor.fill_(_no_value(tensor))

    def to_host(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Event | None = None) -> Event:
        event = self, 0, 0
        for source, target in pairs:
            self.bytes_to_host += source.nbytes
            self.log.append("to host")
            event = self._add(0, weakref.ref(source), target, after)
        return event

    def to_device(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Event | None = None) -> Event:
        event = self, 1, 0
        for source, target in pairs:
            self.bytes_to_device += source.nbytes
            self.log.append("to device")
            target.fill_(_no_value(target))
            self._targets.append(weakref.ref(target))
            alive = [t for t in (reference() for reference in self._targets) if t is not None]
            self.most_on_device = max(self.most_on_device, sum(t.nbytes for t in alive))
            event = self._add(1, source, weakref.ref(target), after)
        return event

    def _add(self, stream: int, source: object, target: object, after: Event | None) -> Event:
        self.queues[stream].append((source, target, after))
        return self, stream, len(self.queues[stream])

    def wait(self, event: Event, target: Tensor | None = None) -> None:
        self.log.append("wait")
        self._run(event)

    def synchronize(self, event: Event) -> None:
        self.log.append("synchronize")
        self._run(event)
        owner, stream, end = event
        if stream == 0:
            owner._show(end)

    def discard(self, target: Tensor) -> None:
        self.log.append("discard")
        self._discarded.append(target)

    def _run(self, event: Event) -> None:
        owner, stream, end = event
        if owner is not self:
            owner._run(event)
            return
        while self.done[stream] < end:
            number = self.done[stream]
            source, target, after = self.queues[stream][number]
            self.done[stream] += 1
            if after is not None:
                assert isinstance(after, tuple)
                self._run(after)
            source = source() if isinstance(source, weakref.ref) else source
            target = target() if isinstance(target, weakref.ref) else target
            assert isinstance(source, Tensor), "device memory was freed before it was copied to the host"
            assert isinstance(target, Tensor), "device memory was freed before the copy to it was done"
            for memory in (source, target):
                assert memory.untyped_storage().nbytes() >= memory.nbytes, "its memory was freed before the copy"
            for copies in list(_all):  # earlier copies to the same host memory, of any owner
                copies._show(memory=_storage(target if stream == 0 else source))
            if stream == 0:
                with _lock:
                    self._unseen.append((number, target, source.detach().clone()))
            else:
                _write(target, source)
            self.queues[stream][number] = ()

    def _show(self, end: int = 0, memory: int | None = None) -> None:
        """Make copies to the host visible: those before number ``end`` and those to ``memory``."""
        with _lock:  # every stage has its own LateCopies and its own thread
            left = []
            for number, target, value in self._unseen:
                if number < end or _storage(target) == memory:
                    _write(target, value)
                else:
                    left.append((number, target, value))
            self._unseen = left


_all: weakref.WeakSet[LateCopies] = weakref.WeakSet()
_lock = threading.Lock()


def _write(target: Tensor, value: Tensor) -> None:
    # A copy on a CUDA stream changes version counters when it is enqueued, not when it is done.
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(target):
        target.copy_(value)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
