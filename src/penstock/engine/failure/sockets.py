"""The connections of one pipeline, apart from all others of this process, so that they can be cut from another thread.

A wait in gloo has no abort, and neither has one for the store. But a connection that is shut down fails whatever waits
for it. So a pipeline has a gloo device of its own, which listens on a port of its own, and a connection of its own to
the store. All of its sockets are known by these ends:

    this process                      a peer
    listens on 127.0.0.1:4001  ◀────  somewhere            its end here is 4001: ours
    somewhere                  ────▶  listens on :4002     its end there is the peer's device: ours
    somewhere                  ────▶  the store            found when the connection was made

Where the system does not show a process its sockets under ``/dev/fd``, nothing is found and nothing is cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from penstock._torch import nccl_backend, process_groups

__all__ = [
    "Address",
    "AddressPair",
    "LivenessConnection",
    "LivenessListener",
    "PipelineSockets",
    "StoreClient",
    "abort_foreign_groups",
    "abort_nccl",
    "foreign_connections",
    "publish_foreign_connections",
    "shut_down_connections",
]

T = TypeVar("T")
Address = tuple[str, int]
AddressPair = tuple[Address, Address]  # here and there
ABORT_SECONDS = 10.0  # seconds that NCCL has for it, before it is left to itself
_creation_lock = threading.Lock()  # what is new since a look before is ours


class StoreClient:
    """The store, over a connection that nobody else uses meanwhile.

    A connection is kept for the next pipeline. To make one is not always fast: torch asks for the name of the other
    end, and a name server that does not know it may take seconds to say so.
    """

    def __init__(self, store: Any, name: str) -> None:
        """``name`` is before all keys that are written and read here."""
        self._of = store
        idle = _idle_connections.setdefault(store, [])
        found = idle.pop() if idle else None
        usable = found is not None and found.pid == os.getpid() and not found.gone
        self._connection: _StoreConnection | None = found if usable else _StoreConnection(store)
        assert self._connection is not None
        self.store: Any = PrefixStore(name, self._connection.store)

    @property
    def gone(self) -> bool:
        """Whether the store's process is; to be asked while the connection is idle.

        And before each use: a store that finds out by itself writes pages of complaints.
        """
        return self._connection is None or self._connection.gone

    def cut(self) -> None:
        if self._connection is not None:
            self._connection.cut()

    def close(self, *, keep: bool = False) -> None:
        """Let go of the connection; ``keep`` it if nothing has failed and nobody is in a call of the store."""
        if keep and self._connection is not None and not self._connection.gone:
            _idle_connections.setdefault(self._of, []).append(self._connection)
        self._connection = self._of = self.store = None


class _StoreConnection:
    """A connection to the store and, where the system shows it, its socket."""

    def __init__(self, store: Any) -> None:
        self.pid = os.getpid()
        self.store, made = _new_sockets(store.clone)
        port = _store_port(store)
        self._sock: socket.socket | None = None
        for sock, _, there in _sockets():
            if there is not None and there[1] == port and _SocketInfo.of(sock) in made:
                self._sock = sock.dup()
                finalize(self, self._sock.close)
                break

    @property
    def gone(self) -> bool:
        if self._sock is None:
            return False
        try:
            return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def cut(self) -> None:
        if self._sock is not None:
            _shut_down(self._sock)


_idle_connections: WeakKeyDictionary[Any, list[_StoreConnection]] = (
    WeakKeyDictionary()
)  # connections to a store that nobody uses


class PipelineSockets:
    """A pipeline's own gloo device and store connection, and the NCCL groups made with them."""

    def __init__(self, store: Any, name: str) -> None:
        self.device: Any
        self.device, made = _new_sockets(dist.ProcessGroupGloo.create_default_device)
        self.own = {ends.here for ends in made if ends.listens}
        self.theirs: set[Address] = set()  # where the peers' devices listen
        self._line = StoreClient(store, name)
        self.store = self._line.store
        self.timeout = timedelta(minutes=30)  # of groups, from the connecting on
        self.nccl: list[Any] = []
        _instances.add(self)

    @property
    def address(self) -> Address | None:
        """Where gloo listens, if that is known."""
        return next(iter(self.own), None)

    def owns(self, here: Address, there: Address) -> bool:
        """Whether a connection with these ends is one of them."""
        return here in self.own or there in self.theirs

    def cut(self) -> None:
        """Let everything fail that waits for these connections, now or later."""
        for sock, here, there in _sockets():
            if there is not None and self.owns(here, there):
                _shut_down(sock)
        groups, self.nccl = self.nccl, []
        abort_nccl(groups)
        self._line.cut()

    def close(self, *, keep: bool = False) -> None:
        """Let go of them; gloo closes its connections with the last reference to their groups."""
        keep = keep and not self.nccl  # whose threads may still use the store
        self.nccl.clear()
        self.device = self.store = None
        self._line.close(keep=keep)


_instances: WeakSet[PipelineSockets] = WeakSet()  # of all pipelines of this process


def foreign_connections(store: Any) -> list[AddressPair]:
    """The connections of this process that are neither a pipeline's nor the store's."""
    port, lines = _store_port(store), list(_instances)
    found = []
    for _, here, there in _sockets():
        if there is not None and port not in (here[1], there[1]) and not any(own.owns(here, there) for own in lines):
            found.append((here, there))
    return found


def shut_down_connections(ends: Collection[AddressPair]) -> None:
    """Let everything fail that waits for connections with these ends."""
    for sock, here, there in _sockets():
        if there is not None and (here, there) in ends:
            _shut_down(sock)


def abort_nccl(groups: Sequence[Any]) -> None:
    """Abort groups of NCCL, all at once: to free one's memory waits for the device, and so for what others wait for."""
    threads = [threading.Thread(target=group.abort, name="penstock abort", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORT_SECONDS)


class _SocketInfo(NamedTuple):
    here: Address
    there: Address | None
    listens: bool

    @staticmethod
    def of(sock: socket.socket) -> _SocketInfo:
        here, there = _addresses(sock)
        return _SocketInfo(here, there, bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)))


def _new_sockets(make: Callable[[], T]) -> tuple[T, set[_SocketInfo]]:
    """What ``make`` makes, and the sockets that this process has since."""
    with _creation_lock:
        before = {_SocketInfo.of(sock) for sock, *_ in _sockets()}
        made = make()
        return made, {_SocketInfo.of(sock) for sock, *_ in _sockets()} - before


def _sockets() -> Iterator[tuple[socket.socket, Address, Address | None]]:
    """The TCP sockets of this process with their ends. They are copies: what they stand for cannot change meanwhile."""
    try:
        names = os.listdir("/dev/fd")
    except OSError:
        return
    for name in names:
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue  # left alone: to close the copy of a file would give up the locks on it
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed since
        with copy as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock, *_addresses(sock)


def _addresses(sock: socket.socket) -> tuple[Address, Address | None]:
    try:
        return sock.getsockname()[:2], sock.getpeername()[:2]
    except OSError:
        return sock.getsockname()[:2], None


def _store_port(store: Any) -> int | None:
    """Where the store listens; only a TCPStore does."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end was faster
        sock.shutdown(socket.SHUT_RDWR)


# How ranks notice at once that another one's process is gone.
#
# Each rank listens on a port where it never accepts anyone. The rank before it on the ring connects there. The systems
# hold that connection, whatever the processes do, until the one that listens is gone or closes its beacon:
#
#     rank 0 ──▶ rank 1 ──▶ rank 2 ──▶ rank 0          a killed process breaks the line to it; one that is busy, stopped
#                                                      or swapped out does not

_listeners: weakref.WeakSet[LivenessListener] = weakref.WeakSet()


class LivenessListener:
    """This rank's port."""

    def __init__(self, host: str) -> None:
        self._sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._sock.bind((host, 0))
        self._sock.listen(16)
        self.address: Address = self._sock.getsockname()[:2]
        _listeners.add(self)

    def close(self) -> None:
        self._sock.close()


class LivenessConnection:
    """A connection to another rank's beacon."""

    def __init__(self, address: Address) -> None:
        """Raises ``ConnectionRefusedError`` where no beacon is any longer, and ``OSError`` where no way leads."""
        self._sock = socket.create_connection(address, timeout=2.0)
        self._sock.setblocking(False)
        # A machine that is switched off says nothing: its silence is noticed within a minute.
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, name):
                self._sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def broken(self) -> bool:
        try:
            return not self._sock.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._sock.close()


def _close_in_child() -> None:
    """A child of this process must not keep its beacon burning."""
    for beacon in list(_listeners):
        with contextlib.suppress(OSError):
            beacon.close()


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_close_in_child)


# Connections between the ranks that no pipeline has made: those of torch's own process groups.
#
# A stage may have collectives of its own, over tensor parallel processes or replicas. If one of them fails outside of a
# collective, the others wait for it there: it lives, but does not come. What they wait for is known by both its ends:
#
#     rank 0, waiting    10.0.0.1:4711 ──▶ 10.0.0.2:5001
#     rank 1, gone on    10.0.0.2:5001 ◀── 10.0.0.1:4711      shows its ends when it learns of a failure
#
# So a rank that waits can find, and cut, what leads to ranks that have shown theirs. Groups of NCCL are aborted.


def publish_foreign_connections(store: Any, rank: int) -> None:
    """Let the others know those of this process; ``store`` is the pipeline's corner of the store."""
    store.set(f"ends/{rank}", json.dumps(foreign_connections(store)))


def abort_foreign_groups(store: Any, ranks: Iterable[int]) -> None:
    """Cut those to ranks that have shown theirs."""
    there = [rank for rank in ranks if store.check([f"ends/{rank}"])]
    theirs: set[AddressPair] = set()
    for rank in there:
        theirs |= {(tuple(far), tuple(near)) for near, far in json.loads(store.get(f"ends/{rank}"))}
    shut_down_connections(theirs)
    groups = _nccl_groups(there)
    _aborted.update(groups)
    abort_nccl(groups)


_aborted: WeakSet[Any] = WeakSet()


def _nccl_groups(ranks: Collection[int]) -> list[Any]:
    """Torch's own groups of NCCL that have one of these ranks, and are not aborted yet."""
    found = []
    for group, backend in process_groups():
        if "nccl" in backend and not set(ranks).isdisjoint(dist.get_process_group_ranks(group)):
            own = nccl_backend(group)
            if own not in _aborted:
                found.append(own)
    return found
