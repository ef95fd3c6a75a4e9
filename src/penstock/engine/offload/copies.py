"""Copies between a device and pinned host memory that overlap with computation, and pools of host memory.

    compute    ──▶ op ─▶ op ──────────────▶ op ─▶ wait ─▶ op      the stream that the stages compute on
                       └▶ copy ─┐                  ▲
    to host    ─────────────────┴─ event           │
    to device  ────────────────────────── copy ─ event

A copy starts after all earlier work of the compute stream. The host does not wait: later work of a stream that needs
the copy waits for its event, on the device.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CopyEvent = Any  # recorded after a copy; on CUDA a torch.cuda.Event
Pairs = Sequence[tuple[Tensor, Tensor]]  # sources and targets


class CopyStreams:
    """Copies from a CUDA device to the host and back, on one stream per direction.

    Device memory is allocated from the compute stream's pool: the stream can reuse it as soon as it waits for the copy.
    So the host never waits, and peak memory is the same in each step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_to_host = self.bytes_to_device = 0
        self._to_host = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._to_device = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def allocate_host(self, like: Tensor) -> Tensor:
        layout = torch.empty_like(like, device="meta")  # dense, with the dimension order of ``like``
        return torch.empty_strided(layout.shape, layout.stride(), dtype=like.dtype, device="cpu", pin_memory=True)

    def to_host(self, pairs: Pairs, after: CopyEvent | None = None) -> CopyEvent:
        """Start copies to the host. Keep the sources until ``wait`` was called for the event."""
        self.bytes_to_host += sum(source.nbytes for source, _ in pairs)
        return self._copy(self._to_host, pairs, after)

    def to_device(self, pairs: Pairs, after: CopyEvent | None = None) -> CopyEvent:
        """Start copies to the device. Keep the targets until ``wait`` was called for the event, or ``discard`` them."""
        self.bytes_to_device += sum(source.nbytes for source, _ in pairs)
        return self._copy(self._to_device, pairs, after)

    def _copy(self, stream: torch.cuda.Stream, pairs: Pairs, after: CopyEvent | None) -> CopyEvent:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, event: CopyEvent, target: Tensor | None = None) -> None:
        """Make later work of the current stream wait for ``event``; ``target`` is used by that work."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        if target is not None:  # the current stream may differ from the stream that allocated the target
            target.record_stream(current)

    def synchronize(self, event: CopyEvent) -> None:
        """Make the host wait for ``event``."""
        event.synchronize()

    def discard(self, target: Tensor) -> None:
        """Free the target of a copy for whose event no stream has waited."""
        target.record_stream(self._to_device)


@dataclass(slots=True, eq=False)
class HostBuffer:
    """Host memory, and the event of the last copy that uses it."""

    tensor: Tensor
    last_copy: CopyEvent | None = None


class HostBufferPool:
    """Reusable host buffers; sizes are powers of two, as in torch's pinned memory, and ``budget`` bytes in total."""

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self.bytes = 0
        self._idle: defaultdict[int, list[HostBuffer]] = defaultdict(list)
        self._released: deque[HostBuffer] = deque()
        self._lock = threading.Lock()

    def acquire(self, size: int, allocate: Callable[[int], Tensor]) -> HostBuffer | None:
        """A buffer of at least ``size`` bytes; None if it would exceed the budget."""
        size = 1 << (size - 1).bit_length()
        with self._lock:
            while self._released:
                buffer = self._released.popleft()
                self._idle[buffer.tensor.nbytes].append(buffer)
            if self._idle[size]:
                return self._idle[size].pop()
            if self.budget is not None:  # free idle buffers of other sizes until the new one fits
                idle = sum(length * len(buffers) for length, buffers in self._idle.items())
                if self.bytes - idle + size > self.budget:
                    return None
                for length in sorted(self._idle, reverse=True):
                    while self._idle[length] and self.bytes + size > self.budget:
                        # torch's allocator keeps pinned memory until copies that use it are done.
                        self._idle[length].pop()
                        self.bytes -= length
            buffer = HostBuffer(allocate(size))
            self.bytes += size
            return buffer

    def release(self, buffer: HostBuffer) -> None:
        """Return a buffer to the pool. Takes no lock, because a finalizer may call it during ``acquire``."""
        self._released.append(buffer)
