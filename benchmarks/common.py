"""Measurement helpers of the benchmarks: rank processes with a deadline, a common start, interleaved variants."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = ["interleave", "interleave_one_at_a_time", "medians", "spawn", "time_on_all_ranks"]

T = TypeVar("T")
LEAD = 0.01  # seconds from the agreement on a common start to that start


# ── ranks ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def spawn(work: Callable[..., T], ranks: int, *args: Any, deadline: float, gloo: bool = True) -> list[T]:
    """Run ``work(*args)`` on every rank of a gloo world of new processes with one operator thread; their results.

    Without ``gloo``, ``work`` creates its own process group. All processes are ended in any case; a run of more than
    ``deadline`` seconds raises TimeoutError.
    """
    context = multiprocessing.get_context("spawn")
    port = _free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    workers = [
        context.Process(target=_rank_main, args=(work, args, rank, ranks, port, gloo, deadline, sender), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    results: dict[int, T] = {}
    end = time.monotonic() + deadline
    try:
        for worker, (_, sender) in zip(workers, pipes, strict=True):
            worker.start()
            sender.close()
        waiting: dict[Any, int] = {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{work.__module__}: ranks {sorted(waiting.values())} not done in {deadline:.0f} s")
            for receiver in ready:
                rank = waiting.pop(receiver)
                try:
                    error, results[rank] = receiver.recv()  # type: ignore[attr-defined]
                except EOFError:
                    error = f"its process ended with code {workers[rank].exitcode} and no result"
                if error:
                    raise RuntimeError(f"{work.__module__}, rank {rank}: {error}")
        return [results[rank] for rank in range(ranks)]
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.join(timeout=5.0 if len(results) == ranks else 0.1)
                if worker.is_alive():
                    worker.kill()
                    worker.join()


def _rank_main(
    work: Callable[..., Any],
    args: Sequence[Any],
    rank: int,
    ranks: int,
    port: int,
    gloo: bool,
    deadline: float,
    out: Connection,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    try:
        if gloo:
            dist.init_process_group("gloo", timeout=timedelta(seconds=deadline))
        result = work(*args)
        if gloo:
            dist.barrier()
        out.send((None, result))
    except BaseException:
        out.send((traceback.format_exc(), None))
    out.close()
    os._exit(0)  # without waiting for gloo's threads


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ── measuring ──────────────────────────────────────────────────────────────────────────────────────────────────────


def interleave(
    variants: Mapping[str, Callable[[], T]], rounds: int, *, warmup: int = 1, between: Callable[[], object] = gc.collect
) -> dict[str, list[T]]:
    """Run each variant once per round, in an order that rotates; garbage is collected only between runs."""
    names = list(variants)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        if number == 0:
            gc.collect()
            gc.freeze()  # existing objects are excluded: collecting between steps is cheap
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            between()
            gc.disable()
            try:
                value = variants[name]()
            finally:
                gc.enable()
            if number >= 0:
                found[name].append(value)
    gc.unfreeze()
    return found


def interleave_one_at_a_time(
    makers: Mapping[str, Callable[[], AbstractContextManager[Callable[[], T]]]],
    rounds: int,
    *,
    repeats: int = 2,
    warmup: int = 1,
) -> dict[str, list[T]]:
    """Like ``interleave``, but only one variant exists at a time: it is built, warmed up, measured and closed.

    An idle gloo process group costs CPU time: one of its threads polls a hundred times a second.
    """

    def visit(make: Callable[[], AbstractContextManager[Callable[[], T]]]) -> list[T]:
        with make() as step:
            for _ in range(warmup):
                step()
            gc.collect()
            return [step() for _ in range(repeats)]

    found = interleave({name: partial(visit, make) for name, make in makers.items()}, rounds, warmup=0)
    return {name: [value for visited in visits for value in visited] for name, visits in found.items()}


def time_on_all_ranks(work: Callable[[], object]) -> float:
    """Seconds from a common start on all ranks until the last one has finished ``work``; equal on every rank."""
    start = _largest(time.monotonic() + LEAD)  # the monotonic clock is common to all processes of a machine
    time.sleep(max(0.0, start - time.monotonic()))
    work()
    return _largest(time.monotonic()) - start


def _largest(value: float) -> float:
    number = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)


def medians(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in found.items()}
