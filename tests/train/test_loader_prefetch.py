"""Loaders ahead of time: threads, workers, where a run resumes, and copies to a GPU."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import data as torch_data

import penstock as ps
from tests.support.loading import (
    FakeMesh,
    FakePipeline,
    IterableNumbers,
    RecordingDataset,
    batches_per_replica,
    global_batches,
    sample_numbers,
)
from tests.support.models import assert_same, threads_end

# ── prefetch ─────────────────────────────────────────────────────────────────────────────────────────────────────


def loader_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("penstock loader")}


def soon(condition: Any, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_so_many_batches_are_ready_and_no_more(prefetch: int) -> None:
    dataset = RecordingDataset(40)
    it = iter(ps.DataLoader(dataset, 2, prefetch=prefetch))
    assert soon(lambda: len(dataset.read) == 2 * prefetch)
    next(it)
    next(it)
    assert soon(lambda: len(dataset.read) == 2 * (prefetch + 2))
    time.sleep(0.1)
    assert len(dataset.read) == 2 * (prefetch + 2)


def test_without_prefetch_nothing_is_loaded_before_it_is_asked_for() -> None:
    before = loader_threads()
    dataset = RecordingDataset(10)
    it = iter(ps.DataLoader(dataset, 2, prefetch=0))
    assert dataset.read == []
    next(it)
    assert dataset.read == [0, 1]
    assert loader_threads() <= before


def test_a_rank_that_loads_nothing_needs_no_thread() -> None:
    before = loader_threads()
    it = iter(ps.DataLoader(RecordingDataset(10), 2, mesh=FakeMesh(1, 0, 3, 1)))
    assert next(it) == [None, None]
    assert loader_threads() <= before


def test_leaving_early_ends_the_thread_and_keeps_nothing() -> None:
    before = loader_threads()
    dataset = RecordingDataset(1000)
    loader = ps.DataLoader(dataset, 2)
    for batch in loader:
        kept = weakref.ref(batch[0])
        break
    assert threads_end(loader_threads() - before)
    del batch
    assert kept() is None
    last = weakref.ref(dataset)
    del loader, dataset
    gc.collect()
    assert last() is None


def test_an_epoch_to_its_end_leaves_no_thread() -> None:
    before = loader_threads()
    loader = ps.DataLoader(RecordingDataset(10), 2)
    for _ in range(3):
        assert len(list(loader)) == 5
    assert threads_end(loader_threads() - before)


def test_a_batch_that_was_given_out_is_kept_by_nobody() -> None:
    it = iter(ps.DataLoader(RecordingDataset(10), 2))
    batch = next(it)
    kept = weakref.ref(batch[0])
    del batch
    assert kept() is None


class Broken(RecordingDataset):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 5:
            raise ValueError("sample 5 is bad")
        return super().__getitem__(index)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_comes_with_next_and_shows_where_it_was(prefetch: int) -> None:
    loader = ps.DataLoader(Broken(10), 2, prefetch=prefetch)
    it = iter(loader)
    assert len([next(it), next(it)]) == 2
    message, frames = "", []
    try:
        next(it)
    except ValueError as error:
        message, frames = str(error), [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert message == "sample 5 is bad"
    assert "__getitem__" in frames
    assert list(it) == []
    assert loader.state_dict()["batches"] == 2
    assert loader.epoch == 0
    failed = weakref.ref(it)
    del it
    assert failed() is None  # no cycle with the error


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_dataset_cannot_end_the_epoch_on_one_rank_alone(prefetch: int) -> None:
    class Short(RecordingDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return next(iter(())) if index == 3 else super().__getitem__(index)

    with pytest.raises(ps.PipelineError, match="raised StopIteration"):
        list(ps.DataLoader(Short(6), 2, prefetch=prefetch))


def test_two_iterators_at_once_do_not_read_at_once() -> None:
    class Alone(RecordingDataset):
        inside = 0
        most = 0

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            self.inside += 1
            self.most = max(self.most, self.inside)
            time.sleep(0.002)
            self.inside -= 1
            return super().__getitem__(index)

    dataset = Alone(12)
    loader = ps.DataLoader(dataset, 3)
    both = [(a[1].tolist(), b[1].tolist()) for a, b in zip(loader, loader, strict=True)]
    assert both == [(part, part) for part in ([0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11])]
    assert dataset.most == 1


LEAVES = """
import torch
import penstock as ps

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return sum(torch.zeros(100_000) + index for _ in range(20))

it = iter(ps.DataLoader(Slow(), 4))
next(it)
"""


def test_a_program_that_ends_in_the_middle_of_an_epoch_ends_well() -> None:
    """Python ended the thread within torch's code, at which C++ ended the process: "terminate called without …"."""
    ended = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_workers_load_the_same_parts_without_a_thread() -> None:
    before = loader_threads()
    it = iter(ps.DataLoader(torch.arange(9), 4, num_workers=1))  # type: ignore[arg-type]
    assert next(it).tolist() == [0, 1, 2, 3]
    assert loader_threads() <= before
    parts = batches_per_replica(torch.arange(9), 4, 2, num_workers=2, prefetch_factor=1)
    assert_same(global_batches(parts), list(torch_data.DataLoader(torch.arange(9), 4)))  # type: ignore[arg-type]
    assert [len(part) for part in parts[1]] == [2, 2, 0]


def test_one_worker_reads_a_stream() -> None:
    parts = batches_per_replica(IterableNumbers(9), 4, 2, num_workers=1)
    assert [part.tolist() for part in global_batches(parts)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


class Draws(RecordingDataset):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(()), random.random()


def test_workers_of_one_replica_draw_alike_and_those_of_another_do_not() -> None:
    def drawn(replica: int, pipe_rank: int) -> list[float]:
        loader = ps.DataLoader(Draws(4), 4, mesh=FakeMesh(2, replica, 2, pipe_rank), num_workers=1)
        return [number for _ in range(2) for batch in loader for number in torch.stack(batch).flatten().tolist()]

    first, last, other = drawn(0, 0), drawn(0, 1), drawn(1, 0)
    assert first == last
    assert len(set(first + other)) == len(first + other)


@pytest.mark.parametrize("thread", [False, True])
def test_workers_that_stay_serve_one_iteration_at_a_time(thread: bool) -> None:
    loader = ps.DataLoader(RecordingDataset(6), 2, shuffle=True, num_workers=1, persistent_workers=True)
    loader._depth = 2 if thread else 0  # as where batches are copied to a GPU
    plain = ps.DataLoader(RecordingDataset(6), 2, shuffle=True)
    assert sample_numbers(loader) == sample_numbers(plain)
    for _ in loader:
        break
    next(iter(plain))
    it = iter(loader)
    next(it)
    with pytest.raises(ps.PlanError, match="one iteration at a time"):
        iter(loader)
    del it
    next(iter(plain))
    assert sample_numbers(loader) == sample_numbers(plain)


# ── resuming ─────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_resuming_goes_on_with_the_next_batch_for_any_number_of_replicas(draw: st.DataObject) -> None:
    samples = draw.draw(st.integers(1, 30), "samples")
    batch_size = draw.draw(st.integers(3, 7), "batch_size")
    shuffle = draw.draw(st.booleans(), "shuffle")
    before, after = (draw.draw(st.integers(1, 3), when) for when in ("replicas before", "replicas after"))
    given_out = draw.draw(st.integers(0, 3 * -(-samples // batch_size)), "given out")
    dataset = torch.arange(samples)
    plain = ps.DataLoader(dataset, batch_size, shuffle=shuffle, seed=3)
    expected = [x for _ in range(3) for x in plain]

    states = []
    for rank in range(before):
        loader = ps.DataLoader(dataset, batch_size, mesh=FakeMesh(before, rank), shuffle=shuffle, seed=3)
        left, state = given_out, loader.state_dict()
        while left:
            for _ in loader:
                left -= 1
                state = loader.state_dict()
                if not left:
                    break
        states.append(state)
    assert all(state == states[0] for state in states)

    parts = []
    for rank in range(after):
        loader = ps.DataLoader(dataset, batch_size, mesh=FakeMesh(after, rank), shuffle=shuffle, seed=99)
        loader.load_state_dict(states[0])
        parts.append([x for _ in range(loader.epoch, 3) for x in loader])
    assert_same(global_batches(parts), expected[given_out:])


def test_skipped_samples_are_not_read() -> None:
    for options in ({}, {"shuffle": True}, {"sampler": range(12)}, {"prefetch": 0}):
        loader = ps.DataLoader(RecordingDataset(12), 3, **options)  # type: ignore[arg-type]
        it = iter(loader)
        next(it)
        next(it)
        resumed = ps.DataLoader(RecordingDataset(12), 3, **options)  # type: ignore[arg-type]
        resumed.load_state_dict(loader.state_dict())
        assert sample_numbers(resumed) == [y.tolist() for _, y in it]
        assert len(resumed.dataset.read) == 6  # type: ignore[union-attr]


def test_what_was_only_prefetched_counts_as_not_given_out() -> None:
    dataset = RecordingDataset(12)
    loader = ps.DataLoader(dataset, 2, prefetch=4)
    it = iter(loader)
    next(it)
    assert soon(lambda: len(dataset.read) == 10)
    assert loader.state_dict()["batches"] == 1


def test_states_between_epochs_and_at_their_ends() -> None:
    loader = ps.DataLoader(RecordingDataset(4), 2)

    def at() -> tuple[int, int]:
        return loader.state_dict()["epoch"], loader.state_dict()["batches"]

    assert at() == (0, 0)
    seen = [at() for _ in loader]
    assert seen == [(0, 1), (0, 2)]
    assert at() == (1, 0)
    for _ in loader:
        break
    assert at() == (1, 1)
    state = loader.state_dict()
    assert sample_numbers(loader) == [[0, 1], [2, 3]]
    assert at() == (3, 0)
    loader.load_state_dict(state)
    assert loader.epoch == 1
    loader.set_epoch(1)  # of a loop that says it each time
    assert sample_numbers(loader) == [[2, 3]]
    assert at() == (2, 0)
    for _ in loader:
        break
    loader.set_epoch(3)  # that one is given up
    assert at() == (3, 0)


def test_a_state_in_a_stream_and_with_workers() -> None:
    for dataset, options in (
        (IterableNumbers(7), {}),
        (IterableNumbers(7), {"num_workers": 1}),
        (torch.arange(7), {"num_workers": 1}),
    ):
        loader = ps.DataLoader(dataset, 2, **options)  # type: ignore[arg-type, var-annotated]
        it = iter(loader)
        next(it)
        again = ps.DataLoader(dataset, 2, **options)  # type: ignore[arg-type, var-annotated]
        again.load_state_dict(loader.state_dict())
        assert [x.tolist() for x in again] == [[2, 3], [4, 5], [6]]
        del it


def test_a_state_of_other_batches_is_refused() -> None:
    state = ps.DataLoader(RecordingDataset(4), 2).state_dict()
    with pytest.raises(ps.PlanError, match=r"saved with batch_size=2, but this loader has 3"):
        ps.DataLoader(RecordingDataset(4), 3).load_state_dict(state)
    with pytest.raises(ps.PlanError, match=r"saved with samples=4, but this loader has 5"):
        ps.DataLoader(RecordingDataset(5), 2).load_state_dict(state)
    with pytest.raises(ps.PlanError, match=r"saved with shuffle=False"):
        ps.DataLoader(RecordingDataset(4), 2, shuffle=True).load_state_dict(state)
    with pytest.raises(ps.PlanError, match=r"not the state of a DataLoader: it has no batches, seed"):
        ps.DataLoader(RecordingDataset(4), 2).load_state_dict(
            {"epoch": 1, "samples": 4, "batch_size": 2, "shuffle": False}
        )


# ── GPUs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("pin_memory", [None, False])
def test_batches_arrive_on_the_gpu(num_workers: int, prefetch: int, pin_memory: bool | None) -> None:
    """Batches of many sizes, so that memory is used again, each read by work that the GPU comes to late."""
    sizes = [1 + 37 * i % 251 for i in range(40)]
    starts = [sum(sizes[:i]) for i in range(40)]
    dataset = torch_data.TensorDataset(torch.arange(sum(sizes))[:, None].repeat(1, 4096), torch.arange(sum(sizes)))
    batches = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    options: dict[str, Any] = {"num_workers": num_workers, "prefetch": prefetch, "pin_memory": pin_memory}
    pipe = FakePipeline(None, 0, 3, devices=["cuda:0"] * 4)
    seen = []
    for x, y in ps.DataLoader(dataset, batch_sampler=batches, pipe=pipe, **options):
        assert x.is_cuda
        assert y.is_cuda
        torch.cuda._sleep(2_000_000)
        seen.append((x.min(), x.max(), y.sum()))
        del x, y
    for (low, high, total), batch in zip(seen, batches, strict=True):
        assert (int(low), int(high), int(total)) == (batch[0], batch[-1], sum(batch))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_data_that_is_on_the_gpu_stays_there() -> None:
    dataset = torch_data.TensorDataset(torch.arange(12.0, device="cuda"), torch.arange(12, device="cuda"))
    loader = ps.DataLoader(dataset, 5, pipe=FakePipeline(None, 0, 3, devices=["cuda:0"] * 4))
    assert Counter(int(y) for _, part in loader for y in part) == Counter(range(12))
