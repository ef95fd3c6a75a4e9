"""Batches that are ready, on their device, before they are asked for.

thread     ──▶ load 1 ─ load 2 ─ load 3 ─ …          the loader's own, at most ``depth`` batches ahead
                     └▶ copy 1 ─ mark                a stream of the GPU's own
caller     ── next() ─ step 0 ─ next() ─ step 1      next() lets the caller's stream wait for the mark
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from penstock.train.share import mapped

__all__ = ["Delivery", "Prefetch", "Sent", "delivered"]

T = TypeVar("T")


# ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _End(NamedTuple):
    error: BaseException | None


class _Between(Generic[T]):
    """What the thread and the caller share. It does not know the caller's end, so that this can be forgotten.

    A finalizer stops it, which may interrupt any line of any thread: these queues are safe there, locks are not.
    """

    def __init__(self, depth: int) -> None:
        self.ready: SimpleQueue[T | _End] = SimpleQueue()
        self.room: SimpleQueue[None] = SimpleQueue()  # as many as may be made
        self.stopped = False
        for _ in range(depth):
            self.room.put(None)

    def stop(self) -> None:
        self.stopped = True
        self.room.put(None)


class Prefetch(Generic[T]):
    """An iterator whose source is iterated by a thread, up to ``depth`` items ahead.

    The thread ends with the source, with an error in it, or soon after nobody has this iterator any longer. After an
    end nothing comes: do not ask again.
    """

    def __init__(self, source: Iterator[T], depth: int, lock: threading.Lock, device: torch.device | None) -> None:
        """``lock`` is held while an item is made."""
        self._between: _Between[T] = _Between(depth)
        arguments = (source, self._between, lock, device)
        self.thread = threading.Thread(target=_fill, args=arguments, name="penstock loader", daemon=True)
        weakref.finalize(self, self._between.stop)
        _running[self.thread] = self._between
        self.thread.start()

    def stop(self) -> None:
        """Let the thread end when it has made what it is at; what is ready can still be taken."""
        self._between.stop()
        self._between.ready.put(_End(None))

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        item = self._between.ready.get()
        if not isinstance(item, _End):
            self._between.room.put(None)
            return item
        try:
            raise StopIteration if item.error is None else item.error
        finally:
            del item  # the error's traceback has this frame


def _fill(source: Iterator[T], between: _Between[T], lock: threading.Lock, device: torch.device | None) -> None:
    try:
        if device is not None:
            torch.cuda.set_device(device)
        while True:
            between.room.get()
            with lock:
                if between.stopped:
                    return
                between.ready.put(next(source))  # kept nowhere else: its memory is the caller's to give back
    except StopIteration:
        between.ready.put(_End(None))
    except BaseException as error:
        between.ready.put(_End(error))
    finally:
        _running.pop(threading.current_thread(), None)


_running: dict[threading.Thread, _Between[Any]] = {}


@atexit.register
def _end_all() -> None:
    """A thread that Python ends within torch's code takes the process down: let each come out of there."""
    left = dict(_running)
    for between in left.values():
        between.stop()
    for thread in left:
        thread.join(10)


# ── devices ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Sent(NamedTuple):
    """A batch on its way, and the marks after its copies."""

    batch: Any
    marks: dict[torch.device, torch.cuda.Event]


class Delivery:
    """Copies batches to the GPUs that use them, beside their work. What a CPU uses stays as it is."""

    def __init__(self, inputs: torch.device | None, targets: torch.device | None, pin: bool) -> None:
        self.inputs = inputs if inputs is not None and inputs.type == "cuda" else None
        self.targets = targets if targets is not None and targets.type == "cuda" else None
        self.device = self.inputs or self.targets
        self._pin = pin
        self._streams = {
            device: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for device in {self.inputs, self.targets}
            if device is not None
        }

    def send(self, batch: Any) -> Sent:
        """Start the copies; for the thread that loads."""
        if self.device is None:
            return Sent(batch, {})
        moved = delivered(batch, self.inputs, self.targets, self._copy)
        return Sent(moved, {device: stream.record_event() for device, stream in self._streams.items()})

    def receive(self, sent: Sent) -> Any:
        """The batch, for what the caller's streams are given from now on."""
        for device, mark in sent.marks.items():
            torch.cuda.current_stream(device).wait_event(mark)
        if sent.marks:
            mapped(_use_here, sent.batch)
        return sent.batch

    def _copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        stream = self._streams[device]
        if tensor.is_cuda:  # made on a stream of the dataset's
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
        elif self._pin:
            tensor = tensor.pin_memory()
        with torch.cuda.stream(stream):
            return tensor.to(device, non_blocking=True)


def delivered(
    batch: Any,
    inputs: torch.device | None,
    targets: torch.device | None,
    copy: Callable[[Tensor, torch.device], Tensor],
) -> Any:
    """The batch with its tensors copied: of a pair, (inputs, targets), each part to its device; else all to one."""

    def to(device: torch.device | None) -> Callable[[Any], Any]:
        return lambda leaf: copy(leaf, device) if isinstance(leaf, Tensor) and device is not None else leaf

    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        parts = [mapped(to(device), part) for part, device in zip(batch, (inputs, targets), strict=True)]
        make: Any = type(batch)
        return make(*parts) if hasattr(batch, "_fields") else make(parts)
    return mapped(to(inputs or targets), batch)


def _use_here(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_cuda:
        leaf.record_stream(torch.cuda.current_stream(leaf.device))
    return leaf
