"""Copies of which none happens before it must: a CPU's stand-in for streams, to catch what does not wait."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["LateCopies"]

Mark = tuple["LateCopies", int, int]  # whose, stream, number of the copy on it


class LateCopies:
    """Every copy waits in its stream until someone waits for its mark, or for that of a later one.

    It holds neither its source nor its target: memory that is let go before the copy was waited for is found out. What
    was copied out is seen on the host when the host has waited (``finish``), and by a copy back that comes after it.
    """

    def __init__(self) -> None:
        self.bytes_out = self.bytes_back = 0
        self.log: list[str] = []
        self.queues: tuple[list[tuple[object, ...]], ...] = ([], [])
        self.done = [0, 0]
        self.made = 0
        self.most_here = 0  # bytes of targets on the device, at most
        self._abandoned: list[Tensor] = []
        self._unseen: list[tuple[int, Tensor, Tensor]] = []  # number of the copy out, its target, its value
        _all.add(self)
        self._targets: list[weakref.ref[Tensor]] = []

    def host(self, like: Tensor) -> Tensor:
        self.made += 1
        tensor = torch.empty_like(like, device="cpu")
        return tensor.fill_(85) if tensor.dtype is torch.uint8 else tensor.fill_(float("nan"))

    def out(self, source: Tensor, target: Tensor, after: Mark | None = None) -> Mark:
        self.bytes_out += source.nbytes
        self.log.append("out")
        return self._add(0, weakref.ref(source), target, after)

    def back(self, source: Tensor, target: Tensor, after: Mark | None = None) -> Mark:
        self.bytes_back += source.nbytes
        self.log.append("back")
        target.fill_(85 if target.dtype is torch.uint8 else float("nan"))
        self._targets.append(weakref.ref(target))
        alive = [t for t in (reference() for reference in self._targets) if t is not None]
        self.most_here = max(self.most_here, sum(t.nbytes for t in alive))
        return self._add(1, source, weakref.ref(target), after)

    def out_all(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Mark:
        marks = [self.out(source, target) for source, target in pairs]
        return marks[-1] if marks else (self, 0, 0)

    def back_all(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Mark:
        marks = [self.back(source, target) for source, target in pairs]
        return marks[-1] if marks else (self, 1, 0)

    def _add(self, stream: int, source: object, target: object, after: Mark | None) -> Mark:
        self.queues[stream].append((source, target, after))
        return self, stream, len(self.queues[stream])

    def wait(self, mark: Mark, target: Tensor | None = None) -> None:
        self.log.append("wait")
        self._run(mark)

    def finish(self, mark: Mark) -> None:
        self.log.append("finish")
        self._run(mark)
        owner, stream, end = mark
        if stream == 0:
            owner._show(end)

    def abandon(self, target: Tensor) -> None:
        self.log.append("abandon")
        self._abandoned.append(target)

    def _run(self, mark: Mark) -> None:
        owner, stream, end = mark
        if owner is not self:
            owner._run(mark)
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
            assert isinstance(source, Tensor), "device memory was let go before it was copied out"
            assert isinstance(target, Tensor), "device memory was let go before the copy back had landed"
            for memory in (source, target):
                assert memory.untyped_storage().nbytes() >= memory.nbytes, "its memory was freed before the copy"
            for copies in list(_all):  # what comes before this copy in the host's memory, whoever has put it there
                copies._show(memory=_storage(target if stream == 0 else source))
            if stream == 0:
                with _lock:
                    self._unseen.append((number, target, source.detach().clone()))
            else:
                _write(target, source)
            self.queues[stream][number] = ()

    def _show(self, end: int = 0, memory: int | None = None) -> None:
        """Let the host see what was copied out before ``end``, or to this memory."""
        with _lock:  # stages have copies of their own, and threads
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
    # A copy of a stream's is seen by version counters when it is started, not when it is done.
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(target):
        target.copy_(value)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
