"""One epoch of a loader under way, and how far it is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, tee
from typing import Any, Generic, TypeVar

import torch
from torch.utils import data as torch_data
from torch.utils.data import Dataset, IterableDataset, IterDataPipe, MapDataPipe, default_collate

from penstock.errors import PipelineError, PlanError
from penstock.train.mesh import Mesh
from penstock.train.pipeline import Pipeline
from penstock.train.prefetch import (
    CollateShare,
    CopiedBatch,
    DeviceCopier,
    Prefetcher,
    loader_placement,
    none_like,
    without_samples,
)
from penstock.train.sampler import BatchOrder, num_batches, seeded_generator

__all__ = ["DataLoader", "EpochIterator", "EpochPosition"]


@dataclass
class EpochPosition:
    """A place in the order of batches: those given out in an epoch, and whether that has ended."""

    epoch: int
    batches: int
    ended: bool = False


class EpochIterator:
    """One epoch, batch by batch. It keeps none of them."""

    def __init__(self, source: Iterator[CopiedBatch], delivery: DeviceCopier, position: EpochPosition) -> None:
        self._source = source
        self._delivery = delivery
        self._position = position
        self.ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        try:
            batch = self._delivery.receive(next(self._source))
        except BaseException as error:
            self.ended = True
            self._position.ended = isinstance(error, StopIteration)  # after a failure its batch is still to be given
            raise
        self._position.batches += 1
        return batch


# ``DataLoader``: to each replica its share of every mini-batch, to each rank what its stages need, ready in time.

Sample = TypeVar("Sample")


class DataLoader(Generic[Sample]):
    """Mini-batches of a dataset, for this process's place in a mesh; without ``mesh`` and ``pipe``, a plain loader.

    ``batch_size`` is the *global* mini-batch, what one step of all replicas together consumes. Each replica gets a
    contiguous part of it, as even as can be, larger ones first: with 1, 2 or 4 replicas the mini-batches are the same
    samples in the same order. A tail is kept, where a replica may get fewer samples than others, or tensors without
    any; ``drop_last=True`` drops it. ``shuffle`` draws the order of an epoch from ``seed`` and the epoch alone, which
    advances with every ``iter()``. ``sampler`` and ``batch_sampler`` are of the whole dataset, and on every rank alike.

    With ``pipe`` only the ranks of the first and the last stage load; others get the same structure with None in place
    of tensors, so ``for x, y in loader: pipe.step(x, y)`` runs everywhere. With ``mesh`` alone these are the pipeline's
    first and last ranks, with ``everywhere=True`` all. An ``IterableDataset`` is read, whole, by every rank.

    A thread keeps ``prefetch`` batches ready, on a GPU where a stage that uses them is on one, copied from pinned
    memory; with ``prefetch=0`` they are loaded when asked for. With ``num_workers`` processes load, and the thread
    only copies. ``options`` are the other arguments of ``torch.utils.data.DataLoader``.
    """

    def __init__(
        self,
        dataset: Dataset[Sample] | Sequence[Sample],
        batch_size: int | None = None,
        *,
        mesh: Mesh | None = None,
        pipe: Pipeline | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Sequence[Any]] | None = None,
        collate_fn: Callable[[list[Sample]], Any] | None = None,
        everywhere: bool = False,
        prefetch: int = 2,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        **options: Any,
    ) -> None:
        self._place = loader_placement(mesh, pipe, everywhere)
        stream = isinstance(dataset, IterableDataset)
        _check_batch(batch_size, batch_sampler, drop_last, self._place.share.count)
        _check_numbers(seed, prefetch, options)
        if stream or isinstance(dataset, MapDataPipe):
            _check_stream(dataset, shuffle or sampler is not None or batch_sampler is not None, num_workers)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.shuffle = bool(shuffle)
        self.seed = seed
        self._collate = collate_fn or default_collate
        self._order = (
            None
            if stream
            else BatchOrder(
                dataset,
                batch_size,
                shuffle=self.shuffle,
                drop_last=drop_last,
                sampler=sampler,
                batch_sampler=batch_sampler,
            )
        )
        self._delivery = DeviceCopier(self._place.inputs, self._place.targets, pin_memory is not False)
        self._depth = prefetch if num_workers == 0 or self._delivery.device is not None else 0
        self._lock = threading.Lock()  # one thread at a time reads the dataset
        self._next = EpochPosition(0, 0)
        self._now: EpochPosition | None = None
        self._last: weakref.ref[EpochIterator] | None = None
        self._thread: threading.Thread | None = None  # of the iteration that began last
        self._hollow: Any = None
        self._feed = _IndexFeed()
        options |= {"num_workers": num_workers, "pin_memory": bool(pin_memory) and self._delivery.device is None}
        self._torch: torch_data.DataLoader[Any]
        if stream:
            collate = CollateShare(self._collate, self._place.share)
            self._torch = torch_data.DataLoader(
                dataset,  # type: ignore[arg-type]
                batch_size,
                drop_last=drop_last,
                collate_fn=collate,
                **options,
            )
        else:
            self._torch = torch_data.DataLoader(
                dataset,  # type: ignore[arg-type]
                batch_sampler=self._feed,
                collate_fn=self._collate,
                **options,
            )

    def __len__(self) -> int:
        """The number of steps of a whole epoch."""
        try:
            if self._order is not None:
                return len(self._order)
            assert self.batch_size is not None
            return num_batches(len(self.dataset), self.batch_size, self.drop_last)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError("the number of steps is not known: the dataset, or its sampler, has no length") from None

    # ── epochs ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or the next one if none is."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """The next ``iter()`` begins this epoch; if a state was loaded that is in it, where that left off."""
        self._now = None
        if epoch != self._next.epoch:
            self._next = EpochPosition(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Where the latest iteration is. It is the same on every rank, and for any number of replicas."""
        position = self._position
        return {"epoch": position.epoch, "batches": position.batches, "seed": self.seed, **self._facts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next ``iter()`` goes on with the batch after the last one that was given out."""
        facts = self._facts()
        missing = [name for name in ("epoch", "batches", "seed", *facts) if name not in state]
        if missing:
            raise PlanError(f"this is not the state of a DataLoader: it has no {', '.join(missing)}")
        for name, here in facts.items():
            if state[name] != here:
                raise PlanError(
                    f"the state was saved with {name}={state[name]!r}, but this loader has {here!r}: its batches are "
                    "others. Make the loader as it was"
                )
        self.seed = state["seed"]
        self._next, self._now = EpochPosition(state["epoch"], state["batches"]), None

    def _facts(self) -> dict[str, Any]:
        """What makes the batches of an epoch, beside the seed."""
        samples = len(self.dataset) if hasattr(self.dataset, "__len__") else None
        return {"samples": samples, "batch_size": self.batch_size, "shuffle": self.shuffle}

    @property
    def _position(self) -> EpochPosition:
        return self._next if self._now is None or self._now.ended else self._now

    # ── iterating ────────────────────────────────────────────────────────────────────────────────────────────

    def __iter__(self) -> Iterator[Any]:
        if self._torch.persistent_workers:
            self._settle_workers()
        epoch, start = self._next.epoch, self._next.batches
        loaded: Iterator[CopiedBatch] = map(self._delivery.send, self._loaded(epoch, start))
        if self._depth and (self._place.loads or self._order is None):
            ahead = Prefetcher(loaded, self._depth, self._lock, self._delivery.device)
            loaded, self._thread = ahead, ahead.thread
        self._next, self._now = EpochPosition(epoch + 1, 0), EpochPosition(epoch, start)
        iteration = EpochIterator(loaded, self._delivery, self._now)
        self._last = weakref.ref(iteration)
        return iteration

    def _loaded(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches of this process, as they are made: whatever it does at once, it does in the calling thread."""
        if self._order is None:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            whole = islice(self._begin(epoch, start), start, None)
            return whole if self._place.loads else map(none_like, whole)
        batches = self._order.batches(self.seed, epoch, start)
        if not self._place.loads:
            return map(self._hollow_of, batches)
        share = self._place.share
        mine, theirs = tee((list(share.of(batch)), batch[:1]) for batch in batches)
        self._feed.parts = (own or sample for own, sample in theirs)
        return _pad_empty_shares((bool(own) for own, _ in mine), self._begin(epoch, start))

    def _begin(self, epoch: int, start: int) -> Iterator[Any]:
        """Torch's iterator. Its workers' seeds are those of the other ranks of this replica: they draw the same."""
        self._torch.generator = seeded_generator(self.seed, epoch, start, self._place.share.rank)
        with torch.device("cpu"):
            return iter(self._torch)

    def _hollow_of(self, batch: list[Any]) -> Any:
        """What a batch looks like, learned from one sample."""
        if self._hollow is None:
            several = getattr(self.dataset, "__getitems__", None)
            samples = several(batch[:1]) if several else [self.dataset[batch[0]]]
            self._hollow = (none_like(self._collate(samples)),)
        return none_like(self._hollow[0])  # a new one, as it may be changed

    def _settle_workers(self) -> None:
        """Workers that stay serve one iteration at a time."""
        last = None if self._last is None else self._last()
        if last is not None and not last.ended:
            raise PlanError(
                "with persistent_workers=True there is one iteration at a time, but another one is under way: finish "
                "it, or let go of its iterator"
            )
        if self._thread is not None:
            self._thread.join()


class _IndexFeed:
    """The ``batch_sampler`` that torch's loader asks, with what is set for its next iterator."""

    def __init__(self) -> None:
        self.parts: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.parts


def _pad_empty_shares(filled: Iterator[bool], batches: Iterator[Any]) -> Iterator[Any]:
    """The batches; where the part has no samples, the one that was loaded for it is emptied."""
    for has_samples in filled:
        try:
            batch = next(batches)
        except StopIteration:
            raise PipelineError("the dataset ended the epoch too early: it raised StopIteration") from None
        yield batch if has_samples else without_samples(batch)
        del batch


# ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_batch(batch_size: int | None, batch_sampler: object, drop_last: bool, replicas: int) -> None:
    if batch_sampler is not None:
        if batch_size is not None or drop_last:
            raise PlanError("batch_sampler makes the mini-batches: leave out batch_size and drop_last")
        return
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise PlanError(f"batch_size must be a number of samples, at least 1, got {batch_size!r}")
    if batch_size < replicas:
        raise PlanError(
            f"batch_size={batch_size} is the whole mini-batch of {replicas} data replicas, some of which would never "
            f"get a sample: take at least {replicas}"
        )


def _check_stream(dataset: object, ordered: bool, num_workers: int) -> None:
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        raise PlanError("torch's DataPipes shard themselves by rank: wrap it in a Dataset or an IterableDataset")
    if ordered:
        raise PlanError("an IterableDataset has an order of its own: leave out shuffle, sampler and batch_sampler")
    if num_workers > 1:
        raise PlanError(
            f"num_workers={num_workers} processes would each read the whole IterableDataset: pass num_workers=1"
        )


def _check_numbers(seed: int, prefetch: int, options: Mapping[str, Any]) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise PlanError(f"seed must be a whole number, got {seed!r}")
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise PlanError(f"prefetch must be a number of batches, or 0 for none, got {prefetch!r}")
    if options.get("generator") is not None:
        raise PlanError("the order of samples and the workers' seeds come from seed: leave out generator")
    if not options.get("in_order", True):
        raise PlanError("in_order=False would give ranks their batches in different orders: leave it out")
