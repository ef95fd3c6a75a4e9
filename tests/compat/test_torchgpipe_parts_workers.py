"""Workers: threads that compute tasks, one for each device."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from queue import Queue
from threading import Thread
from typing import Any

import pytest
import torch

from penstock.compat.torchgpipe.microbatch import Batch
from penstock.compat.torchgpipe.stream import CPUStream
from penstock.compat.torchgpipe.worker import Task, create_workers, join_workers, spawn_workers, worker

CPU = torch.device("cpu")


class Other:
    """A device that is none, and another one than all others: as many workers as there are of these."""

    type = "other"
    index = None


def others(count: int) -> Any:
    return [Other() for _ in range(count)]


def task(compute: Any, finalize: Any = None) -> Task:
    return Task(CPUStream, compute=compute, finalize=finalize)


@pytest.mark.parametrize("stream", [CPUStream, None])
def test_what_is_computed_comes_with_its_task(stream: Any) -> None:
    given = Task(stream, compute=lambda: Batch(torch.tensor(42)), finalize=None)
    with spawn_workers([CPU]) as (in_queues, out_queues):
        in_queues[0].put(given)
        ok, payload = out_queues[0].get()
    assert ok
    assert payload is not None
    assert payload[0] is given
    assert payload[1][0].item() == 42  # type: ignore[index]
    given.finalize(Batch(()))  # of which there is nothing to be done


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_an_exception_comes_as_it_was_and_the_worker_goes_on(kind: type[BaseException]) -> None:
    def fail() -> Batch:
        raise kind("told")

    with spawn_workers([CPU]) as (in_queues, out_queues):
        in_queues[0].put(task(fail))
        in_queues[0].put(task(lambda: Batch(torch.tensor(1))))
        ok, info = out_queues[0].get()
        assert out_queues[0].get()[0]
    assert not ok
    assert isinstance(info, tuple)
    assert info[0] is kind
    assert str(info[1]) == "told"
    assert info[2] is not None  # type: ignore[misc]


def test_a_device_that_there_is_not_is_told_and_nobody_waits_for_its_worker() -> None:
    with spawn_workers([torch.device("cuda", 99)]) as (_, out_queues):
        ok, info = out_queues[0].get(timeout=60)
    assert not ok
    assert isinstance(info, tuple)
    assert isinstance(info[1], (RuntimeError, AssertionError))


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_waits_for_all_that_was_given(fails: bool) -> None:
    done: list[int] = []

    def slow() -> Batch:
        time.sleep(0.05)
        done.append(1)
        return Batch(())

    def run() -> None:
        with spawn_workers(others(5)) as (in_queues, _):
            for in_queue in in_queues:
                in_queue.put(task(slow))
                in_queue.put(task(slow))
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            run()
    else:
        run()
    assert len(done) == 10


def test_there_is_a_worker_for_each_device_and_none_afterwards() -> None:
    threads: dict[int, threading.Thread] = {}

    def look(i: int) -> Batch:
        threads[i] = threading.current_thread()
        return Batch(())

    devices = [CPU, CPU, torch.device("cpu", 0), *others(2)]
    with spawn_workers(devices) as (in_queues, out_queues):
        assert len(in_queues) == len(out_queues) == 5
        assert in_queues[0] is in_queues[1] is in_queues[2]
        assert out_queues[0] is out_queues[1] is out_queues[2]
        assert len(set(map(id, in_queues))) == len(set(map(id, out_queues))) == 3
        for i, in_queue in enumerate(in_queues):
            in_queue.put(task(lambda i=i: look(i)))
    assert threads[0] is threads[1] is threads[2]
    assert len({*threads.values(), threading.current_thread()}) == 4
    for thread in threads.values():
        thread.join(10)
        assert not thread.is_alive()


def test_workers_can_be_joined_by_hand_and_what_they_made_is_dropped() -> None:
    in_queues, out_queues = create_workers([CPU, CPU, *others(1)])
    for in_queue in in_queues:
        in_queue.put(task(lambda: Batch(torch.zeros(1))))
    join_workers(in_queues, out_queues)
    assert all(queue.empty() for queue in (*in_queues, *out_queues))


def test_a_worker_is_a_function_of_its_queues() -> None:
    in_queue: Any = Queue()
    out_queue: Any = Queue()
    thread = Thread(target=worker, args=(in_queue, out_queue, CPU, False))
    thread.start()
    in_queue.put(task(lambda: Batch(torch.zeros(1, requires_grad=torch.is_grad_enabled()))))
    in_queue.put(None)
    thread.join(10)
    ok, (_, batch) = out_queue.get()
    assert ok
    assert not batch[0].requires_grad
    assert out_queue.get() == (False, None)


# ── the state of the thread that made the task ───────────────────────────────────────────────────────────────────


def state() -> tuple[bool, bool, torch.dtype]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_task_runs_in_the_state_of_its_maker(grad: bool, autocast: bool) -> None:
    seen = []

    def compute() -> Batch:
        seen.append(state())
        return Batch(())

    in_queues, out_queues = create_workers([CPU])  # before: they stay, and the state changes
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        made = task(compute, lambda batch: seen.append(state()))
    in_queues[0].put(made)
    out_queues[0].get()
    made.finalize(Batch(()))
    join_workers(in_queues, out_queues)
    assert seen == [(grad, autocast, torch.bfloat16 if autocast else torch.float32)] * 2
    assert state() == (True, False, torch.float32)


def test_workers_that_were_made_without_gradients_make_none() -> None:
    made = task(lambda: Batch(torch.zeros(1, requires_grad=torch.is_grad_enabled())))
    with torch.no_grad(), spawn_workers([CPU]) as (in_queues, out_queues):
        in_queues[0].put(made)
        _, payload = out_queues[0].get()
    assert payload is not None
    assert not payload[1][0].requires_grad  # type: ignore[index]


# ── what stays ───────────────────────────────────────────────────────────────────────────────────────────────────


class Held:
    """Something to be let go of."""


@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_that_waits_holds_nothing_of_its_last_task(fails: bool) -> None:
    """Without a collection of cycles: there are none."""
    held = Held()
    gone = weakref.ref(held)

    def compute(held: Held = held) -> Batch:
        if fails:
            raise ZeroDivisionError
        return Batch(())

    with spawn_workers([CPU]) as (in_queues, out_queues):
        gc.disable()
        try:
            made = task(compute)
            in_queues[0].put(made)
            outcome = out_queues[0].get()
            del compute, held, made, outcome
            deadline = time.monotonic() + 10
            while gone() is not None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert gone() is None
        finally:
            gc.enable()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_worker_of_a_gpu_computes_on_the_streams_of_its_tasks() -> None:
    gpu = torch.device("cuda")
    stream = torch.cuda.Stream(gpu)
    seen = []

    def compute() -> Batch:
        seen.append(torch.cuda.current_stream())
        return Batch(torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda"))

    with spawn_workers([gpu, torch.device("cuda", torch.cuda.current_device())]) as (in_queues, out_queues):
        assert in_queues[0] is in_queues[1]
        in_queues[0].put(Task(stream, compute=compute, finalize=None))
        ok, _ = out_queues[0].get()
    assert ok
    assert seen == [stream]
