"""A pipeline's connections can be cut from another thread: what waits for them fails, and nothing else does.

The two ends of every connection are in this process here, in two threads.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.engine.channel.groups import open_group
from penstock.engine.failure import sockets
from penstock.engine.failure.sockets import LivenessConnection, LivenessListener, PipelineSockets, StoreClient

CPU = torch.device("cpu")


@pytest.fixture
def store() -> Iterator[Any]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server


@pytest.fixture
def make(store: Any) -> Iterator[Callable[[], PipelineSockets]]:
    made: list[PipelineSockets] = []

    def one() -> PipelineSockets:
        made.append(PipelineSockets(store, "corner"))
        return made[-1]

    yield one
    for lines in made:
        lines.close()


def pair(make: Callable[[], PipelineSockets], name: str) -> tuple[list[PipelineSockets], list[Any]]:
    """The lines of two ranks that know each other, and a group on each."""
    lines = [make(), make()]
    for mine, other in (lines, lines[::-1]):
        assert other.address is not None
        mine.peer_addresses.add(other.address)
        mine.timeout = timedelta(seconds=60)
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: open_group(lines[rank], name, (0, 1), rank, CPU), (0, 1)))
    return lines, groups


def exchange(groups: list[Any]) -> float:
    received = torch.zeros(1)
    work = groups[1].recv([received], 0, 0)
    groups[0].send([torch.ones(1)], 1, 0).wait()
    work.wait()
    return float(received)


LARGE = torch.zeros(4 << 20)  # more than the system takes for a peer that does not receive
WAITS: dict[str, Callable[[Any], Any]] = {
    "receive": lambda group: group.recv([torch.zeros(1)], 1, 0),
    "send": lambda group: group.send([LARGE], 1, 0),
    "sum": lambda group: group.allreduce(torch.zeros(1)),
    "broadcast": lambda group: group.broadcast(torch.zeros(1), 1),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_of_gloo_fails_when_its_connections_are_cut(make: Callable[[], PipelineSockets], what: str) -> None:
    lines, groups = pair(make, "cut")
    _, others = pair(make, "other")
    work = WAITS[what](groups[0])
    threading.Timer(0.2, lines[0].shut_down).start()
    with pytest.raises(RuntimeError, match="Connection closed"):  # and not that the time is up
        work.wait()
    assert exchange(others) == 1


@pytest.mark.parametrize("cutter", [0, 1])
def test_either_end_may_cut(make: Callable[[], PipelineSockets], cutter: int) -> None:
    lines, groups = pair(make, "cut")
    work = groups[0].recv([torch.zeros(1)], 1, 0)
    threading.Timer(0.2, lines[cutter].shut_down).start()
    with pytest.raises(RuntimeError, match="Connection closed"):
        work.wait()


def test_a_wait_for_the_store_fails_too(store: Any, make: Callable[[], PipelineSockets]) -> None:
    """As for a peer that does not come to open its end of a group."""
    lines = make()
    threading.Timer(0.2, lines.shut_down).start()
    with pytest.raises(RuntimeError, match="Connection was likely closed"):
        open_group(lines, "alone", (0, 1), 0, CPU)
    store.set("still", "here")
    assert store.get("still") == b"here"


def test_sockets_of_others_are_left_alone(make: Callable[[], PipelineSockets]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        theirs, _ = server.accept()
        make().shut_down()
        with theirs:
            theirs.sendall(b"x")
            assert mine.recv(1) == b"x"


def connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        return mine, server.accept()[0]


def test_what_torch_has_to_ranks_that_have_stopped_is_cut(store: Any, make: Callable[[], PipelineSockets]) -> None:
    """And neither what the pipelines have, nor the store, nor what leads elsewhere."""
    _, groups = pair(make, "a pipeline that goes on")
    near, far = connection()
    sockets.publish_foreign_connections(store, 1)
    later, too_late = connection()
    sockets.abort_foreign_groups(store, [0])  # who has not shown anything
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    sockets.abort_foreign_groups(store, [0, 1])
    assert near.recv(1) == b""
    later.sendall(b"x")
    assert too_late.recv(1) == b"x"
    assert exchange(groups) == 1
    store.set("still", "here")
    for end in (near, far, later, too_late):
        end.close()


def test_lines_that_are_closed_leave_no_socket(make: Callable[[], PipelineSockets]) -> None:
    def sockets() -> int:
        links = []
        for name in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{name}"))
            except OSError:
                continue
        return sum(link.startswith("socket:") for link in links)

    before = sockets()
    lines, groups = pair(make, "leak")
    assert sockets() > before
    groups.clear()
    for line in lines:
        line.close()
    end = time.monotonic() + 10
    while sockets() > before and time.monotonic() < end:
        time.sleep(0.02)
    assert sockets() == before


def test_a_store_that_is_gone_is_noticed_without_asking_it() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    line = StoreClient(dist.PrefixStore("a", dist.PrefixStore("b", server)), "corner")
    line.store.set("key", "value")
    assert not line.gone
    line.shut_down()
    assert line.gone
    line.close()


def test_a_line_that_ended_well_serves_again_and_one_that_was_cut_does_not(store: Any) -> None:
    first, second = StoreClient(store, "first"), StoreClient(store, "second")
    connections = [line._connection for line in (first, second)]
    assert connections[0] is not connections[1]
    first.store.set("key", "of the first")
    second.shut_down()
    first.close(keep=True)
    second.close(keep=True)
    third, fourth = StoreClient(store, "third"), StoreClient(store, "fourth")
    assert third._connection is connections[0]
    assert fourth._connection is not connections[1]
    assert not third.store.check(["key"])  # which has another name before it
    fourth.store.set("key", "of the fourth")
    third.close()
    assert StoreClient(store, "fifth")._connection not in connections
    fourth.close()


def test_lines_to_another_store_are_not_taken(store: Any) -> None:
    StoreClient(store, "here").close(keep=True)
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    line = StoreClient(other, "here")
    line.store.set("key", "value")
    assert other.check(["here/key"])
    assert not store.check(["here/key"])
    line.close()


# ── beacons ──────────────────────────────────────────────────────────────────────────────────────────────────────


def ends(line: LivenessConnection) -> bool:
    end = time.monotonic() + 10
    while not line.broken and time.monotonic() < end:
        time.sleep(0.01)
    return line.broken


def test_a_lifeline_holds_as_long_as_the_beacon_burns() -> None:
    beacon = LivenessListener("127.0.0.1")
    line = LivenessConnection(beacon.address)
    time.sleep(0.1)
    assert not line.broken
    beacon.close()
    assert ends(line)
    line.close()
    with pytest.raises(ConnectionRefusedError):
        LivenessConnection(beacon.address)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_does_not_keep_the_beacon_burning() -> None:
    """The workers of a data loader are forks that may outlive the process that was killed."""
    beacon = LivenessListener("127.0.0.1")
    line = LivenessConnection(beacon.address)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        time.sleep(0.1)
        assert not line.broken
        beacon.close()
        assert ends(line)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        line.close()
