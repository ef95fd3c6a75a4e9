"""Copies between a device and pinned memory of the host, beside the device's work, and the buffers they use.

    compute ──▶ op ─▶ op ──────────────▶ op ─▶ wait ─▶ op        the stream that the stages compute on
                    └▶ copy out ─┐                  ▲
    out     ─────────────────────┴─ mark            │            device to host
    in      ─────────────────────────── copy in ─ mark           host to device

A copy starts after all that was given to the compute stream before it. Nobody waits on the host: what must come after
a copy waits for its mark, on the device.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Buffer", "Copies", "CudaCopies", "HostPool", "Mark"]

Mark = Any  # the end of a copy: an event, on CUDA


class Copies(Protocol):
    """How bytes leave a device and come back. Tests have one that puts every copy off as long as it may."""

    bytes_out: int
    bytes_back: int

    def host(self, like: Tensor) -> Tensor:
        """Host memory for a copy of ``like``, or of its kind."""
        ...

    def out(self, source: Tensor, target: Tensor, after: Mark | None = None) -> Mark:
        """Start a copy to the host. ``source`` must live until its mark was waited for."""
        ...

    def back(self, source: Tensor, target: Tensor, after: Mark | None = None) -> Mark:
        """Start a copy to the device. ``target`` must live until its mark was waited for, or be ``abandon``ed."""
        ...

    def out_all(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Mark:
        """Like ``out`` for many pairs of source and target, with one mark."""
        ...

    def back_all(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Mark:
        """Like ``back`` for many pairs of source and target, with one mark."""
        ...

    def wait(self, mark: Mark, target: Tensor | None = None) -> None:
        """Let the device do what it is given from now on, and uses ``target``, after ``mark``."""
        ...

    def finish(self, mark: Mark) -> None:
        """Wait here, on the host."""
        ...

    def abandon(self, target: Tensor) -> None:
        """Let go of the target of a copy that nobody waited for."""
        ...


class CudaCopies:
    """Two streams of one GPU. Device memory is taken from the compute stream's pool, so it is free for the compute
    stream's next allocation as soon as that stream waits for the copy: no host waits, and peaks are the same each time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_out = self.bytes_back = 0
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host(self, like: Tensor) -> Tensor:
        layout = torch.empty_like(like, device="meta")  # dense, in the order of ``like``
        return torch.empty_strided(layout.shape, layout.stride(), dtype=like.dtype, device="cpu", pin_memory=True)

    def out(self, source: Tensor, target: Tensor, after: Mark | None = None) -> Mark:
        mark, size = self._copy(self._out, [(source, target)], after)
        self.bytes_out += size
        return mark

    def back(self, source: Tensor, target: Tensor, after: Mark | None = None) -> Mark:
        mark, size = self._copy(self._in, [(source, target)], after)
        self.bytes_back += size
        return mark

    def out_all(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Mark:
        mark, size = self._copy(self._out, pairs, None)
        self.bytes_out += size
        return mark

    def back_all(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Mark:
        mark, size = self._copy(self._in, pairs, None)
        self.bytes_back += size
        return mark

    def _copy(
        self, stream: torch.cuda.Stream, pairs: Iterable[tuple[Tensor, Tensor]], after: Mark | None
    ) -> tuple[Mark, int]:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None:
            stream.wait_event(after)
        size = 0
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                size += source.nbytes
        return stream.record_event(), size

    def wait(self, mark: Mark, target: Tensor | None = None) -> None:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(mark)
        if target is not None:  # a stream other than the one it was allocated on, in a user's own hands
            target.record_stream(current)

    def finish(self, mark: Mark) -> None:
        mark.synchronize()

    def abandon(self, target: Tensor) -> None:
        target.record_stream(self._in)


class Buffer:
    """Host memory, and the mark of the last copy that uses it."""

    __slots__ = ("last", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.last: Mark | None = None


class HostPool:
    """Buffers of powers of two bytes, as pinned memory comes, used again; all together at most ``budget`` bytes."""

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self.bytes = 0
        self._idle: defaultdict[int, list[Buffer]] = defaultdict(list)
        self._returned: deque[Buffer] = deque()
        self._lock = threading.Lock()

    def take(self, size: int, make: Callable[[int], Tensor]) -> Buffer | None:
        """A buffer for ``size`` bytes, or None where the budget has no room for it."""
        size = 1 << (size - 1).bit_length()
        with self._lock:
            while self._returned:
                buffer = self._returned.popleft()
                self._idle[buffer.tensor.nbytes].append(buffer)
            if self._idle[size]:
                return self._idle[size].pop()
            if self.budget is not None and not self._make_room(size, self.budget):
                return None
            self.bytes += size
        try:
            return Buffer(make(size))
        except BaseException:
            with self._lock:
                self.bytes -= size
            raise

    def give_back(self, buffer: Buffer) -> None:
        """For any thread, and for a finalizer that interrupts ``take``: no lock."""
        self._returned.append(buffer)

    def _make_room(self, size: int, budget: int) -> bool:
        """Let go of idle buffers of other sizes, if that is enough."""
        idle = sum(length * len(buffers) for length, buffers in self._idle.items())
        if self.bytes - idle + size > budget:
            return False
        for length in sorted(self._idle, reverse=True):
            while self._idle[length] and self.bytes + size > budget:
                # Pinned memory under a running copy is torch's to keep: its allocator has the copy's event.
                self._idle[length].pop()
                self.bytes -= length
        return True
