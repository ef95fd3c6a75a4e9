"""The order of samples: global mini-batches as lists of indices, the same on every rank, and each replica's share."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DistributedSampler

from penstock.errors import PlanError

SampleT = TypeVar("SampleT")

_CHUNK = 1 << 16  # indices of a permutation that are Python ints at a time
_REPEAT_CHECK = 100  # indices of a sampler that are drawn twice, to check that the order repeats


def seeded_generator(*parts: int) -> torch.Generator:
    """A random generator whose seed is a hash of ``parts``."""
    text = "/".join(map(str, parts))
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class ReplicaShare:
    """The share of data replica ``rank`` of ``count``: shares are contiguous and even, larger ones first.

    10 samples for 4 replicas:   0 1 2 | 3 4 5 | 6 7 | 8 9
    """

    count: int = 1
    rank: int = 0

    def of(self, samples: Sequence[SampleT]) -> Sequence[SampleT]:
        small, larger = divmod(len(samples), self.count)
        start = self.rank * small + min(self.rank, larger)
        return samples[start : start + small + (self.rank < larger)]


class BatchOrder:
    """The mini-batches of an epoch, as a function of seed and epoch. Samplers cover the whole dataset."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None,
        *,
        shuffle: bool,
        drop_last: bool,
        sampler: Iterable[Any] | None,
        batch_sampler: Iterable[Any] | None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.sampler = sampler
        self.batch_sampler = batch_sampler
        if not hasattr(dataset, "__getitem__"):
            raise PlanError(
                f"the dataset, a {type(dataset).__name__}, has no samples by index: give it __getitem__, or make it an "
                "IterableDataset"
            )
        if sampler is None and batch_sampler is None and not hasattr(dataset, "__len__"):
            raise PlanError(
                f"the dataset, a {type(dataset).__name__}, has no length: give it __len__, or pass a sampler, or make "
                "it an IterableDataset"
            )
        if shuffle + (sampler is not None) + (batch_sampler is not None) > 1:
            raise PlanError("shuffle, sampler and batch_sampler each say the order: pass one of them")
        for name, given in (("sampler", sampler), ("batch_sampler", batch_sampler)):
            if given is not None:
                _require_global(name, given)
                _require_repeatable(name, given)

    def batches(self, seed: int, epoch: int, start: int = 0) -> Iterator[list[Any]]:
        """The mini-batches of an epoch from number ``start`` on, without loading those before."""
        if self.batch_sampler is not None:
            return map(_check_not_empty, islice(_epoch_of(self.batch_sampler, seed, epoch), start, None))
        assert self.batch_size is not None
        first = start * self.batch_size
        if self.sampler is not None:
            return self._cut(islice(_epoch_of(self.sampler, seed, epoch), first, None))
        count = len(self.dataset)
        if not self.shuffle:
            return self._cut(iter(range(first, count)))
        order = torch.randperm(count, generator=seeded_generator(seed, epoch), device="cpu")
        return self._cut(index for at in range(first, count, _CHUNK) for index in order[at : at + _CHUNK].tolist())

    def _cut(self, indices: Iterator[Any]) -> Iterator[list[Any]]:
        assert self.batch_size is not None
        while batch := list(islice(indices, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def __len__(self) -> int:
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        assert self.batch_size is not None
        count = len(self.dataset if self.sampler is None else self.sampler)  # type: ignore[arg-type]
        return num_batches(count, self.batch_size, self.drop_last)


def num_batches(samples: int, batch_size: int, drop_last: bool) -> int:
    return samples // batch_size if drop_last else -(-samples // batch_size)


def _epoch_of(sampler: Iterable[Any], seed: int, epoch: int) -> Iterator[Any]:
    """One epoch of a sampler. It iterates over a copy, so that several epochs can be in progress."""
    return iter(_prepared(sampler, seeded_generator(seed, epoch), epoch))


def _prepared(sampler: Any, generator: torch.Generator, epoch: int) -> Any:
    """A copy of the sampler with its epoch set; it draws from ``generator`` unless it has one."""
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


def _require_global(name: str, sampler: Any) -> None:
    if isinstance(sampler, DistributedSampler):
        raise PlanError(
            f"{name} is a DistributedSampler, but the loader gives each replica its share itself: leave it out, or "
            "pass one that goes over the whole dataset"
        )
    if getattr(sampler, "sampler", None) is not None:
        _require_global(name, sampler.sampler)


def _require_repeatable(name: str, sampler: Iterable[Any]) -> None:
    """All ranks, and a resumed run, must get the same order."""
    one, other = (list(map(_comparable, islice(_epoch_of(sampler, 0, 0), _REPEAT_CHECK))) for _ in range(2))
    if one != other:
        raise PlanError(
            f"{name}, a {type(sampler).__name__}, gives another order each time, so ranks would load different "
            "samples: leave its generator out, and it draws from seed and epoch; or let it have set_epoch(epoch), and "
            "give the same order for the same epoch"
        )


def _comparable(index: Any) -> Any:
    """An index or a batch of indices as a value with a plain ``==``."""
    return index.tolist() if hasattr(index, "tolist") else index


def _check_not_empty(batch: Iterable[Any]) -> list[Any]:
    indices = list(batch)
    if not indices:
        raise PlanError("batch_sampler gave a mini-batch without samples: leave it out")
    return indices
