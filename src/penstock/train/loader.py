"""``ps.DataLoader``: each replica's share of every mini-batch, prefetched to the devices of the stages that use it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, tee
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils.data import Dataset, IterableDataset, IterDataPipe, MapDataPipe, default_collate

from penstock.errors import PipelineError, PlanError
from penstock.train.mesh import Mesh
from penstock.train.pipeline import Pipeline
from penstock.train.prefetch import BatchCopier, CopiedBatch, Prefetcher, map_leaves
from penstock.train.sampler import BatchOrder, ReplicaShare, num_batches, seeded_generator

Sample = TypeVar("Sample")


class DataLoader(Generic[Sample]):
    """Mini-batches of a dataset for one process of a mesh; without ``mesh`` and ``pipe``, a plain loader.

    ``batch_size`` is the *global* mini-batch, the samples of one step of all replicas. Each replica gets a contiguous
    share, so the mini-batches have the same samples in the same order for any number of replicas. An incomplete last
    mini-batch is kept unless ``drop_last=True``: replicas may get fewer samples, or empty tensors. ``shuffle`` derives
    the order from ``seed`` and the epoch, which advances with every ``iter()``. ``sampler`` and ``batch_sampler`` cover
    the whole dataset and are the same on every rank.

    With ``pipe`` only the ranks of the first and last stage load data; the others get the same structure with None in
    place of tensors, so ``for x, y in loader: pipe.step(x, y)`` runs on every rank. With ``mesh`` alone the first and
    last ranks of the pipeline load, with ``everywhere=True`` all ranks. Every rank reads all of an ``IterableDataset``.

    A thread keeps ``prefetch`` batches ready, copied from pinned memory to the GPUs of the stages that use them; with
    ``prefetch=0`` they are loaded on request. With ``num_workers`` processes load and the thread only copies.
    ``options`` are further arguments of ``torch.utils.data.DataLoader``.
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
        self._place = _placement(mesh, pipe, everywhere)
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
        self._order: BatchOrder | None = None
        if not stream:
            samplers = {"sampler": sampler, "batch_sampler": batch_sampler}
            self._order = BatchOrder(dataset, batch_size, shuffle=self.shuffle, drop_last=drop_last, **samplers)
        self._copier = BatchCopier(self._place.inputs, self._place.targets, pin_memory is not False)
        self._depth = prefetch if num_workers == 0 or self._copier.device is not None else 0
        self._lock = threading.Lock()  # one thread at a time reads the dataset
        self._next = _EpochPosition(0, 0)
        self._now: _EpochPosition | None = None
        self._last: weakref.ref[_EpochIterator] | None = None
        self._thread: threading.Thread | None = None  # of the latest iterator
        self._structure: Any = None
        self._feed = _IndexFeed()
        options |= {"num_workers": num_workers, "pin_memory": bool(pin_memory) and self._copier.device is None}
        if stream:
            collate = _CollateShare(self._collate, self._place.share)
            options |= {"batch_size": batch_size, "drop_last": drop_last, "collate_fn": collate}
        else:
            options |= {"batch_sampler": self._feed, "collate_fn": self._collate}
        self._torch: torch_data.DataLoader[Any] = torch_data.DataLoader(dataset, **options)  # type: ignore[arg-type]

    def __len__(self) -> int:
        """The number of steps in an epoch."""
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
        """The epoch in progress, or the next one."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter()``. A loaded state within that epoch is kept."""
        self._now = None
        if epoch != self._next.epoch:
            self._next = _EpochPosition(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """The position of the latest iterator: the same on every rank and for any number of replicas."""
        position = self._position
        return {"epoch": position.epoch, "batches": position.batches, "seed": self.seed, **self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` continue after the last batch that was returned before saving."""
        settings = self._settings()
        missing = [name for name in ("epoch", "batches", "seed", *settings) if name not in state]
        if missing:
            raise PlanError(f"this is not the state of a DataLoader: it has no {', '.join(missing)}")
        for name, here in settings.items():
            if state[name] != here:
                raise PlanError(
                    f"the state was saved with {name}={state[name]!r}, but this loader has {here!r}: its batches are "
                    "others. Make the loader as it was"
                )
        self.seed = state["seed"]
        self._next, self._now = _EpochPosition(state["epoch"], state["batches"]), None

    def _settings(self) -> dict[str, Any]:
        """The settings that determine the batches of an epoch, besides the seed."""
        samples = len(self.dataset) if hasattr(self.dataset, "__len__") else None
        return {"samples": samples, "batch_size": self.batch_size, "shuffle": self.shuffle}

    @property
    def _position(self) -> _EpochPosition:
        return self._next if self._now is None or self._now.ended else self._now

    # ── iterating ────────────────────────────────────────────────────────────────────────────────────────────

    def __iter__(self) -> Iterator[Any]:
        if self._torch.persistent_workers:
            self._wait_for_workers()
        epoch, start = self._next.epoch, self._next.batches
        loaded: Iterator[CopiedBatch] = map(self._copier.send, self._local_batches(epoch, start))
        if self._depth and (self._place.loads or self._order is None):
            ahead = Prefetcher(loaded, self._depth, self._lock, self._copier.device)
            loaded, self._thread = ahead, ahead.thread
        self._next, self._now = _EpochPosition(epoch + 1, 0), _EpochPosition(epoch, start)
        iteration = _EpochIterator(loaded, self._copier, self._now)
        self._last = weakref.ref(iteration)
        return iteration

    def _local_batches(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches of this process. Set-up runs here, in the calling thread; loading runs on iteration."""
        if self._order is None:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            whole = islice(self._torch_iterator(epoch, start), start, None)
            return whole if self._place.loads else map(_none_like, whole)
        batches = self._order.batches(self.seed, epoch, start)
        if not self._place.loads:
            return map(self._empty_structure_of, batches)
        share = self._place.share
        mine, theirs = tee((list(share.of(batch)), batch[:1]) for batch in batches)
        self._feed.parts = (own or sample for own, sample in theirs)
        return _pad_empty_shares((bool(own) for own, _ in mine), self._torch_iterator(epoch, start))

    def _torch_iterator(self, epoch: int, start: int) -> Iterator[Any]:
        """Torch's iterator. Ranks of one replica get the same worker seeds, so they draw the same numbers."""
        self._torch.generator = seeded_generator(self.seed, epoch, start, self._place.share.rank)
        with torch.device("cpu"):
            return iter(self._torch)

    def _empty_structure_of(self, batch: list[Any]) -> Any:
        """A batch structure with None as every leaf, learned from one sample."""
        if self._structure is None:
            several = getattr(self.dataset, "__getitems__", None)
            samples = several(batch[:1]) if several else [self.dataset[batch[0]]]
            self._structure = (_none_like(self._collate(samples)),)
        return _none_like(self._structure[0])  # a new object, which the caller may modify

    def _wait_for_workers(self) -> None:
        """Persistent workers serve one iterator at a time."""
        last = None if self._last is None else self._last()
        if last is not None and not last.ended:
            raise PlanError(
                "with persistent_workers=True there is one iteration at a time, but another one is in progress: finish "
                "it, or delete its iterator"
            )
        if self._thread is not None:
            self._thread.join()


@dataclass
class _EpochPosition:
    """The number of batches that an epoch has returned, and whether it has ended."""

    epoch: int
    batches: int
    ended: bool = False


class _EpochIterator:
    """One epoch, batch by batch, without references to past batches."""

    def __init__(self, source: Iterator[CopiedBatch], copier: BatchCopier, position: _EpochPosition) -> None:
        self._source = source
        self._copier = copier
        self._position = position
        self.ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        try:
            batch = self._copier.receive(next(self._source))
        except BaseException as error:
            self.ended = True
            self._position.ended = isinstance(error, StopIteration)  # a batch that failed can be requested again
            raise
        self._position.batches += 1
        return batch


@dataclass(frozen=True)
class _Placement:
    """A process's share, whether it loads data, and the devices of inputs and targets."""

    share: ReplicaShare
    loads: bool = True
    inputs: torch.device | None = None
    targets: torch.device | None = None


def _placement(mesh: Mesh | None, pipe: Pipeline | None, everywhere: bool) -> _Placement:
    """With a mesh alone, the last stage may be on the pipeline's last or first rank (V placement): both load."""
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
        return _Placement(share, loads, grid.device if loads else None, grid.device if loads else None)
    if pipe is None:
        return _Placement(share)
    devices = pipe.plan.devices
    assert devices is not None
    return _Placement(
        share,
        pipe.has_first_stage or pipe.has_last_stage,
        torch.device(devices[0]) if pipe.has_first_stage else None,
        torch.device(devices[-1]) if pipe.has_last_stage else None,
    )


def _grid(mesh: Mesh) -> tuple[Any, ...]:
    return mesh.sizes, mesh.world_ranks, mesh.device


@dataclass(frozen=True)
class _CollateShare:
    """A ``collate_fn`` that gets all samples of a mini-batch and keeps a share."""

    collate: Callable[[list[Any]], Any]
    share: ReplicaShare

    def __call__(self, samples: list[Any]) -> Any:
        own = list(self.share.of(samples))
        return self.collate(own) if own else without_samples(self.collate(samples[:1]))


class _IndexFeed:
    """The ``batch_sampler`` of torch's loader: iterates over the ``parts`` that were set last."""

    def __init__(self) -> None:
        self.parts: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.parts


def _pad_empty_shares(filled: Iterator[bool], batches: Iterator[Any]) -> Iterator[Any]:
    """The batches. Where the share is empty, the batch of one sample loaded in its place is emptied."""
    for has_samples in filled:
        try:
            batch = next(batches)
        except StopIteration:
            raise PipelineError("the dataset ended the epoch too early: it raised StopIteration") from None
        yield batch if has_samples else without_samples(batch)
        del batch


def without_samples(batch: Any) -> Any:
    """A batch with the same structure and dtypes and no samples."""
    return map_leaves(_empty_leaf, batch, is_leaf=_is_list_of_text)


def _none_like(batch: Any) -> Any:
    return map_leaves(lambda leaf: None, batch)


def _is_list_of_text(value: Any) -> bool:
    """Whether this is a list with one string per sample, as the default ``collate_fn`` returns."""
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
