"""Which part of every mini-batch a process gets, and where it goes."""

from __future__ import annotations

import atexit
import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from penstock._torch import pytree
from penstock.errors import PlanError
from penstock.train.mesh import Mesh
from penstock.train.pipeline import Pipeline

__all__ = [
    "CollateShare",
    "CopiedBatch",
    "DeviceCopier",
    "LoaderPlacement",
    "Prefetcher",
    "ReplicaShare",
    "copy_batch",
    "loader_placement",
    "map_leaves",
    "none_like",
    "without_samples",
]

SampleT = TypeVar("SampleT")


@dataclass(frozen=True)
class ReplicaShare:
    """The part of replica ``rank``, one of ``count``: parts are as even as can be, larger ones first.

    10 samples for 4 replicas:   0 1 2 | 3 4 5 | 6 7 | 8 9
    """

    count: int = 1
    rank: int = 0

    def of(self, samples: Sequence[SampleT]) -> Sequence[SampleT]:
        small, larger = divmod(len(samples), self.count)
        start = self.rank * small + min(self.rank, larger)
        return samples[start : start + small + (self.rank < larger)]


@dataclass(frozen=True)
class LoaderPlacement:
    """A process as a loader sees it: its share, whether a stage of its own needs data, and the devices of these."""

    share: ReplicaShare = ReplicaShare()
    loads: bool = True
    inputs: torch.device | None = None
    targets: torch.device | None = None


def loader_placement(mesh: Mesh | None, pipe: Pipeline | None, everywhere: bool) -> LoaderPlacement:
    """A mesh alone does not know where the stages are: the last one is at the pipeline's end, or at its beginning."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise PlanError(f"mesh must be ps.Mesh(data=…, pipe=…), got {type(mesh).__name__}")
    if pipe is not None and not isinstance(pipe, Pipeline):
        raise PlanError(f"pipe must be a ps.Pipeline, got {type(pipe).__name__}")
    if mesh is not None and pipe is not None and (pipe.mesh is None or _grid(mesh) != _grid(pipe.mesh)):
        raise PlanError(f"mesh and pipe disagree: {mesh!r}, but the pipeline is on {pipe.mesh!r}. Pass pipe alone")
    grid = mesh if pipe is None else pipe.mesh
    share = ReplicaShare() if grid is None else ReplicaShare(grid.data, grid.data_rank)
    if grid is not None and (everywhere or pipe is None):
        loads = everywhere or grid.is_first or grid.is_last
        return LoaderPlacement(share, loads, grid.device if loads else None, grid.device if loads else None)
    if pipe is None:
        return LoaderPlacement(share)
    devices = pipe.plan.devices
    assert devices is not None
    return LoaderPlacement(
        share,
        pipe.has_first_stage or pipe.has_last_stage,
        torch.device(devices[0]) if pipe.has_first_stage else None,
        torch.device(devices[-1]) if pipe.has_last_stage else None,
    )


def _grid(mesh: Mesh) -> tuple[Any, ...]:
    return mesh.sizes, mesh.world_ranks, mesh.device


# ── the parts of a batch ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class CollateShare:
    """A ``collate_fn`` that is given all samples of a mini-batch and keeps a share of them."""

    collate: Callable[[list[Any]], Any]
    share: ReplicaShare

    def __call__(self, samples: list[Any]) -> Any:
        own = list(self.share.of(samples))
        return self.collate(own) if own else without_samples(self.collate(samples[:1]))


def map_leaves(change: Callable[[Any], Any], batch: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """The same structure with every leaf changed; mappings that pytrees do not know are walked into as well."""

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


def without_samples(batch: Any) -> Any:
    """The same structure and dtypes without samples."""
    return map_leaves(_empty_leaf, batch, is_leaf=_is_list_of_text)


def none_like(batch: Any) -> Any:
    """The same structure with None everywhere."""
    return map_leaves(lambda leaf: None, batch)


def _is_list_of_text(value: Any) -> bool:
    """Whether this is one text per sample, which the default ``collate_fn`` leaves in a list."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(text, (str, bytes)) for text in value)


def _empty_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf[:0] if leaf.dim() else leaf
    if _is_list_of_text(leaf):
        return type(leaf)()
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes)):
        return leaf
    raise PlanError(
        f"this replica gets no samples of the last mini-batch, and of a {type(leaf).__name__} in it the loader cannot "
        "make one without samples: let collate_fn give tensors, or pass drop_last=True"
    )


# Batches that are ready, on their device, before they are asked for.
#
# thread     ──▶ load 1 ─ load 2 ─ load 3 ─ …          the loader's own, at most ``depth`` batches ahead
#                      └▶ copy 1 ─ mark                a stream of the GPU's own
# caller     ── next() ─ step 0 ─ next() ─ step 1      next() lets the caller's stream wait for the mark

T = TypeVar("T")


# ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _EndOfSource(NamedTuple):
    error: BaseException | None


class _PrefetchQueues(Generic[T]):
    """What the thread and the caller share. It does not know the caller's end, so that this can be forgotten.

    A finalizer stops it, which may interrupt any line of any thread: these queues are safe there, locks are not.
    """

    def __init__(self, depth: int) -> None:
        self.ready: SimpleQueue[T | _EndOfSource] = SimpleQueue()
        self.room: SimpleQueue[None] = SimpleQueue()  # as many as may be made
        self.stopped = False
        for _ in range(depth):
            self.room.put(None)

    def stop(self) -> None:
        self.stopped = True
        self.room.put(None)


class Prefetcher(Generic[T]):
    """An iterator whose source is iterated by a thread, up to ``depth`` items ahead.

    The thread ends with the source, with an error in it, or soon after nobody has this iterator any longer. After an
    end nothing comes: do not ask again.
    """

    def __init__(self, source: Iterator[T], depth: int, lock: threading.Lock, device: torch.device | None) -> None:
        """``lock`` is held while an item is made."""
        self._between: _PrefetchQueues[T] = _PrefetchQueues(depth)
        arguments = (source, self._between, lock, device)
        self.thread = threading.Thread(target=_prefetch_loop, args=arguments, name="penstock loader", daemon=True)
        weakref.finalize(self, self._between.stop)
        _running[self.thread] = self._between
        self.thread.start()

    def stop(self) -> None:
        """Let the thread end when it has made what it is at; what is ready can still be taken."""
        self._between.stop()
        self._between.ready.put(_EndOfSource(None))

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        item = self._between.ready.get()
        if not isinstance(item, _EndOfSource):
            self._between.room.put(None)
            return item
        try:
            raise StopIteration if item.error is None else item.error
        finally:
            del item  # the error's traceback has this frame


def _prefetch_loop(
    source: Iterator[T], between: _PrefetchQueues[T], lock: threading.Lock, device: torch.device | None
) -> None:
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
        between.ready.put(_EndOfSource(None))
    except BaseException as error:
        between.ready.put(_EndOfSource(error))
    finally:
        _running.pop(threading.current_thread(), None)


_running: dict[threading.Thread, _PrefetchQueues[Any]] = {}


@atexit.register
def _stop_all() -> None:
    """A thread that Python ends within torch's code takes the process down: let each come out of there."""
    left = dict(_running)
    for between in left.values():
        between.stop()
    for thread in left:
        thread.join(10)


# ── devices ──────────────────────────────────────────────────────────────────────────────────────────────────────


class CopiedBatch(NamedTuple):
    """A batch on its way, and the marks after its copies."""

    batch: Any
    marks: dict[torch.device, torch.cuda.Event]


class DeviceCopier:
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

    def send(self, batch: Any) -> CopiedBatch:
        """Start the copies; for the thread that loads."""
        if self.device is None:
            return CopiedBatch(batch, {})
        moved = copy_batch(batch, self.inputs, self.targets, self._copy)
        return CopiedBatch(moved, {device: stream.record_event() for device, stream in self._streams.items()})

    def receive(self, sent: CopiedBatch) -> Any:
        """The batch, for what the caller's streams are given from now on."""
        for device, mark in sent.marks.items():
            torch.cuda.current_stream(device).wait_event(mark)
        if sent.marks:
            map_leaves(_record_stream, sent.batch)
        return sent.batch

    def _copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        stream = self._streams[device]
        if tensor.is_cuda:  # made on a stream of the dataset's
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
    """The batch with its tensors copied: of a pair, (inputs, targets), each part to its device; else all to one."""

    def to(device: torch.device | None) -> Callable[[Any], Any]:
        return lambda leaf: copy(leaf, device) if isinstance(leaf, Tensor) and device is not None else leaf

    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        parts = [map_leaves(to(device), part) for part, device in zip(batch, (inputs, targets), strict=True)]
        make: Any = type(batch)
        return make(*parts) if hasattr(batch, "_fields") else make(parts)
    return map_leaves(to(inputs or targets), batch)


def _record_stream(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_cuda:
        leaf.record_stream(torch.cuda.current_stream(leaf.device))
    return leaf
