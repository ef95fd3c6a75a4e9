"""Offload of the activations of micro-batches in flight: copied to the host after F, and back before B or I.

    F k      pack: each tensor that autograd saves is copied to the host, its storage once, and its device memory freed
    …        other actions of the rank
    (one action before)   prefetch(k): all copies back start, last saved first
    B k      unpack: the device waits for the copy, autograd gets the tensor with its old shape and strides

The following stay on the device: parameters, buffers and their views; the stage's inputs (the leaves of the graph keep
them, and they may belong to another stream); small tensors; tensors of other devices, layouts and classes; tensors
beyond the host budget; tensors that autograd does not save itself, such as the inputs of a non-reentrant
``torch.utils.checkpoint`` and the tensors in a weight-gradient queue. Saved memory must be allocated on the stream that
computes it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock._torch import storage_id
from penstock.engine.offload.copies import CopyEvent, CopyStreams, HostBuffer, HostBufferPool
from penstock.errors import PipelineError
from penstock.schedule.lower import Instruction
from penstock.schedule.schedule import COMPUTE

_ALIGNMENT = 512  # bytes, as in CUDA memory: torch may select kernels by alignment, with other rounding
_TENSORS = (Tensor, nn.Parameter)


def activation_offload(device: torch.device, pool: HostBufferPool, module: nn.Module) -> ActivationOffload | None:
    """The activation offload of a stage on a GPU; None on the CPU."""
    if device.type != "cuda":
        return None
    return ActivationOffload(device, CopyStreams(device), pool, [*module.parameters(), *module.buffers()])


def prefetch_points(instructions: Sequence[Instruction]) -> dict[int, list[tuple[int, int]]]:
    """By instruction of a rank's program: the (stage, micro-batch) pairs whose prefetch starts before it.

    A copy in each direction needs an action to overlap with, so a micro-batch is offloaded only if there are at least
    two actions between its forward and its backward.
    """
    points: dict[int, list[tuple[int, int]]] = {}
    actions = [at for at, i in enumerate(instructions) if i.kind in COMPUTE]
    forwards: dict[tuple[int, int], int] = {}
    for number, at in enumerate(actions):
        kind, stage, k, _ = instructions[at]
        if kind == "F":
            forwards[stage, k] = number
        elif kind == "R":  # the forward saved no tensors, and the next action needs those of the recompute
            forwards.pop((stage, k), None)
        elif kind in "BI" and number - forwards.get((stage, k), number) > 2:
            points.setdefault(actions[number - 1], []).append((stage, k))
    return points


class ActivationOffload:
    """Keeps the activations of one stage on the host between its forwards and its backwards.

    Tensors below ``smallest`` bytes stay on the device. ``window`` limits the device memory of copies in progress:
    beyond it, the next work of the stage waits for the oldest copy.
    """

    def __init__(
        self,
        device: torch.device,
        copies: CopyStreams,
        pool: HostBufferPool,
        resident: Iterable[Tensor] = (),
        *,
        smallest: int = 1 << 18,
        window: int = 1 << 27,
    ) -> None:
        self.device = device
        self.copies = copies
        self.pool = pool
        self.resident = list(resident)
        self.smallest = smallest
        self.window = window
        self._offloaded: dict[Hashable, list[weakref.ref[_HostBytes]]] = {}
        self._copying: deque[tuple[CopyEvent, Tensor]] = deque()
        self._copying_bytes = 0

    def saving(self, key: Hashable, inputs: Iterable[Any] = ()) -> saved_tensors_hooks:
        """A context for a stage's forward on ``inputs``: offloads the tensors that autograd saves, under ``key``."""
        offloaded = self._offloaded[key] = []
        resident = [t for t in (*self.resident, *inputs) if type(t) in _TENSORS and t.layout is torch.strided]
        hook = PackHook(self, offloaded, set(map(storage_id, resident)))
        return saved_tensors_hooks(hook, lambda packed: packed.get())

    def prefetch(self, key: Hashable) -> None:
        """Start to copy back the tensors that were offloaded under ``key`` and that the graph still needs."""
        self._free_copied(0)
        for reference in reversed(self._offloaded.pop(key, ())):
            host_bytes = reference()
            if host_bytes is not None:
                host_bytes.fetch()

    def copy_to_host(self, content: Tensor) -> _HostBytes | None:
        """Start to copy bytes to the host; None if they exceed the budget."""
        size = content.nbytes
        buffer = self.pool.acquire(
            size, lambda n: self.copies.allocate_host(torch.empty(n, dtype=torch.uint8, device="meta"))
        )
        if buffer is None:
            return None
        self._free_copied(max(0, self.window - size))
        buffer.last_copy = self.copies.to_host([(content, buffer.tensor[:size])], buffer.last_copy)
        self._copying.append((buffer.last_copy, content))
        self._copying_bytes += size
        return _HostBytes(self, buffer, size)

    def _free_copied(self, limit: int) -> None:
        """Free device memory that was copied to the host, until copies hold at most ``limit`` bytes."""
        while self._copying and self._copying_bytes > limit:
            event, content = self._copying.popleft()
            self._copying_bytes -= content.nbytes
            self.copies.wait(event)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _HostBytes:
    """Bytes of one storage on the host, and on the device after ``fetch``.

    It exists as long as autograd keeps a tensor packed in it. Then its buffer is released.
    """

    offload: ActivationOffload
    buffer: HostBuffer
    size: int
    _fetched: Tensor | None = None
    _event: CopyEvent | None = None
    _waited: bool = False

    def fetch(self) -> Tensor:
        if self._fetched is None:
            target = torch.empty(self.size, dtype=torch.uint8, device=self.offload.device)
            buffer, pairs = self.buffer, [(self.buffer.tensor[: self.size], target)]
            self._event = buffer.last_copy = self.offload.copies.to_device(pairs, buffer.last_copy)
            self._fetched = target
        return self._fetched

    def get(self) -> Tensor:
        fetched = self.fetch()
        self.offload.copies.wait(self._event, fetched)
        self._waited = True
        return fetched

    def __del__(self) -> None:
        if self._fetched is not None and not self._waited:
            self.offload.copies.discard(self._fetched)
        self.offload.pool.release(self.buffer)


@dataclass(eq=False)
class PackHook:
    """The pack hook of one forward: returns a ``_SavedTensor`` on the host or on the device.

    Its references are weak: every node of the graph keeps this hook, and must not keep the bytes of other nodes.
    """

    offload: ActivationOffload
    offloaded: list[weakref.ref[_HostBytes]]
    resident: set[int]  # identities of storages
    known: dict[tuple[int, ...], tuple[weakref.ref[Tensor], weakref.ref[_HostBytes]]] = field(default_factory=dict)

    def __call__(self, tensor: Tensor) -> _SavedTensor:
        if (
            type(tensor) not in _TENSORS
            or tensor.layout is not torch.strided
            or tensor.device != self.offload.device
            or tensor.nbytes < max(1, self.offload.smallest)
            or tensor.is_conj()
            or tensor.is_neg()
            or storage_id(tensor) in self.resident
        ):
            return _SavedTensor(tensor)
        storage = tensor.untyped_storage()
        width = tensor.itemsize
        start = int(tensor.storage_offset()) * width
        length = width + width * sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        begin, end = 0, storage.nbytes()
        if end > 4 * length:  # copy only a small part of a large storage; otherwise all views share one copy
            begin, end = start - start % _ALIGNMENT, start + length
        # Tensors with one base share a version counter, tensors with one storage may not: two parts of a storage may
        # have separate counters, and the same version although one of them is not yet written.
        base = tensor if tensor._base is None else tensor._base
        key = id(base), tensor._version, storage.data_ptr(), begin, end
        known = self.known.get(key)
        host_bytes = known[1]() if known is not None and known[0]() is base else None
        if host_bytes is None:
            content = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            host_bytes = self.offload.copy_to_host(content.set_(storage, begin, (end - begin,), (1,)))
            if host_bytes is None:
                return _SavedTensor(tensor)
            self.known[key] = weakref.ref(base), weakref.ref(host_bytes)
            self.offloaded.append(weakref.ref(host_bytes))
        return _SavedTensor(tensor, host_bytes, (start - begin) // width)


class _SavedTensor:
    """A saved tensor as a view of bytes on the host, or, without ``host_bytes``, on the device.

    ``stamp`` has the tensor's version counter, because autograd checks only the versions of tensors that it saves
    itself. It is detached: a node that references its own output is never freed. With ``host_bytes`` it has no memory.
    """

    __slots__ = ("host_bytes", "shape", "stamp", "version", "view")

    def __init__(self, tensor: Tensor, host_bytes: _HostBytes | None = None, offset: int = 0) -> None:
        self.stamp = tensor.detach()
        self.version = tensor._version
        self.shape = tuple(tensor.shape)
        self.host_bytes = host_bytes
        if host_bytes is not None:
            self.view = offset, self.shape, tensor.stride()
            self.stamp.data = tensor.new_empty(0)

    def get(self) -> Tensor:
        stamp = self.stamp
        if stamp._version != self.version:
            raise PipelineError(
                f"a {stamp.dtype} tensor of shape {self.shape} that the backward needs was modified by an inplace "
                f"operation after the forward saved it: it is at version {stamp._version}, saved at version "
                f"{self.version}. Change a copy instead (x.clone())"
            )
        if self.host_bytes is None:
            return stamp
        storage = self.host_bytes.get().untyped_storage()
        return torch.empty(0, dtype=stamp.dtype, device=storage.device).set_(storage, *self.view)
