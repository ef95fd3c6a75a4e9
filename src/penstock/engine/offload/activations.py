"""Activations of waiting micro-batches, kept on the host: out after F, back before B or I.

    F k      pack: each tensor that autograd saves is copied out, its storage once, and its device memory let go
    …        other actions of the rank
    (one action before)   prefetch(k): all of it starts on its way back, last saved first
    B k      unpack: the device waits for the copy, autograd gets the tensor with its old shape and strides

What stays on the device: parameters, buffers and their views; the stage's own inputs (their leaves hold them, and they
may come from another stream); small tensors; tensors of other devices, layouts and classes; what the budget has no
room for; what autograd does not save itself: inputs of a ``torch.utils.checkpoint`` without reentry, and what a
weight-gradient queue holds between I and W. Saved memory is taken to be allocated on the stream it is computed on.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock._torch import storage_id
from penstock.engine.offload.copies import CopyEvent, CopyStreams, CudaCopyStreams, HostBufferPool
from penstock.errors import PipelineError
from penstock.schedule.lower import Instruction

__all__ = ["ActivationOffload", "PackHook", "activation_offload", "prefetch_points"]

_ALIGNED = 512  # bytes, as CUDA memory is: a kernel may be chosen by alignment, and another one rounds otherwise
_COMPUTE = frozenset("FRBIW")
_KINDS = (Tensor, nn.Parameter)


def activation_offload(device: torch.device, pool: HostBufferPool, module: nn.Module) -> ActivationOffload | None:
    """For a stage on a GPU; None on the CPU, where memory is the host's already."""
    if device.type != "cuda":
        return None
    return ActivationOffload(device, CudaCopyStreams(device), pool, [*module.parameters(), *module.buffers()])


def prefetch_points(instructions: Sequence[Instruction]) -> dict[int, list[tuple[int, int]]]:
    """Which (stage, micro-batch) pairs start on their way back before which instruction of a rank's program.

    A copy needs an action to hide behind on each way, so a micro-batch goes out only if at least two actions lie
    between its forward and its backward. All the others stay on the device.
    """
    before: dict[int, list[tuple[int, int]]] = {}
    actions = [at for at, i in enumerate(instructions) if i.kind in _COMPUTE]
    begun: dict[tuple[int, int], int] = {}
    for number, at in enumerate(actions):
        kind, stage, k, _ = instructions[at]
        if kind == "F":
            begun[stage, k] = number
        elif kind == "R":  # its forward saved nothing, and what it saves now is needed next
            begun.pop((stage, k), None)
        elif kind in "BI" and number - begun.get((stage, k), number) > 2:
            before.setdefault(actions[number - 1], []).append((stage, k))
    return before


class ActivationOffload:
    """What one stage keeps on the host between its forwards and its backwards.

    ``smallest`` is the size in bytes under which a copy is not worth its launch; ``window`` limits how much device
    memory copies under way hold: beyond it the stage's next work waits for the oldest of them.
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
        self._gone: dict[Hashable, list[weakref.ref[_HostBytes]]] = {}
        self._leaving: deque[tuple[CopyEvent, Tensor]] = deque()
        self._leaving_bytes = 0

    def saving(self, key: Hashable, inputs: Iterable[Any] = ()) -> saved_tensors_hooks:
        """Around a stage's forward on ``inputs``: what it saves is packed under ``key``."""
        gone = self._gone[key] = []
        held = {storage_id(t) for t in (*self.resident, *inputs) if type(t) in _KINDS and t.layout is torch.strided}
        return saved_tensors_hooks(PackHook(self, gone, held), _unpack)

    def prefetch(self, key: Hashable) -> None:
        """Start all that was packed under ``key`` and still lives on its way back."""
        self._settle(0)
        for reference in reversed(self._gone.pop(key, ())):
            stowed = reference()
            if stowed is not None:
                stowed.fetch()

    def _stow(self, content: Tensor) -> _HostBytes | None:
        size = content.nbytes
        buffer = self.pool.take(size, self._make)
        if buffer is None:
            return None
        self._settle(max(0, self.window - size))
        buffer.last = self.copies.out(content, buffer.tensor[:size], buffer.last)
        self._leaving.append((buffer.last, content))
        self._leaving_bytes += size
        return _HostBytes(self, buffer, size)

    def _settle(self, most: int) -> None:
        """Let go of device memory that is copied out, but for ``most`` bytes, once its copies are done."""
        while self._leaving and self._leaving_bytes > most:
            mark, content = self._leaving.popleft()
            self._leaving_bytes -= content.nbytes
            self.copies.wait(mark)

    def _make(self, size: int) -> Tensor:
        return self.copies.host(torch.empty(size, dtype=torch.uint8, device="meta"))


class _HostBytes:
    """Bytes of one storage, on the host, and again on the device from the first time they are asked for.

    It lives as long as autograd holds what was packed; then its buffer is free for others.
    """

    __slots__ = ("__weakref__", "_here", "_mark", "_waited", "buffer", "owner", "size")

    def __init__(self, owner: ActivationOffload, buffer: Any, size: int) -> None:
        self.owner = owner
        self.buffer = buffer
        self.size = size
        self._here: Tensor | None = None
        self._mark: CopyEvent | None = None
        self._waited = False

    def fetch(self) -> Tensor:
        if self._here is None:
            here = torch.empty(self.size, dtype=torch.uint8, device=self.owner.device)
            copies, buffer = self.owner.copies, self.buffer
            self._mark = buffer.last = copies.back(buffer.tensor[: self.size], here, buffer.last)
            self._here = here
        return self._here

    def get(self) -> Tensor:
        here = self.fetch()
        self.owner.copies.wait(self._mark, here)
        self._waited = True
        return here

    def __del__(self) -> None:
        if self._here is not None and not self._waited:
            self.owner.copies.abandon(self._here)
        self.owner.pool.give_back(self.buffer)


class PackHook:
    """The pack hook of one forward: a tensor becomes a ``_Packed`` on the host, or a ``_Kept`` on the device."""

    def __init__(self, owner: ActivationOffload, gone: list[weakref.ref[_HostBytes]], held: set[int]) -> None:
        self.owner = owner
        self.gone = gone
        self.held = held
        # Weak: every node of the graph holds this hook, and must not hold the others' bytes with it.
        self.known: dict[tuple[int, ...], tuple[weakref.ref[Tensor], weakref.ref[_HostBytes]]] = {}

    def __call__(self, tensor: Tensor) -> _OffloadedTensor | _ResidentTensor:
        if not self._may_go(tensor):
            return _ResidentTensor(tensor)
        storage = tensor.untyped_storage()
        width = tensor.itemsize
        start = int(tensor.storage_offset()) * width
        length = width + width * sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        begin, end = 0, storage.nbytes()
        if end > 4 * length:  # a small part of something big; else siblings share one copy of it all
            begin, end = start - start % _ALIGNED, start + length
        # Tensors share a version counter if they have one root, not if they have one storage: two parts of a storage
        # may have counters of their own, and be at the same version with one of them not yet written.
        root = tensor if tensor._base is None else tensor._base
        key = id(root), tensor._version, storage.data_ptr(), begin, end
        known = self.known.get(key)
        stowed = known[1]() if known is not None and known[0]() is root else None
        if stowed is None:
            content = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            stowed = self.owner._stow(content.set_(storage, begin, (end - begin,), (1,)))
            if stowed is None:
                return _ResidentTensor(tensor)
            self.known[key] = weakref.ref(root), weakref.ref(stowed)
            self.gone.append(weakref.ref(stowed))
        return _OffloadedTensor(tensor, stowed, (start - begin) // width)

    def _may_go(self, tensor: Tensor) -> bool:
        return (
            type(tensor) in _KINDS
            and tensor.layout is torch.strided
            and tensor.device == self.owner.device
            and tensor.nbytes >= max(1, self.owner.smallest)
            and not tensor.is_conj()
            and not tensor.is_neg()
            and storage_id(tensor) not in self.held
        )


class _ResidentTensor:
    """A tensor that stays, apart from its graph: a node that held its own output would never be freed."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version

    def get(self) -> Tensor:
        _check_version(self.tensor, self.version, tuple(self.tensor.shape))
        return self.tensor


class _OffloadedTensor:
    """A tensor as a piece of stowed bytes. ``stamp`` has the tensor's version counter and no memory."""

    __slots__ = ("dtype", "offset", "shape", "stamp", "stowed", "stride", "version")

    def __init__(self, tensor: Tensor, stowed: _HostBytes, offset: int) -> None:
        self.stowed = stowed
        self.dtype = tensor.dtype
        self.offset = offset
        self.shape = tuple(tensor.shape)
        self.stride = tensor.stride()
        self.version = tensor._version
        self.stamp = tensor.detach()
        self.stamp.data = tensor.new_empty(0)

    def get(self) -> Tensor:
        _check_version(self.stamp, self.version, self.shape)
        storage = self.stowed.get().untyped_storage()
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.shape, self.stride
        )


def _unpack(packed: _OffloadedTensor | _ResidentTensor) -> Tensor:
    return packed.get()


def _check_version(stamp: Tensor, version: int, shape: tuple[int, ...]) -> None:
    """Autograd checks versions of what it holds itself; of what hooks hold, they must."""
    if stamp._version != version:
        raise PipelineError(
            f"a {stamp.dtype} tensor of shape {shape} that the backward needs was modified by an inplace operation "
            f"after the forward saved it: it is at version {stamp._version}, saved at version {version}. "
            "Change a copy instead (x.clone())"
        )
