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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from penstock._torch import storage_id
from penstock.engine.replicas.fp32_accumulate import set_grad

__all__ = [
    "CopyEvent",
    "CopyStreams",
    "CudaCopyStreams",
    "HostBuffer",
    "HostBufferPool",
    "HostStorage",
    "HostedParameter",
    "UpdateLease",
    "grad_to_host",
    "is_plain_tensor",
    "is_stored_at",
    "same_layout",
    "set_data_and_grad",
]

CopyEvent = Any  # the end of a copy: an event, on CUDA


class CopyStreams(Protocol):
    """How bytes leave a device and come back. Tests have one that puts every copy off as long as it may."""

    bytes_out: int
    bytes_back: int

    def host(self, like: Tensor) -> Tensor:
        """Host memory for a copy of ``like``, or of its kind."""
        ...

    def out(self, source: Tensor, target: Tensor, after: CopyEvent | None = None) -> CopyEvent:
        """Start a copy to the host. ``source`` must live until its mark was waited for."""
        ...

    def back(self, source: Tensor, target: Tensor, after: CopyEvent | None = None) -> CopyEvent:
        """Start a copy to the device. ``target`` must live until its mark was waited for, or be ``abandon``ed."""
        ...

    def out_all(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> CopyEvent:
        """Like ``out`` for many pairs of source and target, with one mark."""
        ...

    def back_all(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> CopyEvent:
        """Like ``back`` for many pairs of source and target, with one mark."""
        ...

    def wait(self, mark: CopyEvent, target: Tensor | None = None) -> None:
        """Let the device do what it is given from now on, and uses ``target``, after ``mark``."""
        ...

    def finish(self, mark: CopyEvent) -> None:
        """Wait here, on the host."""
        ...

    def abandon(self, target: Tensor) -> None:
        """Let go of the target of a copy that nobody waited for."""
        ...


class CudaCopyStreams:
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

    def out(self, source: Tensor, target: Tensor, after: CopyEvent | None = None) -> CopyEvent:
        mark, size = self._copy(self._out, [(source, target)], after)
        self.bytes_out += size
        return mark

    def back(self, source: Tensor, target: Tensor, after: CopyEvent | None = None) -> CopyEvent:
        mark, size = self._copy(self._in, [(source, target)], after)
        self.bytes_back += size
        return mark

    def out_all(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> CopyEvent:
        mark, size = self._copy(self._out, pairs, None)
        self.bytes_out += size
        return mark

    def back_all(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> CopyEvent:
        mark, size = self._copy(self._in, pairs, None)
        self.bytes_back += size
        return mark

    def _copy(
        self, stream: torch.cuda.Stream, pairs: Iterable[tuple[Tensor, Tensor]], after: CopyEvent | None
    ) -> tuple[CopyEvent, int]:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None:
            stream.wait_event(after)
        size = 0
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                size += source.nbytes
        return stream.record_event(), size

    def wait(self, mark: CopyEvent, target: Tensor | None = None) -> None:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(mark)
        if target is not None:  # a stream other than the one it was allocated on, in a user's own hands
            target.record_stream(current)

    def finish(self, mark: CopyEvent) -> None:
        mark.synchronize()

    def abandon(self, target: Tensor) -> None:
        target.record_stream(self._in)


class HostBuffer:
    """Host memory, and the mark of the last copy that uses it."""

    __slots__ = ("last", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.last: CopyEvent | None = None


class HostBufferPool:
    """Buffers of powers of two bytes, as pinned memory comes, used again; all together at most ``budget`` bytes."""

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self.bytes = 0
        self._idle: defaultdict[int, list[HostBuffer]] = defaultdict(list)
        self._returned: deque[HostBuffer] = deque()
        self._lock = threading.Lock()

    def take(self, size: int, make: Callable[[int], Tensor]) -> HostBuffer | None:
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
            return HostBuffer(make(size))
        except BaseException:
            with self._lock:
                self.bytes -= size
            raise

    def give_back(self, buffer: HostBuffer) -> None:
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


# Where a parameter lives on the host, and what it is on the device.


class HostedParameter(NamedTuple):
    """A parameter, what it is on the host, and what it is on the device."""

    parameter: nn.Parameter
    host: Tensor
    there: Tensor


class HostStorage:
    """One storage with parameters: its bytes on the host, and those on the device, whose memory comes and goes."""

    __slots__ = ("host", "members", "there")

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device, copies: CopyStreams) -> None:
        storage = parameters[0].untyped_storage()
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
        self.host = copies.host(torch.empty_like(source, device="meta"))
        self.host.copy_(source)
        self.there = torch.empty_like(source, device=device)
        self.members = [HostedParameter(p, _same_view(p, self.host), _same_view(p, self.there)) for p in parameters]
        self.empty()

    def fill(self) -> None:
        self.there.untyped_storage().resize_(self.host.nbytes)

    def empty(self) -> None:
        self.there.untyped_storage().resize_(0)


class UpdateLease:
    """A parameter at home, and its gradient, on the device for an update. They start to come when it is made."""

    def __init__(self, member: HostedParameter, device: torch.device, copies: CopyStreams) -> None:
        self.copies = copies
        self.parameter, self.host, _ = member
        self.grad_host = self.parameter.grad
        self.came = [torch.empty_like(self.host, device=device)]
        pairs = [(self.host, self.came[0])]
        if self.grad_host is not None:
            if is_plain_tensor(self.grad_host):
                self.came.append(torch.empty_like(self.grad_host, device=device))
                pairs.append((self.grad_host, self.came[1]))
            else:
                self.came.append(self.grad_host.to(device))
        self.mark = copies.back_all(pairs)
        set_data_and_grad(self.parameter, *self.came)

    def end(self, grad_changed: bool = False) -> list[tuple[CopyEvent, Tensor]]:
        """The parameter is at home, and what has changed is on its way there: marks, and what must live on."""
        here, grad, host = self.parameter.data, self.parameter.grad, self.grad_host
        leaving = [(self.copies.out(here, self.host, self.mark), here)]
        if grad_changed and grad is not None and host is not None:
            leaving.append((self.copies.out(grad, host, self.mark), grad))
        set_data_and_grad(self.parameter, self.host, host)
        return leaving


def grad_to_host(grad: Tensor, copies: CopyStreams) -> Tensor:
    """A gradient, on the host."""
    return copies.host(grad).copy_(grad) if is_plain_tensor(grad) else grad.cpu()


def set_data_and_grad(parameter: nn.Parameter, data: Tensor, grad: Tensor | None = None) -> None:
    """Torch wants a gradient to be on its parameter's device when it is given, so it is taken off before."""
    parameter.grad = None
    parameter.data = data
    if grad is not None:
        set_grad(parameter, grad)


def same_layout(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def is_stored_at(parameter: Tensor, home: Tensor) -> bool:
    same = storage_id(parameter) == storage_id(home) and parameter.storage_offset() == home.storage_offset()
    return same and same_layout(parameter, home)


def is_plain_tensor(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _same_view(parameter: Tensor, memory: Tensor) -> Tensor:
    """What the parameter is of its memory, of other memory."""
    piece = torch.empty(0, dtype=parameter.dtype, device=memory.device)
    storage = memory.untyped_storage()
    return piece.set_(storage, int(parameter.storage_offset()), parameter.shape, parameter.stride())
