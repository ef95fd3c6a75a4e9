"""``DataLoader``: the samples of a whole call at a time; and loading ahead of the caller."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import data

from penstock.compat.poptorch.enums import DataLoaderMode
from penstock.compat.poptorch.errors import Error, require
from penstock.compat.poptorch.option_groups import positive
from penstock.compat.poptorch.options import Options
from penstock.engine.message import flatten, unflatten
from penstock.train.prefetch import Prefetcher

__all__ = ["AsynchronousDataAccessor", "DataLoader"]


class DataLoader(data.DataLoader[Any]):
    """A loader whose batches are what one call of a model with these options takes: ``combinedBatchSize`` samples.

    ``mode``: load when asked (``Sync``), or by a thread that is some batches ahead (``Async``); with
    ``AsyncRebatched`` the workers load ``rebatched_worker_size`` samples at a time, and the thread joins them. There
    are no more workers than CPUs. ``async_options`` are those of ``AsynchronousDataAccessor``, and others torch's. The
    options are frozen from now on.
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
        self._options = options
        self._parts: int = (
            options.device_iterations * options.replication_factor * options.Training.gradient_accumulation
        )
        self._mode = DataLoaderMode(mode)
        self._drops_last = drop_last
        ahead = self._mode != DataLoaderMode.Sync
        rebatches = self._mode == DataLoaderMode.AsyncRebatched
        require(ahead or not async_options, "async_options are for the modes Async and AsyncRebatched")
        require(rebatches or rebatched_worker_size is None, "rebatched_worker_size is for the mode AsyncRebatched")
        if batch_sampler is None:
            self._combined: int | None = positive("batch_size", batch_size) * self._parts
        else:
            require(not rebatches, "a batch_sampler makes the batches: AsyncRebatched would make others of them")
            self._combined = getattr(batch_sampler, "batch_size", None)
        workers = min(num_workers, _cpus())
        settings: dict[str, Any] = {"num_workers": workers, **kwargs}
        if workers:
            settings["persistent_workers"] = ahead if persistent_workers is None else persistent_workers
            if ahead:  # the thread holds batches as well
                settings.setdefault("prefetch_factor", 1)
        if batch_sampler is not None:
            settings["batch_sampler"] = batch_sampler
        else:
            assert self._combined is not None
            size = self._combined
            if rebatched_worker_size is not None:
                size = positive("rebatched_worker_size", rebatched_worker_size)
                wanted = f"at most the {self._combined} of a call"
                require(size <= self._combined, f"rebatched_worker_size={size} must be {wanted}")
            settings |= {"batch_size": size, "shuffle": shuffle, "drop_last": drop_last and not rebatches}
        super().__init__(dataset, **settings)
        self._accessor: AsynchronousDataAccessor | None = None
        if ahead:
            rebatched = {"rebatched_size": self._combined, "drop_last": drop_last} if rebatches else {}
            self._accessor = AsynchronousDataAccessor(_Plain(self), **{**(async_options or {}), **rebatched})

    @property
    def options(self) -> Options:
        """The options, frozen."""
        return self._options

    @property
    def combinedBatchSize(self) -> int | None:
        """The samples of a batch: of one call of the model."""
        return self._combined

    def __len__(self) -> int:
        if self._mode != DataLoaderMode.AsyncRebatched:
            return super().__len__()
        assert self._combined is not None
        counted: Any = self.dataset if isinstance(self.dataset, data.IterableDataset) else self.sampler
        samples = len(counted)
        return samples // self._combined if self._drops_last else -(-samples // self._combined)

    def __iter__(self) -> Any:
        return super().__iter__() if self._accessor is None else iter(self._accessor)

    def plain(self) -> Iterator[Any]:
        """The batches as torch's loader has them."""
        return super().__iter__()

    def terminate(self) -> None:
        """End the thread and the workers; the next iteration starts new ones."""
        if self._accessor is not None:
            self._accessor.terminate()
        self._iterator = None


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Plain:
    """A loader without its accessor, for the accessor."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self.loader.plain()

    def __len__(self) -> int:
        return len(self.loader)


class AsynchronousDataAccessor:
    """Iterates over ``dataset``, a loader or any other iterable, in a thread that is ``buffer_size`` batches ahead.

    With ``early_preload`` it begins at once, and not with the first iteration. Batches of samples are joined to
    ``rebatched_size`` of them. Batches are the caller's to keep. ``miss_sleep_time_in_ms``, ``load_indefinitely`` and
    ``sharing_strategy``, which are about PopTorch's process and its memory, are accepted and have no effect.
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
        self._last: weakref.ref[Prefetcher[Any]] | None = None
        self._thread: threading.Thread | None = None
        self._preloaded = self._start() if early_preload else None

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        ahead, self._preloaded = self._preloaded, None
        return ahead or self._start()

    def terminate(self) -> None:
        """End the thread. An iterator that is left gives what was loaded, and ends."""
        self._preloaded = None
        last = None if self._last is None else self._last()
        if last is not None:
            last.stop()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> Prefetcher[Any]:
        self.terminate()  # one iteration at a time: torch's workers serve one
        batches = iter(self._dataset)
        rebatched = batches if self._size is None else _rebatched(batches, self._size, self._drop_last)
        ahead = Prefetcher(map(_out_of_shared_memory, rebatched), self._depth, self._lock, None)
        self._last, self._thread = weakref.ref(ahead), ahead.thread
        return ahead


def _rebatched(batches: Iterator[Any], size: int, drop_last: bool) -> Iterator[Any]:
    """Batches of ``size`` samples, made of other ones; the last one is smaller, or dropped."""
    parts: list[list[Any]] = []
    spec: Any = None
    held = 0
    for batch in batches:
        leaves, spec = flatten(batch)
        held += len(leaves[0])
        parts.append(leaves)
        while held >= size:
            whole = [torch.cat(column) for column in zip(*parts, strict=True)]
            yield unflatten([leaf[:size] for leaf in whole], spec)
            held -= size
            parts = [[leaf[size:] for leaf in whole]] if held else []
    if held and not drop_last:
        yield unflatten([torch.cat(column) for column in zip(*parts, strict=True)], spec)


def _out_of_shared_memory(batch: Any) -> Any:
    """The batch in memory of its own: what workers load is in memory that they share, of which there may be little."""
    leaves, spec = flatten(batch)
    return unflatten([leaf.clone() if _is_shared(leaf) else leaf for leaf in leaves], spec)


def _is_shared(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and bool(leaf.is_shared())  # type: ignore[no-untyped-call]
