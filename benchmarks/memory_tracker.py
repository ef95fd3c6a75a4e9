"""Track the bytes of live tensor storages by the stage that allocated them, on all threads.

A dispatch mode observes inputs and outputs of all operators of its thread, including the backward. An output with an
unknown storage is an allocation; a weak reference tells when it is freed. Temporary memory inside kernels is not
observed. Hooks on the first and the last layer of each stage set the current stage of a thread and start the mode.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["MemoryTracker", "tracker_accuracy"]


@dataclass(eq=False)
class Entry:
    bytes: int
    stage: int
    watch: weakref.ref[Any] | None = None


class MemoryTracker:
    """Live storages that were allocated since ``reset``, by stage, on all threads."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.lock = threading.RLock()  # a storage may be freed inside ``note``
        self.here = threading.local()
        self.leaving = False
        self.first: Watch | None = None
        self.reset()

    def reset(self) -> None:
        with self.lock:
            self.entries: dict[int, Entry] = {}
            self.alive, self.most = [0] * self.stages, [0] * self.stages
            self.total = self.most_total = 0
            self.at_entry: dict[int, list[int]] = {}  # bytes alive when a stage was last entered

    def enter(self, stage: int) -> None:
        """Attribute allocations of this thread to ``stage`` from now on."""
        self.here.stage = stage
        with self.lock:
            self.at_entry[stage] = list(self.alive)
        watch: Watch | None = getattr(self.here, "watch", None)
        if watch is None and not self.leaving:  # a dispatch mode is local to a thread
            self.here.watch = Watch(self)
            self.here.watch.__enter__()
        elif watch is not None and self.leaving and watch is not self.first:
            self.here.watch = None
            watch.__exit__(None, None, None)

    def note(self, tensor: Tensor, made: bool) -> None:
        """Record an input (``made=False``) or output of an operator."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self.lock:
            if key in self.entries:
                return
            entry = Entry(storage.nbytes() if made else 0, getattr(self.here, "stage", 0))
            entry.watch = weakref.ref(storage, lambda _: self.drop(key, entry))
            self.entries[key] = entry
            self.add(entry.stage, entry.bytes)

    def drop(self, key: int, entry: Entry) -> None:
        with self.lock:
            if self.entries.get(key) is entry:  # not one from before the reset
                del self.entries[key]
                self.add(entry.stage, -entry.bytes)

    def add(self, stage: int, size: int) -> None:
        self.alive[stage] += size
        self.total += size
        self.most[stage] = max(self.most[stage], self.alive[stage])
        self.most_total = max(self.most_total, self.total)

    @contextmanager
    def watching(self, stages: Sequence[Sequence[nn.Module]]) -> Iterator[None]:
        """Track this thread, and every thread that enters the forward or backward of a stage.

        With ``leaving`` set, the next step removes the modes of its threads, which must not end with an active mode.
        """

        def into(stage: int, *_: Any) -> None:
            self.enter(stage)

        def onto(stage: int, module: nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(partial(into, stage))

        with ExitStack() as stack:
            for stage, layers in enumerate(stages):
                stack.callback(layers[0].register_forward_pre_hook(partial(into, stage)).remove)
                stack.callback(layers[-1].register_forward_hook(partial(onto, stage)).remove)
            self.first = self.here.watch = Watch(self)
            stack.enter_context(self.first)
            yield


class Watch(TorchDispatchMode):
    """Reports inputs and outputs of one thread's operators to a tracker."""

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_of((*args, *kwargs.values())):
            self.tracker.note(tensor, made=False)
        out = func(*args, **kwargs)
        for tensor in tensors_of((out,)):
            self.tracker.note(tensor, made=True)
        return out


def tensors_of(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)


def tracker_accuracy(number: int = 4) -> float:
    """Tracked bytes over known bytes, for threads that each keep the outputs of ten tanh."""
    tracker = MemoryTracker(number)
    size, depth, kept = 2**10, 10, []

    def work(stage: int) -> None:
        tracker.enter(stage)
        x = torch.ones(size, requires_grad=True)
        for _ in range(depth):
            x = torch.tanh(x)
        kept.append(x)

    threads = [threading.Thread(target=work, args=(stage,)) for stage in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = tracker.total
    kept.clear()
    assert tracker.total == 0, f"{tracker.total} bytes are reported alive, but all are freed"
    return found / (number * (depth + 1) * size * 4)
