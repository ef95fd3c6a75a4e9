"""Messages between processes, tried out: two that are started for it, or those that a launcher has started."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from penstock.doctor.facts import Exchange
from penstock.errors import PenstockError
from penstock.train.launch import init

__all__ = ["between_ranks", "between_two"]

_START = 90.0  # seconds for a process to import torch, on a machine that is busy
_DEADLINE = 20.0  # seconds from then on
_SMALL, _LARGE = 8, 16 << 20  # bytes
_TIMES = {_SMALL: 100, _LARGE: 5}


def between_two(backend: str) -> Exchange:
    """Two processes on this machine, each with a GPU of its own if ``backend`` is nccl. Whatever happens, they end."""
    context = mp.get_context("spawn")
    # The store is here, on a port that the system gave it: no other program can take it in between.
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    started: list[tuple[Any, Connection]] = []
    try:
        for rank in range(2):
            inbox, outbox = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(rank, backend, store.port, outbox), daemon=True)
            process.start()
            outbox.close()  # so that the pipe ends with the process
            started.append((process, inbox))
        return _outcome(backend, started)
    except OSError as error:
        return Exchange(backend, error=f"no process can be started: {error}")
    finally:
        for process, inbox in started:
            process.kill()
            process.join()
            process.close()
            inbox.close()


def between_ranks() -> tuple[Exchange, ...]:
    """Each process of the launcher with the next one, one pair after the other. All of them call this.

    A rank has what it measured with the one after it.
    """
    try:
        device = init(timeout=_DEADLINE)
        backend = "nccl" if "nccl" in dist.get_backend_config() else "gloo"
        if backend == "gloo":
            device = torch.device("cpu")
        rank, mine = dist.get_rank(), []
        for pair in pairwise(range(dist.get_world_size())):
            if rank in pair:
                latency, bandwidth = _measured(pair, device)
                if rank == pair[0]:
                    mine.append(Exchange(backend, pair, latency, bandwidth))
            dist.all_reduce(torch.zeros(1, device=device))  # those who are not in the pair wait for it
        return tuple(mine)
    except (PenstockError, RuntimeError) as error:
        return (Exchange("torch.distributed", error=_first_line(error)),)


def _outcome(backend: str, started: list[tuple[Any, Connection]]) -> Exchange:
    """What the two processes tell: each that it is there, then what it measured. The first trouble is what counts."""
    last: object = None
    for patience, what in ((_START, "start"), (_DEADLINE, "exchange a message")):
        end = time.monotonic() + patience
        for rank, (process, inbox) in enumerate(started):
            if not inbox.poll(max(0.0, end - time.monotonic())):
                return Exchange(backend, error=f"process {rank} did not {what} within {patience:.0f} s")
            try:
                last = inbox.recv()
            except EOFError:
                process.join()
                return Exchange(backend, error=f"process {rank} ended with exit code {process.exitcode}")
            if isinstance(last, Exchange) and last.error is not None:
                return last
    assert isinstance(last, Exchange)
    return last


def _work(rank: int, backend: str, port: int, outbox: Connection) -> None:
    """One of the two processes."""
    outbox.send("here")
    try:
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_DEADLINE))  # type: ignore[attr-defined]
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=_DEADLINE)
        )
        latency, bandwidth = _measured((0, 1), device)
        outbox.send(Exchange(backend, None, latency, bandwidth))
        time.sleep(_DEADLINE)  # the other one may still be at it: whoever started this one ends it
    except Exception as error:
        outbox.send(Exchange(backend, error=_first_line(error)))


def _measured(ranks: tuple[int, int], device: torch.device) -> tuple[float, float]:
    """Latency and bandwidth. Messages go there and back: half of the time is a message's."""
    small, large = (_there_and_back(ranks, size, device) for size in (_SMALL, _LARGE))
    return statistics.median(small) / 2, 2 * _LARGE / min(large)


def _there_and_back(ranks: tuple[int, int], size: int, device: torch.device) -> list[float]:
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    first = dist.get_rank() == ranks[0]
    steps: list[Callable[..., Any]] = [dist.send, dist.recv] if first else [dist.recv, dist.send]
    other = ranks[1] if first else ranks[0]
    times = []
    for _ in range(1 + _TIMES[size]):
        start = time.perf_counter()
        for step in steps:
            step(message, other)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return times[1:]  # the first has the connections to make


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
