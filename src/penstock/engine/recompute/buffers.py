"""Buffers that a forward changes: a second run of it sees what the first saw, and leaves no trace.

    F   count 3 ─▶ 4      the value before is kept for this micro-batch: 3
    F   count 4 ─▶ 5      another micro-batch
    R   count 3 ─▶ 4      the forward of the first again, on a copy of what was kept
        count 5           as before the second run

BatchNorm in torch's own words needs no copies: its output does not depend on its running statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch import BatchNorm
from penstock.errors import PlanError

__all__ = [
    "STATISTICS",
    "BatchNormFreeze",
    "BufferGuard",
    "BufferSnapshots",
    "SavedBuffers",
    "ScratchStatistics",
    "clone_buffer",
    "has_torch_forward",
    "version_of",
]

_LARGE = 1 << 20  # bytes: a buffer above that is copied only while it is known, or not yet known, to change

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

_NO_COPY: Any = object()

SavedBuffers = Sequence[
    tuple[dict[str, Tensor | None], str, Tensor | None]
]  # where a buffer is, and what a forward saw there


class BufferGuard:
    """What lets a stage's forward run again without a trace in its buffers."""

    def __init__(self, module: nn.Module) -> None:
        self.quiet = BatchNormFreeze(module)
        self.guard = BufferSnapshots(module)


class BatchNormFreeze:
    """Entered around a second run of a stage's forward: BatchNorm uses batch statistics, and updates nothing.

    Layers with a forward of their own are not among these: their buffers are guarded as any others.
    """

    def __init__(self, module: nn.Module) -> None:
        self.layers = [(part, ScratchStatistics(part)) for part in module.modules() if has_torch_forward(part)]
        self._put_back: list[list[tuple[dict[str, Any], dict[str, Any]]]] = []

    def __enter__(self) -> None:
        present = []
        for part, spares in self.layers:
            buffers = part._buffers
            if part.training and part.track_running_stats and buffers["running_mean"] is not None:
                present.append((buffers, {name: buffers[name] for name in STATISTICS}))
                buffers.update(spares.of_now())
        self._put_back.append(present)

    def __exit__(self, *error: object) -> None:
        for buffers, values in self._put_back.pop():
            buffers.update(values)


class ScratchStatistics:
    """Buffers to update in the place of a BatchNorm layer's: with none at all, torch may take another kernel."""

    def __init__(self, module: nn.Module) -> None:
        self.buffers = module._buffers
        self.spares: dict[str, Tensor | None] = dict.fromkeys(STATISTICS)

    def of_now(self) -> dict[str, Tensor | None]:
        for name, spare in self.spares.items():
            real = self.buffers[name]
            if real is None:
                self.spares[name] = None
            elif spare is None or (spare.dtype, spare.device, spare.shape) != (real.dtype, real.device, real.shape):
                self.spares[name] = clone_buffer(real)
        return self.spares


def has_torch_forward(module: nn.Module) -> bool:
    """Whether this is a BatchNorm layer that runs torch's code and no other."""
    own = BatchNorm.forward, nn.SyncBatchNorm.forward
    return isinstance(module, BatchNorm) and type(module).forward in own and "forward" not in module.__dict__


class BufferSnapshots:
    """The buffers of a stage's module, but for those that ``Quiet`` takes care of.

    ``before`` and ``after`` go around a forward that will run again, ``seeing`` around the second run. In a mode that
    is new, all buffers are copied and compared, to learn which of them its forwards change.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parts = {
            path: part for path, part in module.named_modules() if part._buffers and not has_torch_forward(part)
        }
        self.places = [
            _BufferEntry(part._buffers, name, f"{path}.{name}" if path else name)
            for path, part in self.parts.items()
            for name in part._buffers
        ]
        self._known: set[object] = set()
        self._mode: object = _NO_COPY
        self._learning = True

    def before(self, mode: object) -> None:
        """``mode``: what the forward may depend on, besides the modes of its layers."""
        mode = mode, *[part.training for part in self.parts.values()]
        if mode != self._mode:
            self._learning = mode not in self._known
            self._mode = mode
        copies: dict[int, Tensor] = {}
        for place in self.places:
            place.look(self._learning, copies)

    def after(self) -> SavedBuffers:
        """What ``seeing`` needs for the second run of this forward."""
        learning = self._learning
        found = [place for place in self.places if place.changed(learning)]
        seen = [place.take() for place in found]
        if learning:
            for place in self.places:
                place.forget_large()
            self._known.add(self._mode)
            self._learning = False
        return seen

    def seeing(self, seen: SavedBuffers) -> AbstractContextManager[None]:
        """While a forward runs again: the buffers as its first run saw them; afterwards, as they are now."""
        return _restored(seen) if seen else nullcontext()


class _BufferEntry:
    """Where a buffer is, and the last that is known of it."""

    __slots__ = ("changes", "kept", "members", "name", "path", "tensor", "version")

    def __init__(self, members: dict[str, Tensor | None], name: str, path: str) -> None:
        self.members = members
        self.name = name
        self.path = path
        self.changes = False
        self.tensor: Tensor | None = None
        self.version = 0
        self.kept: Any = _NO_COPY  # a copy of the tensor in this version

    def look(self, learning: bool, copies: dict[int, Tensor]) -> None:
        tensor = self.members.get(self.name)
        version = 0 if tensor is None else version_of(tensor)
        fresh = tensor is self.tensor and version == self.version
        # Versions do not tell all (``.data``, statistics that a kernel updates): what changes is copied each time.
        if fresh and not learning and not self.changes:
            return
        self.tensor, self.version = tensor, version
        if tensor is None:
            self.kept = None
        elif learning or self.changes or tensor.nbytes <= _LARGE:
            if id(tensor) not in copies:  # one buffer may be in two modules
                copies[id(tensor)] = clone_buffer(tensor)
            self.kept = copies[id(tensor)]
        else:
            self.kept = _NO_COPY

    def changed(self, by_value: bool) -> bool:
        """Whether the forward has changed the buffer, or may have."""
        tensor = self.members.get(self.name)
        if self.changes or tensor is not self.tensor or (tensor is not None and version_of(tensor) != self.version):
            return True
        return by_value and tensor is not None and not torch.equal(tensor, self.kept)

    def take(self) -> tuple[dict[str, Tensor | None], str, Tensor | None]:
        self.changes = True
        kept, self.kept = self.kept, _NO_COPY
        if kept is _NO_COPY:
            raise PlanError(
                f"the forward changed {self.path}, of {self.tensor.nbytes if self.tensor is not None else 0} bytes, "
                "which it had not done before, and its value is needed to run it again: run the step again"
            )
        return self.members, self.name, kept

    def forget_large(self) -> None:
        if self.tensor is not None and self.tensor.nbytes > _LARGE:
            self.kept = _NO_COPY


@contextmanager
def _restored(seen: SavedBuffers) -> Iterator[None]:
    present = [(members, name, members.get(name)) for members, name, _ in seen]
    copies: dict[int, Tensor] = {}
    for members, name, value in seen:
        # A copy, because the second run changes it as the first did, and there may be a third.
        members[name] = None if value is None else copies.setdefault(id(value), value.clone())
    try:
        yield
    finally:
        for members, name, value in present:
            members[name] = value


def clone_buffer(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():  # one that has versions
        return tensor.detach().clone()


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
