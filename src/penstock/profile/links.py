"""How fast values go from device to device: a small and a large one sent there and back again, and the medians halved.

    links = measure_links(mesh)                    # on every rank of the mesh, together
    links.pairs[0, 1], links.worst                 # Link(latency, bandwidth)
    local_link("cuda:0", "cuda:1")                 # between the threads of a pipeline in one process

What is measured are the pipeline's own channels, so that all is in it that a value meets on its way there.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import inf
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import penstock
from penstock.engine.channel.base import Endpoint, WaitTimer
from penstock.engine.channel.local import LocalChannel
from penstock.engine.connections import Connections, Endpoints
from penstock.engine.failure.rendezvous import Rendezvous
from penstock.engine.message import TensorMeta
from penstock.errors import PlanError
from penstock.profile.costs import Link
from penstock.train.mesh import Mesh

__all__ = ["Links", "fit_link", "host_time_per_message", "local_link", "measure_links", "process_link"]


# What messages take of the time of ranks that compute on the host, where sending and receiving is the host's work.
#
# All ranks compute something, over and over, as in a step. Each sends a value to the next rank meanwhile, in its turn,
# so that values come while others compute; and for comparison all compute as much, and nothing is sent:
#
#     rank 0   ▕▔compute▔▏send▕▔compute▔▏    ▕▔compute▔▏send▕▔compute▔▏     …
#     rank 1   ▕▔compute▔▏    ▕▔compute▔▏send▕▔compute▔▏    ▕▔compute▔▏send …
#
# Counted is what this thread needs to begin and end it, and what the channel's own threads do: ranks compute with all
# cores, so these have none of their own, and take that time from them. It is time on the cores and not on the wall, and
# without that of the computing: so it does not matter what else the machine does, nor how long a value is waited for.
# It is the mean and not the median: now and then gloo's thread comes while a value is being sent, and runs for
# milliseconds until it may have what it needs. That is rare, and is much of what messages cost.

ROWS, WIDTH = 64, 1024  # of what is multiplied: it reads as much as a layer does, so that caches forget the values
LONGER, SHORTEST = 1.5, 0.001  # times as long as a value is under way; seconds
ROUNDS = 64


def host_time_per_message(out: Endpoint, back: Endpoint, size: int, slowest: float, turn: int) -> float:
    """The seconds that a value of ``size`` bytes takes of a rank's own time, at one end of its way.

    ``out`` leads to the next rank and ``back`` comes from the one before; all ranks call it, with a ``turn`` of 0 or 1,
    neighbours with different ones. ``slowest`` is how long the value is under way at most.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the threads of this process that compute are one, and the others are the channel's
    try:
        load = _load(max(SHORTEST, LONGER * slowest))
        exchanging, alone = (_cores(out, back, load, count, turn) for count in (size, 0))
    finally:
        torch.set_num_threads(before)
    return max(0.0, (exchanging - alone) / ROUNDS / 2)


def _load(seconds: float) -> Callable[[], None]:
    """Something to compute for about so long."""
    rows, matrix = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH)
    found = []
    for _ in range(4):
        start = perf_counter()
        torch.mm(rows, matrix)
        found.append(perf_counter() - start)
    times = max(1, round(seconds / max(min(found), 1e-6)))

    def load() -> None:
        for _ in range(times):
            torch.mm(rows, matrix)

    return load


def _cores(out: Endpoint, back: Endpoint, load: Callable[[], None], size: int, turn: int) -> float:
    """The time of all threads on the cores, without that of the load. Of 0 bytes nothing is sent."""
    value = torch.zeros(size, dtype=torch.uint8)
    buffers = back.buffer_factories([TensorMeta(value.shape, value.dtype)])
    computed, works = 0.0, list[object]()
    begin = process_time()
    coming = back.recv(buffers)
    for number in range(ROUNDS):
        for half in (0, 1):
            if half == turn:
                out.wait(works)
                works = out.send([value])
            start = thread_time()
            load()
            computed += thread_time() - start
        after = back.recv(buffers) if number < ROUNDS - 1 else []
        back.wait_tensors(coming)
        coming = after
    out.wait(works)
    return process_time() - begin - computed


LARGE = 4 << 20  # bytes
REPEATS = 11
PARTS = 64, 2  # of the large value, for a line through what both take of the host's time: few messages are smaller


@dataclass(frozen=True)
class Links:
    """The links between neighbours in pipelines, by their ranks in the world."""

    pairs: Mapping[tuple[int, int], Link]

    @property
    def worst(self) -> Link:
        """The largest latency and the smallest bandwidth of all, and the most of the host's time."""
        links = self.pairs.values()
        return Link(
            max((link.latency for link in links), default=0.0),
            min((link.bandwidth for link in links), default=inf),
            max((link.host for link in links), default=0.0),
            min((link.host_bandwidth for link in links), default=inf),
        )


def fit_link(small: float, large: float, size: int, host: tuple[float, float] = (0.0, inf)) -> Link:
    """The link over which a small value takes ``small`` seconds, and one of ``size`` bytes ``large``.

    ``host`` is what values take of the ranks' own time, as ``Link`` has it.
    """
    return Link(*_line(small, large, 0, size), *host)


def _line(small: float, large: float, less: int, size: int) -> tuple[float, float]:
    """The line through the seconds of values of two sizes: where it begins, and the bytes that take a second more."""
    rate = (size - less) / (large - small) if large > small else inf
    return round(max(0.0, small - less / rate), 9), rate


def measure_links(mesh: Mesh, *, size: int = LARGE, repeats: int = REPEATS) -> Links:
    """The links from each rank of a pipeline to the next, and from the last to the first, one after the other.

    All ranks of the mesh take part, and all learn of all links; replicas measure theirs at the same time. ``size`` is
    that of the large value in bytes. On a CPU all then measure at once what values take of the time of ranks that
    compute.
    """
    _check(size, repeats)
    if not isinstance(mesh, Mesh):
        raise PlanError(f"links are measured between the ranks of a ps.Mesh, got {type(mesh).__name__}")
    rendezvous = Rendezvous(mesh.world_ranks, mesh.rank)
    connections = Connections(mesh, rendezvous.watch, WaitTimer())
    endpoints: Endpoints = {}
    try:
        rendezvous.compare({"links of values of": f"{size} bytes, {repeats} times", "mesh": mesh.sizes})
        count = mesh.pipe
        ring = [(rank, (rank + 1) % count) for rank in range(count if count > 2 else count - 1)]
        endpoints = connections.endpoints(ring, range(count), "links ", mesh.device)
        found: dict[str, tuple[float, float]] = {}
        for a, b in ring:
            if mesh.pipe_rank in (a, b):
                times = _ping_pong(endpoints[a, b, "F"], endpoints[b, a, "B"], mesh.pipe_rank == a, size, repeats)
                if mesh.pipe_rank == a:
                    found[f"{mesh.pipe_ranks[a]} {mesh.pipe_ranks[b]}"] = times
        everyone = rendezvous.gather(found)
        host = (0.0, inf)
        if ring and mesh.device.type == "cpu":
            slowest = max(large for measured in everyone for _, large in measured.values())
            host = _host(rendezvous, endpoints, mesh, slowest, size)
    except BaseException as error:
        rendezvous.cancel(error)
        raise
    finally:
        for endpoint in endpoints.values():
            endpoint.close()
        connections.close()
    rendezvous.watch.stop()
    pairs = {}
    for measured in everyone:
        for key, (small, large) in measured.items():
            here, there = key.split()
            pairs[int(here), int(there)] = fit_link(small, large, size, host)
    return Links(dict(sorted(pairs.items())))


def _host(rendezvous: Rendezvous, endpoints: Endpoints, mesh: Mesh, slowest: float, size: int) -> tuple[float, float]:
    """What values take of a rank's own time, in the mean of all ranks; those of ``size`` are ``slowest`` under way."""
    rank, count = mesh.pipe_rank, mesh.pipe
    last, after = (rank - 1) % count, (rank + 1) % count
    out = endpoints.get((rank, after, "F")) or endpoints[rank, after, "B"]
    back = endpoints.get((last, rank, "F")) or endpoints[last, rank, "B"]
    sizes = [max(1, size // part) for part in PARTS]
    found = rendezvous.gather(
        {f"{n}": host_time_per_message(out, back, n, slowest * n / size, rank % 2) for n in sizes}
    )
    small, large = (statistics.mean(one[f"{n}"] for one in found) for n in sizes)
    return _line(small, large, *sizes)


def _ping_pong(out: Endpoint, back: Endpoint, begins: bool, size: int, repeats: int) -> tuple[float, float]:
    """The seconds that a small and a large value take, one way; known to the rank that begins."""
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
            _settle(device)
            if not begins:
                works = out.send([value])
            out.wait(works)
            _settle(device)
            times.append((perf_counter() - start) / 2)
        found.append(statistics.median(times[1:]))
    return found[0], found[1]


def local_link(src: str | torch.device, dst: str | torch.device, *, size: int = LARGE, repeats: int = REPEATS) -> Link:
    """The link from one device to another inside of one process, from a thread to another.

    Between threads that share a device nothing is copied: its bandwidth has no bound.
    """
    _check(size, repeats)
    here, there = torch.device(src), torch.device(dst)
    small = _hand_over(here, there, 1, repeats)
    if here == there:
        return Link(round(small, 9))
    return fit_link(small, _hand_over(here, there, size, repeats), size)


def _hand_over(src: torch.device, dst: torch.device, size: int, repeats: int) -> float:
    """The median of the seconds that a value takes from one thread to another."""
    count = repeats + 1
    out, back = LocalChannel(count, src, dst), LocalChannel(count, dst, src)
    failed: list[BaseException] = []

    def answer() -> None:
        try:
            for k in range(count):
                back.send(k, _taken(out, k, dst))
        except BaseException as error:
            failed.append(error)
            back.cancel()

    thread = threading.Thread(target=answer, name="penstock link", daemon=True)
    thread.start()
    times, value = [], torch.zeros(size, dtype=torch.uint8, device=src)
    try:
        for k in range(count):
            _settle(src)
            start = perf_counter()
            out.send(k, [value])
            _taken(back, k, src)
            times.append((perf_counter() - start) / 2)
    except BaseException:
        out.cancel()
        thread.join()
        if failed:
            raise failed[0] from None
        raise
    thread.join()
    return statistics.median(times[1:])


def _taken(channel: LocalChannel, k: int, device: torch.device) -> list[Tensor]:
    channel.wait_recv(k)
    found: list[Tensor] = channel.get(k)
    _settle(device)
    return found


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _check(size: int, repeats: int) -> None:
    for name, number in (("size", size), ("repeats", repeats)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise PlanError(f"{name}={number!r} must be a whole number from 1 up")


# The link between processes of a run that is to come: two are started here, send to each other, and end.
#
#     process_link("cpu", 4)         # of which each would have a fourth of the cores
#
# Between threads nothing is copied, between processes all is: a plan for the one is none for the other.

_PATIENCE = 120.0  # seconds: to import torch takes most of it, on a machine that is busy


def process_link(device: str, ranks: int) -> Link:
    """The link between two of ``ranks`` processes of this machine; over NCCL if they are to have GPUs."""
    # The store is here, on a port that the system gave it: no other program can take it in between.
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    kind, threads = torch.device(device).type, max(1, (os.cpu_count() or 1) // ranks)
    found = os.pathsep.join(filter(None, [str(Path(penstock.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    started: list[subprocess.Popen[str]] = []
    errors = ""
    try:
        for rank in range(2):
            words = [sys.executable, "-m", __name__, str(rank), kind, str(store.port), str(threads)]
            process = subprocess.Popen(
                words, text=True, env={**os.environ, "PYTHONPATH": found}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            started.append(process)
        said, errors = started[0].communicate(timeout=_PATIENCE)
        return Link(**json.loads(said.splitlines()[-1]))
    except subprocess.TimeoutExpired as error:
        raise _unknown(f"two processes have not done so within {_PATIENCE:.0f} s") from error
    except (OSError, ValueError, IndexError) as error:
        raise _unknown((errors.strip() or str(error)).splitlines()[-1]) from error
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _unknown(why: str) -> PlanError:
    return PlanError(
        f"the link between processes could not be measured: {why}. Give link=, its latency and bandwidth, or costs="
    )


def _work(rank: int, kind: str, port: int, threads: int) -> None:
    """One of the two processes: the first says what both have measured."""
    torch.set_num_threads(threads)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    patience = timedelta(seconds=_PATIENCE)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)  # type: ignore[attr-defined]
    backends = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"  # as ps.init has them
    dist.init_process_group(backends, store=store, rank=rank, world_size=2, timeout=patience)
    link = measure_links(Mesh(data=1, pipe=2, tensor=1, device=device)).worst
    if rank == 0:
        print(json.dumps(asdict(link)), flush=True)
    else:
        time.sleep(_PATIENCE)  # the first may still be at it: whoever started this one ends it


if __name__ == "__main__":
    _work(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
