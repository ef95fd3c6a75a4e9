"""``ps.DataLoader``: each replica's share of every mini-batch, prefetched to the devices of the stages that use it."""

from __future__ import annotations

import copy
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, tee
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, IterDataPipe, MapDataPipe, default_collate

from penstock.errors import PipelineError, PlanError
from penstock.train.mesh import Mesh
from penstock.train.pipeline import Pipeline
from penstock.train.prefetch import BatchCopier, CopiedBatch, Prefetcher, map_leaves

Sample = TypeVar("Sample")

_CHUNK = 1 << 16  # indices of a permutation that are converted to Python ints at a time
_REPEAT_CHECK = 100  # indices that are drawn twice from a sampler, to check that its order is reproducible


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
        self._stream = isinstance(dataset, IterableDataset)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.shuffle = bool(shuffle)
        self.seed = seed
        self._sampler = sampler
        self._batch_sampler = batch_sampler
        self._check(num_workers, prefetch, options)
        self._collate = collate_fn or default_collate
        self._copier = BatchCopier(self._place.inputs, self._place.targets, pin_memory is not False)
        self._depth = prefetch if num_workers == 0 or self._copier.device is not None else 0
        self._lock = threading.Lock()  # one thread at a time reads the dataset
        self._next = _EpochPosition(0, 0)
        self._now: _EpochPosition | None = None
        self._last: weakref.ref[Any] | None = None
        self._structure: Any = None
        self._feed = _IndexFeed()
        options |= {"num_workers": num_workers, "pin_memory": bool(pin_memory) and self._copier.device is None}
        if self._stream:
            collate = partial(_collate_share, self._collate, self._place)
            options |= {"batch_size": batch_size, "drop_last": drop_last, "collate_fn": collate}
        else:
            options |= {"batch_sampler": self._feed, "collate_fn": self._collate}
        self._torch: torch_data.DataLoader[Any] = torch_data.DataLoader(dataset, **options)  # type: ignore[arg-type]

    def _check(self, num_workers: int, prefetch: int, options: Mapping[str, Any]) -> None:
        """Raise an error for conflicting arguments, and for arguments that give ranks different samples."""
        dataset, batch_size, replicas = self.dataset, self.batch_size, self._place.replicas
        samplers = {"sampler": self._sampler, "batch_sampler": self._batch_sampler}
        given = {name: sampler for name, sampler in samplers.items() if sampler is not None}
        if self._batch_sampler is not None:
            if batch_size is not None or self.drop_last:
                raise PlanError("batch_sampler makes the mini-batches: leave out batch_size and drop_last")
        elif not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise PlanError(f"batch_size must be a number of samples, at least 1, got {batch_size!r}")
        elif batch_size < replicas:
            raise PlanError(f"batch_size={batch_size} is too small for {replicas} replicas: pass at least {replicas}")
        if prefetch < 0:
            raise PlanError(f"prefetch must be a number of batches, or 0 for none, got {prefetch!r}")
        if options.get("generator") is not None:
            raise PlanError("the order of samples and the workers' seeds derive from seed: leave out generator")
        if not options.get("in_order", True):
            raise PlanError("in_order=False would give ranks their batches in different orders: leave it out")
        if isinstance(dataset, (IterDataPipe, MapDataPipe)):
            raise PlanError("torch's DataPipes shard themselves by rank: wrap it in a Dataset or an IterableDataset")
        if self._stream:
            if self.shuffle or given:
                raise PlanError("an IterableDataset has an order of its own: leave out shuffle and samplers")
            if num_workers > 1:
                raise PlanError(f"num_workers={num_workers} processes would each read the whole dataset: pass 1")
            return
        absent = "samples by index" if not hasattr(dataset, "__getitem__") else None
        if absent is None and not given and not hasattr(dataset, "__len__"):
            absent = "length"
        if absent is not None:
            raise PlanError(f"the dataset, a {type(dataset).__name__}, has no {absent}: add it, or use IterableDataset")
        if self.shuffle + len(given) > 1:
            raise PlanError("shuffle, sampler and batch_sampler each determine the order: pass one of them")
        for name, sampler in given.items():
            inner: Any = sampler
            while inner is not None:
                if isinstance(inner, DistributedSampler):
                    raise PlanError(f"{name} is a DistributedSampler, but the loader divides samples: leave it out")
                inner = getattr(inner, "sampler", None)
            drawn = [islice(_epoch_of(sampler, 0, 0), _REPEAT_CHECK) for _ in range(2)]
            one, other = ([i.tolist() if hasattr(i, "tolist") else i for i in indices] for indices in drawn)
            if one != other:
                raise PlanError(
                    f"{name}, a {type(sampler).__name__}, gives another order each time, so ranks would load different "
                    "samples: leave out its generator, so that it draws from seed and epoch; or implement "
                    "set_epoch(epoch), and return the same order for the same epoch"
                )

    def __len__(self) -> int:
        """The number of steps in an epoch."""
        try:
            if self._batch_sampler is not None:
                return len(self._batch_sampler)  # type: ignore[arg-type]
            assert self.batch_size is not None
            count = len(self.dataset if self._sampler is None else self._sampler)  # type: ignore[arg-type]
            return count // self.batch_size if self.drop_last else -(-count // self.batch_size)
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
                raise PlanError(f"saved with {name}={state[name]!r}, but this loader has {here!r}: make it as it was")
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
        if self._torch.persistent_workers:  # they serve one iterator at a time
            last = None if self._last is None else self._last()
            if last is not None and last.gi_frame is not None:
                raise PlanError("with persistent_workers=True there is one iteration at a time: finish the other one")
            with self._lock:  # wait until a thread of the last iterator has loaded its batch
                pass
        epoch, start = self._next.epoch, self._next.batches
        loaded: Iterator[CopiedBatch] = map(self._copier.send, self._local_batches(epoch, start))
        if self._depth and (self._place.loads or self._stream):
            loaded = Prefetcher(loaded, self._depth, self._lock, self._copier.device)
        self._next, self._now = _EpochPosition(epoch + 1, 0), _EpochPosition(epoch, start)
        iteration = self._receive(loaded, self._now)
        self._last = weakref.ref(iteration)
        return iteration

    def _receive(self, loaded: Iterator[CopiedBatch], position: _EpochPosition) -> Iterator[Any]:
        """The batches of one epoch, without references to past ones."""
        while True:
            try:
                batch = [self._copier.receive(next(loaded))]
            except StopIteration:
                position.ended = True
                return
            position.batches += 1
            yield batch.pop()

    def _local_batches(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches of this process. Set-up runs in the calling thread, and loading during iteration."""
        if self._stream:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            whole = islice(self._torch_iterator(epoch, start), start, None)
            return whole if self._place.loads else map(_none_like, whole)
        batches = self._index_batches(epoch, start)
        if not self._place.loads:
            return map(self._empty_structure_of, batches)
        shares, fed = tee((list(self._place.share_of(batch)), batch[:1]) for batch in batches)
        self._feed.parts = (own or sample for own, sample in fed)
        return _pad_empty_shares((bool(own) for own, _ in shares), self._torch_iterator(epoch, start))

    def _index_batches(self, epoch: int, start: int) -> Iterator[list[Any]]:
        """The global mini-batches of an epoch from number ``start`` on, as lists of indices that all ranks share."""
        if self._batch_sampler is not None:
            return map(_check_not_empty, islice(_epoch_of(self._batch_sampler, self.seed, epoch), start, None))
        assert self.batch_size is not None
        first = start * self.batch_size
        indices: Iterator[Any]
        if self._sampler is not None:
            indices = islice(_epoch_of(self._sampler, self.seed, epoch), first, None)
        else:
            count = len(self.dataset)  # type: ignore[arg-type]
            indices = iter(range(first, count))
            if self.shuffle:
                order = torch.randperm(count, generator=_seeded_generator(self.seed, epoch), device="cpu")
                indices = (i for at in range(first, count, _CHUNK) for i in order[at : at + _CHUNK].tolist())
        batches = iter(lambda: list(islice(indices, self.batch_size)), [])
        return (batch for batch in batches if len(batch) == self.batch_size or not self.drop_last)

    def _torch_iterator(self, epoch: int, start: int) -> Iterator[Any]:
        """Torch's iterator. The ranks of one replica have the same worker seeds, and so the same random numbers."""
        self._torch.generator = _seeded_generator(self.seed, epoch, start, self._place.replica)
        with torch.device("cpu"):
            return iter(self._torch)

    def _empty_structure_of(self, batch: list[Any]) -> Any:
        """The structure of a batch, from one sample, with None in place of every leaf."""
        if self._structure is None:
            several = getattr(self.dataset, "__getitems__", None)
            samples = several(batch[:1]) if several else [self.dataset[batch[0]]]
            self._structure = (_none_like(self._collate(samples)),)
        return _none_like(self._structure[0])  # a new object, which the caller may modify


@dataclass
class _EpochPosition:
    """The number of batches that an epoch has returned, and whether it has ended."""

    epoch: int
    batches: int
    ended: bool = False


@dataclass(frozen=True)
class _Placement:
    """A process's replica, whether the process loads data, and the devices of inputs and targets."""

    replicas: int = 1
    replica: int = 0
    loads: bool = True
    inputs: torch.device | None = None
    targets: torch.device | None = None

    def share_of(self, samples: Sequence[Any]) -> Sequence[Any]:
        """The replica's share of a mini-batch: shares are contiguous and even, larger ones first.

        10 samples for 4 replicas:   0 1 2 | 3 4 5 | 6 7 | 8 9
        """
        small, larger = divmod(len(samples), self.replicas)
        start = self.replica * small + min(self.replica, larger)
        return samples[start : start + small + (self.replica < larger)]


def _placement(mesh: Mesh | None, pipe: Pipeline | None, everywhere: bool) -> _Placement:
    """The placement of this process. With a mesh alone, first and last rank load: each may have the last stage."""
    if mesh is not None and pipe is not None and (pipe.mesh is None or mesh.sizes != pipe.mesh.sizes):
        raise PlanError(f"mesh and pipe disagree: {mesh!r}, but the pipeline is on {pipe.mesh!r}. Pass pipe alone")
    grid = mesh if pipe is None else pipe.mesh
    replica = (1, 0) if grid is None else (grid.data, grid.data_rank)
    if grid is not None and (everywhere or pipe is None):
        loads = everywhere or grid.pipe_rank in (0, grid.pipe - 1)
        device = grid.device if loads else None
        return _Placement(*replica, loads, device, device)
    if pipe is None:
        return _Placement(*replica)
    assert pipe.plan.devices is not None
    first, last = (torch.device(pipe.plan.devices[stage]) for stage in (0, -1))
    loads = pipe.has_first_stage or pipe.has_last_stage
    return _Placement(*replica, loads, first if pipe.has_first_stage else None, last if pipe.has_last_stage else None)


def _collate_share(collate: Callable[[list[Any]], Any], place: _Placement, samples: list[Any]) -> Any:
    """A ``collate_fn`` that gets all samples of a mini-batch and keeps a share."""
    own = list(place.share_of(samples))
    return collate(own) if own else without_samples(collate(samples[:1]))


class _IndexFeed:
    """The ``batch_sampler`` of torch's loader, which iterates over ``parts``."""

    def __init__(self) -> None:
        self.parts: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.parts


def _pad_empty_shares(filled: Iterator[bool], batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of this replica. For an empty share, one sample was loaded, whose batch is emptied here."""
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
        f"this replica gets no samples of the last mini-batch, and the loader cannot create an empty "
        f"{type(leaf).__name__}: return tensors from collate_fn, or pass drop_last=True"
    )


def _seeded_generator(*parts: int) -> torch.Generator:
    """A random generator whose seed is a hash of ``parts``."""
    text = "/".join(map(str, parts))
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    return torch.Generator().manual_seed(seed)


def _epoch_of(sampler: Iterable[Any], seed: int, epoch: int) -> Iterator[Any]:
    """An iterator over one epoch of a copy of the sampler, so that several epochs can be in progress."""
    return iter(_prepared(sampler, _seeded_generator(seed, epoch), epoch))


def _prepared(sampler: Any, generator: torch.Generator, epoch: int) -> Any:
    """A copy of the sampler for an epoch. It draws from ``generator`` unless it has its own generator."""
    if not any(hasattr(sampler, name) for name in ("generator", "sampler", "set_epoch")):
        return sampler
    own = copy.copy(sampler)
    if getattr(own, "generator", own) is None:
        own.generator = generator
    if getattr(own, "sampler", None) is not None:
        own.sampler = _prepared(own.sampler, generator, epoch)
    if hasattr(own, "set_epoch"):
        own.set_epoch(epoch)
    return own


def _check_not_empty(batch: Iterable[Any]) -> list[Any]:
    indices = list(batch)
    if not indices:
        raise PlanError("batch_sampler returned a mini-batch without samples: leave out empty mini-batches")
    return indices
