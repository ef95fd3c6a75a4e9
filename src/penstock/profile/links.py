"""Measure links between devices: latency and bandwidth of the channels of a pipeline.

    links = measure_links(mesh)                    # called on every rank of the mesh
    links.pairs[0, 1], links.worst                 # Link(latency, bandwidth)
    local_link("cuda:0", "cuda:1")                 # between two threads of a pipeline in one process
    process_link("cpu", 4)                         # between two of four processes, started for the measurement

A small and a large message are sent to the peer and back. The medians of half the round trips determine the link.

On a CPU, sending and receiving take compute time of the ranks. To measure it, all ranks compute as in a step and send
to the next rank in turn. Then they compute the same without messages:

    rank 0   ▕▔compute▔▏send▕▔compute▔▏    ▕▔compute▔▏send▕▔compute▔▏     …
    rank 1   ▕▔compute▔▏    ▕▔compute▔▏send▕▔compute▔▏    ▕▔compute▔▏send …

The CPU time of all threads minus that of the computation, with messages minus without, is the cost of the messages. It
is a mean, not a median: during some sends, gloo's thread spins for milliseconds, which is rare but a large part of the
cost.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import inf
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.channel.base import Endpoint
from penstock.engine.channel.local import LocalChannel
from penstock.engine.connections import Connections, Endpoints
from penstock.engine.failure.watch import Rendezvous
from penstock.engine.message import TensorMeta
from penstock.errors import PlanError
from penstock.profile.costs import Link, check_counts
from penstock.train.mesh import Mesh

LARGE = 4 << 20  # bytes
REPEATS = 11


@dataclass(frozen=True)
class Links:
    """Links between neighbouring ranks of a pipeline, by global ranks."""

    pairs: Mapping[tuple[int, int], Link]

    @property
    def worst(self) -> Link:
        """A link with the largest latency, smallest bandwidth and largest compute time of all links."""
        links = self.pairs.values()
        return Link(
            max((link.latency for link in links), default=0.0),
            min((link.bandwidth for link in links), default=inf),
            max((link.host for link in links), default=0.0),
            min((link.host_bandwidth for link in links), default=inf),
        )


def fit_line(small: float, large: float, small_size: int, size: int) -> tuple[float, float]:
    """Intercept (seconds) and rate (bytes per second) of the line through the times of two message sizes."""
    rate = (size - small_size) / (large - small) if large > small else inf
    return round(max(0.0, small - small_size / rate), 9), rate


def measure_links(mesh: Mesh, *, size: int = LARGE, repeats: int = REPEATS) -> Links:
    """Measure the link from each rank of a pipeline to the next, and from the last to the first, one after the other.

    All ranks of the mesh call it, and get all links. Replicas measure at the same time. ``size`` is the size of the
    large message in bytes. On a CPU, the compute time of messages is measured too, on all ranks at the same time.
    """
    check_counts(size=size, repeats=repeats)
    if not isinstance(mesh, Mesh):
        raise PlanError(f"links are measured between the ranks of a ps.Mesh, got {type(mesh).__name__}")
    rendezvous = Rendezvous(mesh.world_ranks, mesh.rank)
    connections = Connections(mesh, rendezvous.watch)
    endpoints: Endpoints = {}
    try:
        rendezvous.compare({"link messages": f"{size} bytes, {repeats} times", "mesh": mesh.sizes})
        count = mesh.pipe
        ring = [(rank, (rank + 1) % count) for rank in range(count if count > 2 else count - 1)]
        endpoints = connections.endpoints(ring, range(count), "links ", mesh.device)
        found = []
        for a, b in ring:
            if mesh.pipe_rank in (a, b):
                times = _ping_pong(endpoints[a, b, "F"], endpoints[b, a, "B"], mesh.pipe_rank == a, size, repeats)
                if mesh.pipe_rank == a:
                    found.append((mesh.ranks("pipe")[a], mesh.ranks("pipe")[b], *times))
        rows = sorted(row for one in rendezvous.gather({"links": found}) for row in one["links"])
        host = (0.0, inf)
        if ring and mesh.device.type == "cpu":
            host = _host_time(rendezvous, endpoints, mesh, max(large for *_, large in rows), size)
    except BaseException as error:
        rendezvous.cancel(error)
        raise
    finally:
        for endpoint in endpoints.values():
            endpoint.close()
        connections.close()
    rendezvous.watch.stop()
    return Links({(here, there): Link(*fit_line(small, large, 0, size), *host) for here, there, small, large in rows})


def _ping_pong(out: Endpoint, back: Endpoint, begins: bool, size: int, repeats: int) -> tuple[float, float]:
    """One-way seconds of a small and of a large message, measured by the rank that ``begins``."""
    device, found = out.device, []
    if not begins:
        out, back = back, out
    for count in (1, size):
        value = torch.zeros(count, dtype=torch.uint8, device=device)
        buffers = back.buffer_factories([TensorMeta(value.shape, value.dtype)])
        times = []
        for _ in range(repeats + 1):
            start = perf_counter()
            posted = back.recv(buffers)
            works = out.send([value]) if begins else []
            back.wait_tensors(posted)
            _synchronize(device)
            if not begins:
                works = out.send([value])
            out.wait(works)
            _synchronize(device)
            times.append((perf_counter() - start) / 2)
        found.append(statistics.median(times[1:]))
    return found[0], found[1]


def local_link(src: str | torch.device, dst: str | torch.device, *, size: int = LARGE, repeats: int = REPEATS) -> Link:
    """Measure the link between two threads of this process.

    Threads on the same device do not copy messages, and their bandwidth is infinite.
    """
    check_counts(size=size, repeats=repeats)
    here, there = torch.device(src), torch.device(dst)
    small = _thread_round_trip(here, there, 1, repeats)
    if here == there:
        return Link(round(small, 9))
    return Link(*fit_line(small, _thread_round_trip(here, there, size, repeats), 0, size))


def _thread_round_trip(src: torch.device, dst: torch.device, size: int, repeats: int) -> float:
    """Median of half the round trip of a message between two threads."""
    count = repeats + 1
    out, back = LocalChannel(count, src, dst), LocalChannel(count, dst, src)

    def answer() -> None:
        try:
            for k in range(count):
                back.send(k, _receive(out, k, dst))
        except BaseException:
            back.cancel()
            raise

    times, value = [], torch.zeros(size, dtype=torch.uint8, device=src)
    with ThreadPoolExecutor(1, "penstock link") as pool:
        other = pool.submit(answer)
        try:
            for k in range(count):
                _synchronize(src)
                start = perf_counter()
                out.send(k, [value])
                _receive(back, k, src)
                times.append((perf_counter() - start) / 2)
        except BaseException:
            out.cancel()
            other.result()  # raises the cause, if the other thread failed first
            raise
    return statistics.median(times[1:])


def _receive(channel: LocalChannel, k: int, device: torch.device) -> list[Tensor]:
    channel.wait_recv(k)
    found: list[Tensor] = channel.get(k)
    _synchronize(device)
    return found


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# ── compute time of messages on a CPU ────────────────────────────────────────────────────────────────────────────

ROWS, WIDTH = 64, 1024  # of the matrix product; like a layer, it evicts messages from the caches
LOAD_FACTOR, MIN_LOAD = 1.5, 0.001  # time of the computation: multiple of the message time; least number of seconds
ROUNDS = 64
FRACTIONS = 64, 2  # divisors of the large size; few messages of a model are smaller


def _host_time(
    rendezvous: Rendezvous, endpoints: Endpoints, mesh: Mesh, slowest: float, size: int
) -> tuple[float, float]:
    """``Link.host`` and ``Link.host_bandwidth``, means of all ranks; ``size`` bytes take up to ``slowest`` seconds."""
    rank, count = mesh.pipe_rank, mesh.pipe
    previous, following = (rank - 1) % count, (rank + 1) % count
    out = endpoints.get((rank, following, "F")) or endpoints[rank, following, "B"]
    back = endpoints.get((previous, rank, "F")) or endpoints[previous, rank, "B"]
    sizes = [max(1, size // part) for part in FRACTIONS]
    times = [host_time_per_message(out, back, n, slowest * n / size, rank % 2) for n in sizes]
    everyone = [one["times"] for one in rendezvous.gather({"times": times})]
    small, large = map(statistics.mean, zip(*everyone, strict=True))
    return fit_line(small, large, *sizes)


def host_time_per_message(out: Endpoint, back: Endpoint, size: int, slowest: float, turn: int) -> float:
    """Compute time of a message of ``size`` bytes on one of its two ranks.

    ``out`` is the channel to the next rank, ``back`` the channel from the previous one. All ranks call this function,
    neighbours with different ``turn`` (0 or 1). ``slowest`` is the longest time until the message arrives.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # all other threads are those of the channel
    try:
        rows, matrix = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH)
        found = []
        for _ in range(4):
            start = perf_counter()
            torch.mm(rows, matrix)
            found.append(perf_counter() - start)
        times = max(1, round(max(MIN_LOAD, LOAD_FACTOR * slowest) / max(min(found), 1e-6)))

        def load() -> None:
            for _ in range(times):
                torch.mm(rows, matrix)

        with_messages, without = (_cpu_time(out, back, load, count, turn) for count in (size, 0))
    finally:
        torch.set_num_threads(before)
    return max(0.0, (with_messages - without) / ROUNDS / 2)


def _cpu_time(out: Endpoint, back: Endpoint, load: Callable[[], None], size: int, turn: int) -> float:
    """CPU time of all threads without that of the load; without messages if ``size`` is 0."""
    value = torch.zeros(size, dtype=torch.uint8)
    buffers = back.buffer_factories([TensorMeta(value.shape, value.dtype)])
    computed, works = 0.0, list[object]()
    begin = process_time()
    posted = back.recv(buffers)
    for number in range(ROUNDS):
        for half in (0, 1):
            if half == turn:
                out.wait(works)
                works = out.send([value])
            start = thread_time()
            load()
            computed += thread_time() - start
        next_posted = back.recv(buffers) if number < ROUNDS - 1 else []
        back.wait_tensors(posted)
        posted = next_posted
    out.wait(works)
    return process_time() - begin - computed


# ── between processes ────────────────────────────────────────────────────────────────────────────────────────────

_TIMEOUT = 120.0  # seconds; on a busy machine, the import of torch takes most of it


class LinkError(PlanError):
    """The link between two processes could not be measured, because of ``reason``."""

    def __init__(self, reason: str) -> None:
        remedy = "Give link=, its latency and bandwidth, or costs="
        super().__init__(f"the link between processes could not be measured: {reason}. {remedy}")
        self.reason = reason


def process_link(device: str, ranks: int, timeout: float = _TIMEOUT) -> Link:
    """Measure the link between two of ``ranks`` processes on this machine; over NCCL for GPUs."""
    # The store is in this process, so that no other program can take its port.
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    kind, threads = torch.device(device).type, max(1, (os.cpu_count() or 1) // ranks)
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    started: list[subprocess.Popen[str]] = []
    errors = ""
    try:
        for rank in range(2):
            command = [sys.executable, "-m", __name__, str(rank), kind, str(store.port), str(threads)]
            process = subprocess.Popen(
                command, text=True, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            started.append(process)
        output, errors = started[0].communicate(timeout=timeout)
        if not output:
            errors = errors.strip() or f"process 0 ended with exit code {started[0].returncode}"
        return Link(**json.loads(output.splitlines()[-1]))
    except subprocess.TimeoutExpired as error:
        raise LinkError(f"no message arrived within {timeout:.0f} s") from error
    except (OSError, ValueError, IndexError) as error:
        raise LinkError((errors.strip() or str(error)).splitlines()[-1]) from error
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _measure_in_process(rank: int, kind: str, port: int, threads: int) -> None:
    """The main function of the two processes; rank 0 prints the link."""
    torch.set_num_threads(threads)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=_TIMEOUT)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    backends = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"  # the same as in ps.init
    dist.init_process_group(backends, store=store, rank=rank, world_size=2, timeout=timeout)
    link = measure_links(Mesh(data=1, pipe=2, tensor=1, device=device)).worst
    if rank == 0:
        print(json.dumps(asdict(link)), flush=True)
    else:
        time.sleep(_TIMEOUT)  # until the parent process kills it: rank 0 may still use the connection


if __name__ == "__main__":
    _measure_in_process(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
