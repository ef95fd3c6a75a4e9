"""How fast values go from device to device: a small and a large one sent there and back again, and the medians halved.

    links = measure_links(mesh)                    # on every rank of the mesh, together
    links.pairs[0, 1], links.worst                 # Link(latency, bandwidth)
    local_link("cuda:0", "cuda:1")                 # between the threads of a pipeline in one process

What is measured are the pipeline's own channels, so that all is in it that a value meets on its way there.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from time import perf_counter

import torch
from torch import Tensor

from penstock.engine.channel.local import LocalLane
from penstock.engine.channel.wire import Wire
from penstock.engine.connections import Connections
from penstock.engine.idle import Waited
from penstock.engine.jobs import Wires
from penstock.engine.meeting import Meeting
from penstock.engine.meta import TensorMeta
from penstock.errors import PlanError
from penstock.profile.costs import Link
from penstock.profile.hosttime import host_time
from penstock.train.mesh import Mesh

__all__ = ["Links", "link_between", "local_link", "measure_links"]

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


def link_between(small: float, large: float, size: int, host: tuple[float, float] = (0.0, inf)) -> Link:
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
    meeting = Meeting(mesh.world_ranks, mesh.rank)
    connections = Connections(mesh, meeting.watch, Waited())
    wires: Wires = {}
    try:
        meeting.compare({"links of values of": f"{size} bytes, {repeats} times", "mesh": mesh.sizes})
        count = mesh.pipe
        ring = [(rank, (rank + 1) % count) for rank in range(count if count > 2 else count - 1)]
        wires = connections.wires(ring, range(count), "links ", mesh.device)
        found: dict[str, tuple[float, float]] = {}
        for a, b in ring:
            if mesh.pipe_rank in (a, b):
                times = _ping_pong(wires[a, b, "F"], wires[b, a, "B"], mesh.pipe_rank == a, size, repeats)
                if mesh.pipe_rank == a:
                    found[f"{mesh.pipe_ranks[a]} {mesh.pipe_ranks[b]}"] = times
        everyone = meeting.gather(found)
        host = (0.0, inf)
        if ring and mesh.device.type == "cpu":
            slowest = max(large for measured in everyone for _, large in measured.values())
            host = _host(meeting, wires, mesh, slowest, size)
    except BaseException as error:
        meeting.cancel(error)
        raise
    finally:
        for wire in wires.values():
            wire.close()
        connections.close()
    meeting.watch.stop()
    pairs = {}
    for measured in everyone:
        for key, (small, large) in measured.items():
            here, there = key.split()
            pairs[int(here), int(there)] = link_between(small, large, size, host)
    return Links(dict(sorted(pairs.items())))


def _host(meeting: Meeting, wires: Wires, mesh: Mesh, slowest: float, size: int) -> tuple[float, float]:
    """What values take of a rank's own time, in the mean of all ranks; those of ``size`` are ``slowest`` under way."""
    rank, count = mesh.pipe_rank, mesh.pipe
    last, after = (rank - 1) % count, (rank + 1) % count
    out = wires.get((rank, after, "F")) or wires[rank, after, "B"]
    back = wires.get((last, rank, "F")) or wires[last, rank, "B"]
    sizes = [max(1, size // part) for part in PARTS]
    found = meeting.gather({f"{n}": host_time(out, back, n, slowest * n / size, rank % 2) for n in sizes})
    small, large = (statistics.mean(one[f"{n}"] for one in found) for n in sizes)
    return _line(small, large, *sizes)


def _ping_pong(out: Wire, back: Wire, begins: bool, size: int, repeats: int) -> tuple[float, float]:
    """The seconds that a small and a large value take, one way; known to the rank that begins."""
    device, found = out.device, []
    if not begins:
        out, back = back, out
    for count in (1, size):
        value = torch.zeros(count, dtype=torch.uint8, device=device)
        makers = back.makers([TensorMeta(value.shape, value.dtype)])
        times = []
        for _ in range(repeats + 1):
            start = perf_counter()
            posted = back.receive(makers)
            works = out.send([value]) if begins else []
            back.finish(posted)
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
    return link_between(small, _hand_over(here, there, size, repeats), size)


def _hand_over(src: torch.device, dst: torch.device, size: int, repeats: int) -> float:
    """The median of the seconds that a value takes from one thread to another."""
    count = repeats + 1
    out, back = LocalLane(count, src, dst), LocalLane(count, dst, src)
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


def _taken(lane: LocalLane, k: int, device: torch.device) -> list[Tensor]:
    lane.land(k)
    found: list[Tensor] = lane.take(k)
    _settle(device)
    return found


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _check(size: int, repeats: int) -> None:
    for name, number in (("size", size), ("repeats", repeats)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise PlanError(f"{name}={number!r} must be a whole number from 1 up")
