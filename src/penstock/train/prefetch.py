"""Load batches and copy them to their devices before they are requested.

thread     ──▶ load 1 ─ load 2 ─ load 3 ─ …          at most ``depth`` batches ahead
                     └▶ copy 1 ─ event               on a separate stream
caller     ── next() ─ step 0 ─ next() ─ step 1      next() makes the caller's stream wait for the event
"""

from __future__ import annotations

import atexit
import copy
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from penstock._torch import pytree

T = TypeVar("T")
CopiedBatch = tuple[Any, dict[torch.device, torch.cuda.Event]]


class Prefetcher(Generic[T]):
    """An iterator that a thread fills from ``source``, up to ``depth`` items ahead.

    The thread ends soon after this iterator is freed or stopped. ``lock`` is held while the source produces an item.
    """

    def __init__(self, source: Iterator[T], depth: int, lock: threading.Lock, device: torch.device | None) -> None:
        self._items: deque[Future[T]] = deque()
        # Shared with the thread, which must not reference this object. Finalizers need the reentrant SimpleQueue.
        self._shared = SimpleNamespace(requests=SimpleQueue(), stopped=False)
        arguments = (source, self._shared, lock, device)
        thread = threading.Thread(target=_load, args=arguments, name="penstock loader", daemon=True)
        weakref.finalize(self, _stop, self._shared)
        _running[thread] = self._shared
        thread.start()
        for _ in range(depth):
            self._request()

    def _request(self) -> None:
        self._items.append(Future())
        self._shared.requests.put(self._items[-1])

    def stop(self) -> None:
        """Stop the thread after its present item. Items that are ready can still be read."""
        _stop(self._shared)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._items:
            raise StopIteration  # again, after the first time
        item = self._items.popleft().result()
        self._request()
        return item


def _load(source: Iterator[T], shared: SimpleNamespace, lock: threading.Lock, device: torch.device | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)
    while (future := shared.requests.get()) is not None:
        with lock:
            try:
                if shared.stopped:
                    raise StopIteration
                future.set_result(next(source))
            except StopIteration:
                shared.stopped = True
                future.set_exception(StopIteration())  # without a traceback, whose frames refer to the source
            except BaseException as error:
                shared.stopped = True
                future.set_exception(error)
        del future  # frees the item, or an error whose traceback refers to this frame
    _running.pop(threading.current_thread(), None)


def _stop(shared: SimpleNamespace) -> None:
    shared.stopped = True
    shared.requests.put(None)


_running: dict[threading.Thread, SimpleNamespace] = {}


@atexit.register
def _stop_all() -> None:
    """Join the threads at exit: a daemon thread that ends inside torch's code would crash the process."""
    running = dict(_running)
    for shared in running.values():
        _stop(shared)
    for thread in running:
        thread.join(10)


class BatchCopier:
    """Copies batches to the GPUs of the first and last stage on separate streams. No effect for stages on the CPU."""

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

    def send(self, batch: Any) -> CopiedBatch:
        """Start the copies, in the loading thread; return the batch and the events recorded after them."""
        if self.device is None:
            return batch, {}
        moved = copy_batch(batch, self.inputs, self.targets, self._copy)
        return moved, {device: stream.record_event() for device, stream in self._streams.items()}

    def receive(self, sent: CopiedBatch) -> Any:
        """The batch, for work that the caller submits to its streams afterwards."""
        batch, events = sent
        for device, event in events.items():
            torch.cuda.current_stream(device).wait_event(event)
        if events:

            def record(leaf: Any) -> None:
                if isinstance(leaf, Tensor) and leaf.is_cuda:
                    leaf.record_stream(torch.cuda.current_stream(leaf.device))

            map_leaves(record, batch)
        return batch

    def _copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        stream = self._streams[device]
        if tensor.is_cuda:  # created by the dataset on its stream
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
        elif self._pin:
            tensor = tensor.pin_memory()
        with torch.cuda.stream(stream):
            return tensor.to(device, non_blocking=True)


def copy_batch(
    batch: Any,
    inputs: torch.device | None,
    targets: torch.device | None,
    copy: Callable[[Tensor, torch.device], Tensor],
) -> Any:
    """Copy the tensors of a batch: a pair ``(inputs, targets)`` to the device of each, else all to one device."""

    def to(device: torch.device | None) -> Callable[[Any], Any]:
        return lambda leaf: copy(leaf, device) if isinstance(leaf, Tensor) and device is not None else leaf

    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        parts = [map_leaves(to(device), part) for part, device in zip(batch, (inputs, targets), strict=True)]
        make: Any = type(batch)
        return make(*parts) if hasattr(batch, "_fields") else make(parts)
    return map_leaves(to(inputs or targets), batch)


def map_leaves(change: Callable[[Any], Any], batch: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Apply ``change`` to every leaf of a pytree, also in mappings that pytree treats as leaves."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return change(value)
        inside = {key: map_leaves(change, item, is_leaf) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return inside
        made = copy.copy(value)
        made.update(inside)
        return made

    return pytree.tree_map(leaf, batch, is_leaf=is_leaf)
