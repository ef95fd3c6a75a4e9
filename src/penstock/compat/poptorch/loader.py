"""``DataLoader``, whose batches have the samples of one call of a model, and a thread that loads ahead."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils import data

from penstock import hooks
from penstock.compat.poptorch.enums import DataLoaderMode, Error, positive, require
from penstock.compat.poptorch.options import Options

__all__ = ["AsynchronousDataAccessor", "DataLoader"]


class DataLoader(data.DataLoader[Any]):
    """A loader whose batches have ``combinedBatchSize`` samples: those of one call of a model with these options.

    ``mode``: load on request (``Sync``), or ahead in a thread. At most one worker per CPU is used; with
    ``AsyncRebatched`` an ``IterableDataset`` has one worker, because each worker drops its incomplete last batch.
    With ``batch_size=None`` the dataset has whole batches of that size. ``async_options`` are those of
    ``AsynchronousDataAccessor``; ``rebatched_worker_size`` and ``auto_distributed_partitioning`` have no effect; other
    arguments are torch's. The options are frozen.
    """

    def __init__(
        self,
        options: Options,
        dataset: data.Dataset[Any],
        batch_size: int | None = 1,
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
        ahead = DataLoaderMode(mode) != DataLoaderMode.Sync
        require(ahead or not async_options, "async_options are for the modes Async and AsyncRebatched")
        single = mode == DataLoaderMode.AsyncRebatched and isinstance(dataset, data.IterableDataset)
        most = 1 if single else len(os.sched_getaffinity(0))
        settings: dict[str, Any] = {"num_workers": min(num_workers, most), **kwargs}
        if settings["num_workers"]:
            settings["persistent_workers"] = ahead if persistent_workers is None else persistent_workers
            if ahead:  # the thread holds batches as well
                settings.setdefault("prefetch_factor", 1)
        if batch_sampler is not None:
            self.combinedBatchSize: int | None = getattr(batch_sampler, "batch_size", None)
            settings["batch_sampler"] = batch_sampler
        else:
            parts = options.device_iterations * options.replication_factor * options.Training.gradient_accumulation
            self.combinedBatchSize = None if batch_size is None else positive("batch_size", batch_size) * parts
            drop_last = drop_last and batch_size is not None
            settings |= {"batch_size": self.combinedBatchSize, "shuffle": shuffle, "drop_last": drop_last}
        super().__init__(dataset, **settings)
        # A proxy: torch does not stop the workers of an iterator in a reference cycle, and waits 5 s for each.
        source: Any = weakref.proxy(self)
        self._accessor = AsynchronousDataAccessor(source, **(async_options or {})) if ahead else None

    def __iter__(self) -> Any:
        return super().__iter__() if self._accessor is None else iter(self._accessor)

    def terminate(self) -> None:
        """End the thread and the workers; the next iteration starts new ones."""
        if self._accessor is not None:
            self._accessor.terminate()
        self._iterator = None


class AsynchronousDataAccessor:
    """Iterates over ``dataset``, a loader or any iterable, in a thread that is up to ``buffer_size`` batches ahead.

    With ``early_preload`` the thread starts at once. ``miss_sleep_time_in_ms``, ``load_indefinitely`` and
    ``sharing_strategy`` are accepted and have no effect.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: Any = None,
    ) -> None:
        self._dataset = dataset
        self._depth = positive("buffer_size", buffer_size)
        self._lock = threading.Lock()
        self._last: hooks.Prefetcher[Any] | None = None
        self._preloaded = self._start() if early_preload else None

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        iterator, self._preloaded = self._preloaded, None
        return iterator or self._start()

    def terminate(self) -> None:
        """End the thread. An unfinished iterator yields the batches that were loaded, and ends."""
        self._preloaded = None
        if self._last is not None:
            self._last.stop()
            self._last = None
        with self._lock:  # wait until the thread has loaded its batch
            pass

    def _start(self) -> hooks.Prefetcher[Any]:
        self.terminate()  # torch's workers serve one iteration at a time
        source = self._dataset
        batches = data.DataLoader.__iter__(source) if isinstance(source, DataLoader) else iter(source)
        self._last = hooks.Prefetcher(batches, self._depth, self._lock, None)
        return self._last
