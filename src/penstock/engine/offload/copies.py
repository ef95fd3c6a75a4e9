"""Copies between a device and pinned host memory, beside the device's computation, and the memory they use.

    compute    ──▶ op ─▶ op ──────────────▶ op ─▶ wait ─▶ op      the stream that the stages compute on
                       └▶ copy ─┐                  ▲
    to host    ─────────────────┴─ event           │
    to device  ────────────────────────── copy ─ event

A copy starts after all work given to the compute stream before it. The host does not wait: work that must come after a
copy waits for its event, on the device.
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

CopyEvent = Any  # the end of a copy; on CUDA a torch.cuda.Event
Pairs = Iterable[tuple[Tensor, Tensor]]  # sources and targets


class CopyStreams(Protocol):
    """Copies from a device to the host and back. Tests have one that delays every copy as long as possible."""

    bytes_to_host: int
    bytes_to_device: int

    def allocate_host(self, like: Tensor) -> Tensor:
        """Host memory for a copy of ``like``."""
        ...

    def to_host(self, pairs: Pairs, after: CopyEvent | None = None) -> CopyEvent:
        """Start copies to the host. Sources must live until their event was waited for."""
        ...

    def to_device(self, pairs: Pairs, after: CopyEvent | None = None) -> CopyEvent:
        """Start copies to the device. Targets must live until their event was waited for, or be ``discard``ed."""
        ...

    def wait(self, event: CopyEvent, target: Tensor | None = None) -> None:
        """Make later work of the current stream, which uses ``target``, wait for ``event``."""
        ...

    def synchronize(self, event: CopyEvent) -> None:
        """Wait on the host."""
        ...

    def discard(self, target: Tensor) -> None:
        """Free the target of a copy whose event nobody has waited for."""
        ...


class CudaCopyStreams:
    """Two CUDA streams, one in each direction.

    Device memory comes from the compute stream's pool: it is free for that stream's next allocation as soon as the
    stream waits for the copy. So the host never waits, and peaks are the same in each step.
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
        event, size = self._copy(self._to_host, pairs, after)
        self.bytes_to_host += size
        return event

    def to_device(self, pairs: Pairs, after: CopyEvent | None = None) -> CopyEvent:
        event, size = self._copy(self._to_device, pairs, after)
        self.bytes_to_device += size
        return event

    def _copy(self, stream: torch.cuda.Stream, pairs: Pairs, after: CopyEvent | None) -> tuple[CopyEvent, int]:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None:
            stream.wait_event(after)
        size = 0
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                size += source.nbytes
        return stream.record_event(), size

    def wait(self, event: CopyEvent, target: Tensor | None = None) -> None:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        if target is not None:  # the user may be on another stream than the one it was allocated on
            target.record_stream(current)

    def synchronize(self, event: CopyEvent) -> None:
        event.synchronize()

    def discard(self, target: Tensor) -> None:
        target.record_stream(self._to_device)


class HostBuffer:
    """Host memory, and the event of the last copy that uses it."""

    __slots__ = ("last_copy", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.last_copy: CopyEvent | None = None


class HostBufferPool:
    """Reusable host buffers with sizes in powers of two, as pinned memory has; at most ``budget`` bytes in total."""

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self.bytes = 0
        self._idle: defaultdict[int, list[HostBuffer]] = defaultdict(list)
        self._released: deque[HostBuffer] = deque()
        self._lock = threading.Lock()

    def acquire(self, size: int, allocate: Callable[[int], Tensor]) -> HostBuffer | None:
        """A buffer of at least ``size`` bytes, or None where the budget has no room for it."""
        size = 1 << (size - 1).bit_length()
        with self._lock:
            while self._released:
                buffer = self._released.popleft()
                self._idle[buffer.tensor.nbytes].append(buffer)
            if self._idle[size]:
                return self._idle[size].pop()
            if self.budget is not None and not self._evict_idle(size, self.budget):
                return None
            self.bytes += size
        try:
            return HostBuffer(allocate(size))
        except BaseException:
            with self._lock:
                self.bytes -= size
            raise

    def release(self, buffer: HostBuffer) -> None:
        """May be called from any thread, and from a finalizer that interrupts ``acquire``: takes no lock."""
        self._released.append(buffer)

    def _evict_idle(self, size: int, budget: int) -> bool:
        """Free idle buffers of other sizes until ``size`` bytes fit; False if they cannot."""
        idle = sum(length * len(buffers) for length, buffers in self._idle.items())
        if self.bytes - idle + size > budget:
            return False
        for length in sorted(self._idle, reverse=True):
            while self._idle[length] and self.bytes + size > budget:
                # torch's allocator keeps pinned memory until copies that use it are done.
                self._idle[length].pop()
                self.bytes -= length
        return True


class HostedParameter(NamedTuple):
    """A parameter, and its data on the host and on the device."""

    parameter: nn.Parameter
    host: Tensor
    on_device: Tensor


class HostStorage:
    """One storage of parameters: its bytes on the host, and its bytes on the device, which are allocated and freed."""

    __slots__ = ("device_bytes", "host_bytes", "hosted")

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device, copies: CopyStreams) -> None:
        storage = parameters[0].untyped_storage()
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
        self.host_bytes = copies.allocate_host(torch.empty_like(source, device="meta"))
        self.host_bytes.copy_(source)
        self.device_bytes = torch.empty_like(source, device=device)
        self.hosted = [
            HostedParameter(p, _same_view(p, self.host_bytes), _same_view(p, self.device_bytes)) for p in parameters
        ]
        self.free()

    def allocate(self) -> None:
        self.device_bytes.untyped_storage().resize_(self.host_bytes.nbytes)

    def free(self) -> None:
        self.device_bytes.untyped_storage().resize_(0)


class UpdateLease:
    """A hosted parameter and its gradient on the device, for an update. Making the lease starts the copies."""

    def __init__(self, hosted: HostedParameter, device: torch.device, copies: CopyStreams) -> None:
        self.copies = copies
        self.parameter, self.host, _ = hosted
        self.host_grad = self.parameter.grad
        self.on_device = [torch.empty_like(self.host, device=device)]  # data, and gradient if there is one
        pairs = [(self.host, self.on_device[0])]
        if self.host_grad is not None:
            if is_plain_tensor(self.host_grad):
                self.on_device.append(torch.empty_like(self.host_grad, device=device))
                pairs.append((self.host_grad, self.on_device[1]))
            else:
                self.on_device.append(self.host_grad.to(device))
        self.event = copies.to_device(pairs)
        set_data_and_grad(self.parameter, *self.on_device)

    def end(self, grad_changed: bool = False) -> list[tuple[CopyEvent, Tensor]]:
        """Start to copy the changes to the host; return events, each with the tensor that must live until then."""
        data, grad, host_grad = self.parameter.data, self.parameter.grad, self.host_grad
        copying = [(self.copies.to_host([(data, self.host)], self.event), data)]
        if grad_changed and grad is not None and host_grad is not None:
            copying.append((self.copies.to_host([(grad, host_grad)], self.event), grad))
        set_data_and_grad(self.parameter, self.host, host_grad)
        return copying


def grad_to_host(grad: Tensor, copies: CopyStreams) -> Tensor:
    return copies.allocate_host(grad).copy_(grad) if is_plain_tensor(grad) else grad.cpu()


def set_data_and_grad(parameter: nn.Parameter, data: Tensor, grad: Tensor | None = None) -> None:
    """torch wants a gradient on its parameter's device when it is assigned, so it is removed first."""
    parameter.grad = None
    parameter.data = data
    if grad is not None:
        set_grad(parameter, grad)


def same_layout(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def is_stored_at(parameter: Tensor, host: Tensor) -> bool:
    same = storage_id(parameter) == storage_id(host) and parameter.storage_offset() == host.storage_offset()
    return same and same_layout(parameter, host)


def is_plain_tensor(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _same_view(parameter: Tensor, memory: Tensor) -> Tensor:
    """The view of ``memory`` that ``parameter`` is of its own storage."""
    view = torch.empty(0, dtype=parameter.dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), int(parameter.storage_offset()), parameter.shape, parameter.stride())
