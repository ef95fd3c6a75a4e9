"""The connections of a pipeline can be shut down from another thread: only waits for them fail.

Both ends of every connection are in this process, in two threads.
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

from penstock.engine.channel.base import open_group
from penstock.engine.failure import sockets
from penstock.engine.failure.cause import store_unreachable
from penstock.engine.failure.sockets import (
    PipelineSockets,
    RankProcess,
    StoreClient,
    close_process_ports,
    publish_process,
)

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
        made.append(PipelineSockets(store, "prefix"))
        return made[-1]

    yield one
    for own in made:
        own.close(keep=False)


def pair(make: Callable[[], PipelineSockets], name: str) -> tuple[list[PipelineSockets], list[Any]]:
    """The sockets of two ranks that know each other's addresses, and a group on each."""
    ranks = [make(), make()]
    for own, other in (ranks, ranks[::-1]):
        own.peer_addresses.add(other.address)
        own.timeout = timedelta(seconds=60)
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: open_group(ranks[rank], name, (0, 1), rank, CPU), (0, 1)))
    return ranks, groups


def exchange(groups: list[Any]) -> float:
    received = torch.zeros(1)
    work = groups[1].recv([received], 0, 0)
    groups[0].send([torch.ones(1)], 1, 0).wait()
    work.wait()
    return float(received)


LARGE = torch.zeros(4 << 20)  # more than the system buffers for a peer that does not receive
WAITS: dict[str, Callable[[Any], Any]] = {
    "receive": lambda group: group.recv([torch.zeros(1)], 1, 0),
    "send": lambda group: group.send([LARGE], 1, 0),
    "sum": lambda group: group.allreduce(torch.zeros(1)),
    "broadcast": lambda group: group.broadcast(torch.zeros(1), 1),
}


@pytest.mark.parametrize("what", WAITS)
def test_shutdown_ends_a_wait_in_gloo(make: Callable[[], PipelineSockets], what: str) -> None:
    ranks, groups = pair(make, "shut down")
    _, others = pair(make, "other")
    work = WAITS[what](groups[0])
    threading.Timer(0.2, ranks[0].shut_down).start()
    with pytest.raises(RuntimeError, match="Connection closed"):  # not a timeout
        work.wait()
    assert exchange(others) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_either_end_may_shut_down(make: Callable[[], PipelineSockets], rank: int) -> None:
    ranks, groups = pair(make, "shut down")
    work = groups[0].recv([torch.zeros(1)], 1, 0)
    threading.Timer(0.2, ranks[rank].shut_down).start()
    with pytest.raises(RuntimeError, match="Connection closed"):
        work.wait()


def test_shutdown_ends_a_wait_for_the_store(store: Any, make: Callable[[], PipelineSockets]) -> None:
    """As for a peer that does not open its end of a group."""
    own = make()
    threading.Timer(0.2, own.shut_down).start()
    with pytest.raises(RuntimeError, match="Connection was likely closed"):
        open_group(own, "alone", (0, 1), 0, CPU)
    store.set("still", "here")
    assert store.get("still") == b"here"


def test_shutdown_leaves_other_sockets_alone(make: Callable[[], PipelineSockets]) -> None:
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


def test_foreign_connections_to_stopped_ranks_are_shut_down(store: Any, make: Callable[[], PipelineSockets]) -> None:
    """Those of pipelines, of the store, and to other ranks stay."""
    _, groups = pair(make, "a pipeline that continues")
    near, far = connection()
    sockets.publish_foreign_connections(store, 1)
    later, too_late = connection()
    sockets.abort_foreign_groups(store, [0])  # has published nothing
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


def test_close_leaves_no_socket(make: Callable[[], PipelineSockets]) -> None:
    def sockets() -> int:
        links = []
        for name in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{name}"))
            except OSError:
                continue
        return sum(link.startswith("socket:") for link in links)

    before = sockets()
    ranks, groups = pair(make, "leak")
    assert sockets() > before
    groups.clear()
    for own in ranks:
        own.close(keep=False)
    end = time.monotonic() + 10
    while sockets() > before and time.monotonic() < end:
        time.sleep(0.02)
    assert sockets() == before


def test_a_lost_store_is_noticed_without_a_request() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = StoreClient.open(dist.PrefixStore("a", dist.PrefixStore("b", server)), "prefix")
    client.store.set("key", "value")
    assert not client.gone
    client.shut_down()
    assert client.gone
    client.close(keep=False)


def test_store_connections_are_reused_unless_they_were_shut_down() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = StoreClient.open(server, "first"), StoreClient.open(server, "second")
    first.store.set("key", "of the first")
    second.shut_down()
    first.close(keep=True)
    second.close(keep=True)
    third, fourth = StoreClient.open(server, "third"), StoreClient.open(server, "fourth")
    assert first in (third, fourth)
    assert second not in (third, fourth)
    assert not third.store.check(["key"])  # another prefix
    third.close(keep=True)
    other = StoreClient.open(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), "another store")
    assert other not in (first, third, fourth)


def test_no_connection_is_tried_to_a_store_that_is_gone() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    with pytest.raises(dist.DistNetworkError, match="the connection to the store is broken"):
        StoreClient.open(client, "prefix")


# ── liveness ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def closed_connections() -> Iterator[None]:
    yield
    while sockets._connections:
        sockets._connections.popitem()[1].close()


def ends(process: RankProcess) -> bool:
    end = time.monotonic() + 10
    while not process.ended() and time.monotonic() < end:
        time.sleep(0.01)
    return process.ended()


def test_a_process_has_ended_when_its_port_is_closed(store: Any) -> None:
    process, too_late = RankProcess(store, 3), RankProcess(store, 3)
    assert not process.ended()  # nothing is published
    publish_process(store, 3)
    assert not process.ended()
    time.sleep(0.1)
    assert not process.ended()
    close_process_ports()
    assert ends(process)
    assert too_late.ended()  # its connection is refused
    publish_process(store, 3)
    assert not RankProcess(store, 3).ended()


def test_the_loopback_address_of_another_machine_says_nothing(store: Any) -> None:
    store.set("penstock/process/3", '["another machine", "127.0.0.1", 1]')
    assert not RankProcess(store, 3).ended()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_port_open(store: Any) -> None:
    """Data loader workers are forks that may outlive a killed process."""
    publish_process(store, 3)
    process = RankProcess(store, 3)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        time.sleep(0.1)
        assert not process.ended()
        close_process_ports()
        assert ends(process)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_silent_store_is_not_reported_as_gone(store: Any) -> None:
    """The request that times out breaks the connection, also for threads that use it afterwards."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for other in (server, store):
        first = store_unreachable(other, RuntimeError("Connection reset by peer"))
        assert first.message.endswith("is gone, and the store with it (killed, or out of memory?)")
    silent = store_unreachable(store, RuntimeError("Socket Timeout"))
    assert silent.message.startswith(f"the store on 127.0.0.1:{store.port} does not answer")
    assert store_unreachable(store, RuntimeError("Connection reset by peer")) == silent
    assert store_unreachable(store) == silent
    assert store_unreachable(server) == first
