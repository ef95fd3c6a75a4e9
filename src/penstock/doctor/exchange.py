"""Messages between processes, tried out: two that are started for it, or those that a launcher has started.

They go through the channels of a pipeline, so that what works here works there.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from penstock.doctor.facts import Exchange
from penstock.errors import PenstockError
from penstock.profile.links import measure_links
from penstock.train.launch import init
from penstock.train.mesh import Mesh

__all__ = ["between_ranks", "between_two"]

_START = 90.0  # seconds for a process to import torch, on a machine that is busy
_DEADLINE = 20.0  # seconds from then on


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
    """Each process of the launcher with the next one, one pair after the other. All of them call this, and know all."""
    try:
        device = init(timeout=_DEADLINE)
        backend = "nccl" if device.type == "cuda" and "nccl" in dist.get_backend_config() else "gloo"
        return _measured(backend, Mesh(data=1, pipe=dist.get_world_size(), tensor=1, device=device))
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
        patience = timedelta(seconds=_DEADLINE)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)  # type: ignore[attr-defined]
        backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend  # as ps.init has them
        dist.init_process_group(backends, store=store, rank=rank, world_size=2, timeout=patience)
        (measured,) = _measured(backend, Mesh(data=1, pipe=2, tensor=1, device=device))
        outbox.send(Exchange(backend, None, measured.latency, measured.bandwidth))
        time.sleep(_DEADLINE)  # the other one may still be at it: whoever started this one ends it
    except Exception as error:
        outbox.send(Exchange(backend, error=_first_line(error)))


def _measured(backend: str, mesh: Mesh) -> tuple[Exchange, ...]:
    return tuple(
        Exchange(backend, pair, link.latency, link.bandwidth if math.isfinite(link.bandwidth) else None)
        for pair, link in measure_links(mesh).pairs.items()
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
