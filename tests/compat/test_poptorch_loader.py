"""The loader's batches are those of a call, in every mode; threads and workers come and go."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, IterableDataset, SequentialSampler, TensorDataset, get_worker_info

import penstock.compat.poptorch as poptorch

Mode = poptorch.DataLoaderMode

# Python 3.12 warns of a fork beside threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def options() -> poptorch.Options:
    made = poptorch.Options().deviceIterations(2).replicationFactor(1)
    made.Training.gradientAccumulation(3)
    return made


def dataset(samples: int = 50) -> TensorDataset:
    return TensorDataset(torch.arange(samples, dtype=torch.float32)[:, None], torch.arange(samples))


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock loader")]


def end_soon() -> bool:
    deadline = time.monotonic() + 20
    while loader_threads() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return not loader_threads()


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"mode": Mode.Async},
        {"mode": Mode.Async, "async_options": {"buffer_size": 1, "early_preload": True, "load_indefinitely": False}},
        {"mode": Mode.AsyncRebatched},
        {"mode": Mode.AsyncRebatched, "rebatched_worker_size": 5, "num_workers": 2},
        {"mode": Mode.Async, "num_workers": 16},
        {"num_workers": 1},
    ],
    ids=str,
)
def test_batches_are_those_of_a_call(how: dict[str, Any], drop_last: bool) -> None:
    loader = poptorch.DataLoader(options(), dataset(), batch_size=2, drop_last=drop_last, **how)
    assert loader.combinedBatchSize == 12
    assert loader.options.device_iterations == 2
    assert isinstance(loader, torch.utils.data.DataLoader)
    sizes = [12, 12, 12, 12] + [2] * (not drop_last)
    assert len(loader) == len(sizes)
    for _ in range(2):  # epochs
        batches = list(loader)
        assert [len(x) for x, _ in batches] == sizes
        seen = torch.cat([labels for _, labels in batches])
        assert torch.equal(seen, torch.arange(sum(sizes)))
        assert all(torch.equal(x[:, 0].long(), labels) for x, labels in batches)
    loader.terminate()
    assert [len(x) for x, _ in loader] == sizes
    loader.terminate()
    assert end_soon()


@pytest.mark.parametrize("mode", [Mode.Sync, Mode.Async, Mode.AsyncRebatched])
def test_shuffled_every_epoch(mode: Any) -> None:
    torch.manual_seed(0)
    loader = poptorch.DataLoader(options(), dataset(48), batch_size=2, shuffle=True, mode=mode)
    epochs = [torch.cat([labels for _, labels in loader]) for _ in range(2)]
    for epoch in epochs:
        assert torch.equal(epoch.sort().values, torch.arange(48))
    assert not torch.equal(epochs[0], epochs[1])


@pytest.mark.parametrize("workers", [0, 1])
def test_interrupted_epochs(workers: int) -> None:
    loader = poptorch.DataLoader(options(), dataset(), batch_size=2, mode=Mode.Async, num_workers=workers)
    for _ in range(3):
        for x, _ in loader:
            assert x[0] == 0
            break
    assert len(list(loader)) == 4
    loader.terminate()
    del loader
    assert end_soon()


def test_deleted_loaders_end_their_threads() -> None:
    iter(poptorch.DataLoader(options(), dataset(), batch_size=2, mode=Mode.Async))
    assert end_soon()
    early = poptorch.AsynchronousDataAccessor([torch.zeros(1)] * 9, buffer_size=1, early_preload=True)
    assert loader_threads()
    del early
    assert end_soon()


class Failing(Dataset[Tensor]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Tensor:
        if index == 20:
            raise ValueError("sample 20 is lost")
        return torch.tensor(index)


@pytest.mark.parametrize("mode", [Mode.Sync, Mode.Async, Mode.AsyncRebatched])
def test_errors_of_the_dataset_reach_the_caller(mode: Any) -> None:
    loader = poptorch.DataLoader(options(), Failing(), batch_size=2, mode=mode)
    batches = iter(loader)
    assert len(next(batches)) == 12
    with pytest.raises(ValueError, match="sample 20 is lost"):
        next(batches)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(30)

    def __len__(self) -> int:
        return 30


@pytest.mark.parametrize("mode", [Mode.Sync, Mode.Async, Mode.AsyncRebatched])
def test_streams(mode: Any) -> None:
    loader = poptorch.DataLoader(options(), Stream(), batch_size=2, mode=mode)
    assert len(loader) == 2
    assert [batch.tolist() for batch in loader] == [list(range(12)), list(range(12, 24))]


class SharedStream(Stream):
    """Each worker has its own part of the stream."""

    def __iter__(self) -> Iterator[Tensor]:
        worker: Any = get_worker_info()
        yield from torch.arange(30)[worker.id :: worker.num_workers]


def test_rebatched_streams_lose_no_samples_to_several_workers() -> None:
    how: dict[str, Any] = {"mode": Mode.AsyncRebatched, "num_workers": 2, "rebatched_worker_size": 5}
    loader = poptorch.DataLoader(options(), SharedStream(), batch_size=2, **how)
    assert [batch.tolist() for batch in loader] == [list(range(12)), list(range(12, 24))]
    loader.terminate()


@pytest.mark.parametrize("mode", [poptorch.DataLoaderMode.Sync, poptorch.DataLoaderMode.Async])
def test_datasets_of_whole_batches(mode: Any) -> None:
    batches = [torch.full((6, 2), float(i)) for i in range(3)]
    loader = poptorch.DataLoader(poptorch.Options().deviceIterations(3), batches, batch_size=None, mode=mode)
    assert loader.combinedBatchSize is None
    assert len(loader) == 3
    torch.testing.assert_close(list(loader), batches)
    loader.terminate()


def test_batches_of_a_batch_sampler() -> None:
    sampler = BatchSampler(SequentialSampler(range(50)), 24, drop_last=True)
    loader = poptorch.DataLoader(options(), dataset(), batch_sampler=sampler, mode=Mode.Async)
    assert loader.combinedBatchSize == 24
    assert [len(x) for x, _ in loader] == [24, 24]


def test_the_accessor_runs_ahead_of_the_caller_and_no_further_than_its_buffer() -> None:
    loaded: list[int] = []

    class Source:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for number in range(9):
                loaded.append(number)
                yield {"x": torch.full((4,), number), "name": "batch"}

        def __len__(self) -> int:
            return 9

    accessor = poptorch.AsynchronousDataAccessor(Source(), buffer_size=2)
    assert len(accessor) == 9
    batches = iter(accessor)
    first = next(batches)
    deadline = time.monotonic() + 20
    while len(loaded) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert loaded == [0, 1, 2]
    rest = list(batches)
    assert [int(batch["x"][0]) for batch in [first, *rest]] == list(range(9))
    assert first["name"] == "batch"
    with pytest.raises(RuntimeError, match="lost"):
        list(poptorch.AsynchronousDataAccessor(map(_lose, range(3))))


def _lose(number: int) -> int:
    if number:
        raise RuntimeError("lost")
    return number


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size must be"),
        ({"async_options": {"buffer_size": 2}}, "for the modes Async"),
        ({"mode": Mode.Async, "async_options": {"buffer_size": 0}}, "buffer_size must be"),
    ],
)
def test_assertion_errors(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        poptorch.DataLoader(options(), dataset(), **wrong)


def test_options_come_first() -> None:
    with pytest.raises(poptorch.Error, match="Options first"):
        poptorch.DataLoader(dataset(), options())  # type: ignore[arg-type]
