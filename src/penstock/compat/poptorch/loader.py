"""``DataLoader``, whose batches have the samples of a whole call, and loading ahead of the caller."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import data

from penstock import hooks
from penstock.compat.poptorch.base import DataLoaderMode, Error, positive, require
from penstock.compat.poptorch.options import Options

__all__ = ["AsynchronousDataAccessor", "DataLoader"]


class DataLoader(data.DataLoader[Any]):
    """A loader whose batches have ``combinedBatchSize`` samples: those of one call of a model with these options.

    ``mode``: load when asked (``Sync``), or ahead in a thread (``Async``); with ``AsyncRebatched`` workers load
    ``rebatched_worker_size`` samples at a time and the thread joins them. At most one worker per CPU is used.
    ``async_options`` are those of ``AsynchronousDataAccessor``; other arguments are torch's. The options are frozen.
    """

    def __init__(
        self,
        options: Options,
        dataset: data.Dataset[Any],
        batch_size: int = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(options, Options):
            raise Error(f"poptorch.DataLoader takes a poptorch.Options first, got {type(options).__name__}")
        options._freeze()
        self.options = options
        self._mode, self._drops_last = DataLoaderMode(mode), drop_last
        ahead, rebatches = self._mode != DataLoaderMode.Sync, self._mode == DataLoaderMode.AsyncRebatched
        require(ahead or not async_options, "async_options are for the modes Async and AsyncRebatched")
        require(rebatches or rebatched_worker_size is None, "rebatched_worker_size is for the mode AsyncRebatched")
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        settings: dict[str, Any] = {"num_workers": min(num_workers, cpus), **kwargs}
        if settings["num_workers"]:
            settings["persistent_workers"] = ahead if persistent_workers is None else persistent_workers
            if ahead:  # the thread holds batches as well
                settings.setdefault("prefetch_factor", 1)
        if batch_sampler is not None:
            require(not rebatches, "a batch_sampler makes the batches: AsyncRebatched would make others of them")
            self.combinedBatchSize: int | None = getattr(batch_sampler, "batch_size", None)
            settings["batch_sampler"] = batch_sampler
        else:
            parts = options.device_iterations * options.replication_factor * options.Training.gradient_accumulation
            size = combined = positive("batch_size", batch_size) * parts
            if rebatched_worker_size is not None:
                size = positive("rebatched_worker_size", rebatched_worker_size)
                require(size <= combined, f"rebatched_worker_size={size} must be at most the {combined} of a call")
            self.combinedBatchSize = combined
            settings |= {"batch_size": size, "shuffle": shuffle, "drop_last": drop_last and not rebatches}
        super().__init__(dataset, **settings)
        self._accessor: AsynchronousDataAccessor | None = None
        if ahead:
            rebatched = {"rebatched_size": self.combinedBatchSize, "drop_last": drop_last} if rebatches else {}
            self._accessor = AsynchronousDataAccessor(_Batches(self), **{**(async_options or {}), **rebatched})

    def __len__(self) -> int:
        if self._mode != DataLoaderMode.AsyncRebatched:
            return super().__len__()
        assert self.combinedBatchSize is not None
        sized: Any = self.dataset if isinstance(self.dataset, data.IterableDataset) else self.sampler
        return len(sized) // self.combinedBatchSize if self._drops_last else -(-len(sized) // self.combinedBatchSize)

    def __iter__(self) -> Any:
        return super().__iter__() if self._accessor is None else iter(self._accessor)

    def batches(self) -> Iterator[Any]:
        """The batches of torch's loader, loaded in this thread."""
        return super().__iter__()

    def terminate(self) -> None:
        """End the thread and the workers; the next iteration starts new ones."""
        if self._accessor is not None:
            self._accessor.terminate()
        self._iterator = None


class _Batches:
    """A loader as its accessor sees it."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self.loader.batches()

    def __len__(self) -> int:
        return len(self.loader)


class AsynchronousDataAccessor:
    """Iterates over ``dataset``, a loader or any iterable, in a thread that is up to ``buffer_size`` batches ahead.

    With ``early_preload`` the thread starts at once. Batches are joined to ``rebatched_size`` samples.
    ``miss_sleep_time_in_ms``, ``load_indefinitely`` and ``sharing_strategy`` are accepted and have no effect.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: Any = None,
        rebatched_size: int | None = None,
        drop_last: bool = True,
    ) -> None:
        self._dataset = dataset
        self._depth = positive("buffer_size", buffer_size)
        self._size = None if rebatched_size is None else positive("rebatched_size", rebatched_size)
        self._drop_last = drop_last
        self._lock = threading.Lock()
        self._last: weakref.ref[hooks.Prefetcher[Any]] | None = None
        self._preloaded = self._start() if early_preload else None

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        iterator, self._preloaded = self._preloaded, None
        return iterator or self._start()

    def terminate(self) -> None:
        """End the thread. An unfinished iterator yields the batches that were loaded, and ends."""
        self._preloaded = None
        last = None if self._last is None else self._last()
        if last is not None:
            last.stop()
        with self._lock:  # until the thread has loaded its batch
            pass

    def _start(self) -> hooks.Prefetcher[Any]:
        self.terminate()  # torch's workers serve one iteration at a time
        batches = iter(self._dataset)
        rebatched = batches if self._size is None else _rebatch(batches, self._size, self._drop_last)
        iterator = hooks.Prefetcher(map(_copy_from_shared_memory, rebatched), self._depth, self._lock, None)
        self._last = weakref.ref(iterator)
        return iterator


def _rebatch(batches: Iterator[Any], size: int, drop_last: bool) -> Iterator[Any]:
    """Join and split batches into batches of ``size`` samples; the last one is smaller, or dropped."""
    parts: list[list[Any]] = []
    spec: Any = None
    held = 0
    for batch in batches:
        leaves, spec = hooks.tree_flatten(batch)
        held += len(leaves[0])
        parts.append(leaves)
        while held >= size:
            whole = [torch.cat(column) for column in zip(*parts, strict=True)]
            yield hooks.tree_unflatten([leaf[:size] for leaf in whole], spec)
            held -= size
            parts = [[leaf[size:] for leaf in whole]] if held else []
    if held and not drop_last:
        yield hooks.tree_unflatten([torch.cat(column) for column in zip(*parts, strict=True)], spec)


def _copy_from_shared_memory(batch: Any) -> Any:
    """Copy tensors that workers loaded out of shared memory, which may be scarce."""
    leaves, spec = hooks.tree_flatten(batch)
    copies = [leaf.clone() if isinstance(leaf, Tensor) and leaf.is_shared() else leaf for leaf in leaves]  # type: ignore[no-untyped-call]
    return hooks.tree_unflatten(copies, spec)
