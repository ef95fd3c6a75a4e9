"""The sockets of a process: those of one pipeline, which another thread can shut down, and those of other groups.

Waits for the store and for collectives of gloo cannot be aborted. But they fail if their connections are shut down. So
a pipeline has its own gloo device, which listens on its own port, and its own connection to the store. All of its
sockets are identified by their addresses:

    this process                      peer
    listens on 127.0.0.1:4001  ◀────  any port             local address: this pipeline's gloo device
    any port                   ────▶  listens on :4002     remote address: a peer's gloo device
    any port                   ────▶  the store            identified when the connection was created

Stages may use other process groups, for tensor parallelism or replicas. If one rank of such a group fails outside of a
collective, the others wait for it in the collective. So each rank that reads the cause of a failure publishes the
addresses of its foreign connections, and a rank that still waits shuts down its ends of these connections:

    rank 0, waits          10.0.0.1:4711 ──▶ 10.0.0.2:5001
    rank 1, has stopped    10.0.0.2:5001 ◀── 10.0.0.1:4711      publishes this pair of addresses

Foreign NCCL groups are aborted. The liveness ring detects at once that a process has ended. Each process listens on a
port on which it never accepts. The previous rank on the ring connects to it, and the operating systems keep that
connection until the listening process ends or closes the port:

    rank 0 ──▶ rank 1 ──▶ rank 2 ──▶ rank 0          the connection to a killed process breaks; the connection to a
                                                     busy, stopped or swapped-out process does not
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar, get_args, get_type_hints
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from penstock._torch import nccl_backend, process_groups
from penstock.errors import PlanError
from penstock.json_schema import Maybe, check_schema, parse_json

logger = logging.getLogger("penstock")

T = TypeVar("T")
Address = tuple[str, int]
CONNECT_TIMEOUT = timedelta(seconds=30)  # for another connection to a store that has just answered
ABORT_SECONDS = 10.0  # to wait for NCCL's abort of a group
_creation_lock = threading.Lock()  # held while new sockets are identified


class StoreClient:
    """A connection to the store for one thread, with its socket if the store is a TCPStore.

    Connections are kept for the next pipeline. A new one may take seconds: torch resolves the name of its peer by DNS.
    If a query is lost, which happens when many ranks connect at once, the resolver waits for its timeout of 5 s.
    """

    def __init__(self, store: Any) -> None:
        self._pid, self._server = os.getpid(), None
        port = _store_port(store)
        if port is not None and all(is_broken(sock) for sock, _, remote in _sockets() if remote and remote[1] == port):
            raise dist.DistNetworkError("the connection to the store is broken")  # a new one would be tried for minutes
        # Do not wait long for a store that is gone: the caller has just had an answer on another connection.
        timeout = store.timeout
        store.set_timeout(min(timeout, CONNECT_TIMEOUT))
        try:
            self.connection, new = _new_sockets(store.clone)
        finally:
            store.set_timeout(timeout)
        self.connection.set_timeout(timeout)
        self.store: Any = None
        self._sock: socket.socket | None = None
        for sock, local, remote in _sockets():
            if (local, remote) in new and remote is not None and remote[1] == port:
                self._sock = sock.dup()
                finalize(self, self._sock.close).atexit = False  # the exit hooks of the watch still use it
                break

    @classmethod
    def open(cls, store: Any, prefix: str) -> StoreClient:
        """Reuse a connection that was kept, or create one."""
        client = (_idle_clients.get(store) or [cls(store)]).pop()
        client._server, client.store = store, PrefixStore(prefix, client.connection)
        return client if client._pid == os.getpid() and not client.gone else cls.open(store, prefix)

    @property
    def gone(self) -> bool:
        """Whether the store's process is gone. Read it only while no request is pending.

        Callers check it before each use, because a request to a store that is gone logs long stack traces.
        """
        return self.store is None or (self._sock is not None and is_broken(self._sock))

    def shut_down(self) -> None:
        if self._sock is not None:
            _shut_down(self._sock)

    def close(self, *, keep: bool) -> None:
        """Release the connection; ``keep`` it for the next pipeline if nothing has failed."""
        server, self._server, self.store = self._server, None, None
        if keep and server is not None:
            _idle_clients.setdefault(server, []).append(self)
            return
        self.connection = None
        if self._sock is not None:
            self._sock.close()


_idle_clients: WeakKeyDictionary[Any, list[StoreClient]] = WeakKeyDictionary()  # by the store of the process group


class PipelineSockets:
    """A pipeline's own gloo device and store connection, and the NCCL groups made with them."""

    def __init__(self, store: Any, prefix: str) -> None:
        self.device, self.address = _gloo_device()
        self.peer_addresses: set[Address] = set()  # of the peers' gloo devices
        self._client = StoreClient.open(store, prefix)
        self.store = self._client.store
        self.timeout = timedelta(minutes=30)  # of the groups, and of connecting them
        self.nccl: list[Any] = []
        _pipelines.add(self)

    def owns(self, local: Address, remote: Address) -> bool:
        return local == self.address or remote in self.peer_addresses

    def shut_down(self) -> None:
        """Make all present and later waits for these connections fail."""
        for sock, local, remote in _sockets():
            if remote is not None and self.owns(local, remote):
                _shut_down(sock)
        groups, self.nccl = self.nccl, []
        abort_nccl(groups)
        self._client.shut_down()

    def close(self, *, keep: bool) -> None:
        """Release the sockets; gloo closes its connections with the last reference to their groups."""
        self.nccl.clear()
        self.device = self.store = None
        self._client.close(keep=keep)


_pipelines: WeakSet[PipelineSockets] = WeakSet()  # of this process


def _gloo_device() -> tuple[Any, Address]:
    """A new gloo device, and the address on which it listens."""
    device, new = _new_sockets(dist.ProcessGroupGloo.create_default_device)
    return device, next(local for local, remote in new if remote is None)


def abort_nccl(groups: Sequence[Any]) -> None:
    """Abort NCCL groups concurrently: each abort waits for the device, and so for kernels of the other groups."""
    threads = [threading.Thread(target=group.abort, name="penstock abort", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORT_SECONDS)


# ── values in the store ──────────────────────────────────────────────────────────────────────────────────────────


def read_value(store: Any, key: str, schema: Any) -> Any:
    """A JSON value of another rank; None if it does not match the schema. Any process can write to the store."""
    try:
        data = parse_json(store.get(key), key)
        check_schema(data, schema, key)
    except PlanError as error:
        if key not in _reported_keys:
            _reported_keys.add(key)
            logger.warning("the store has a value that no rank has written: %s", printable(str(error)))
        return None
    return data


_reported_keys: set[str] = set()


def read_record(store: Any, key: str, kind: type[T]) -> T | None:
    """A dataclass that another rank has published as JSON; None if it is missing or invalid."""
    if not store.check([key]):
        return None
    schema = {name: _schema(hint) for name, hint in get_type_hints(kind).items()}
    data = read_value(store, key, schema)
    return None if data is None else kind(**{name: _from_json(data.get(name)) for name in schema})


def _schema(hint: Any) -> Any:
    """The JSON schema of a type: a plain one, a tuple, or one of these and None."""
    arguments = get_args(hint)
    if type(None) in arguments:
        return Maybe(_schema(arguments[0]))
    return hint if not arguments else [arguments[0]] if ... in arguments else arguments


def _from_json(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    return tuple(map(_from_json, value)) if isinstance(value, list) else value


def printable(text: str) -> str:
    """Replace control characters, which a terminal would interpret."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


# ── connections of other process groups ──────────────────────────────────────────────────────────────────────────


def publish_foreign_connections(store: Any, rank: int) -> None:
    """Publish the connections of this process that belong neither to a pipeline nor to the store."""
    port, pipelines = _store_port(store), list(_pipelines)
    connections = [(local, remote) for _, local, remote in _sockets() if remote is not None]
    foreign = [
        (local, remote)
        for local, remote in connections
        if port not in (local[1], remote[1]) and not any(pipeline.owns(local, remote) for pipeline in pipelines)
    ]
    store.set(f"connections/{rank}", json.dumps(foreign))


def abort_foreign_groups(store: Any, ranks: Iterable[int]) -> None:
    """Shut down foreign connections to the ``ranks`` that have published theirs, and abort NCCL groups with them."""
    published = [rank for rank in ranks if store.check([f"connections/{rank}"])]
    pairs: set[tuple[Address, Address]] = set()  # local and remote
    for rank in published:
        connections = read_value(store, f"connections/{rank}", [((str, int), (str, int))]) or []
        pairs |= {(tuple(remote), tuple(local)) for local, remote in connections}
    for sock, local, remote in _sockets():
        if remote is not None and (local, remote) in pairs:
            _shut_down(sock)
    groups = [
        nccl_backend(group)
        for group, backend in process_groups()
        if "nccl" in backend and not set(published).isdisjoint(dist.get_process_group_ranks(group))
    ]
    groups = [group for group in groups if group not in _aborted]
    _aborted.update(groups)
    abort_nccl(groups)


_aborted: WeakSet[Any] = WeakSet()


# ── the liveness ring ────────────────────────────────────────────────────────────────────────────────────────────


_process_ports: WeakKeyDictionary[Any, socket.socket] = WeakKeyDictionary()  # by the store of the process group


def publish_process(store: Any, rank: int) -> None:
    """Publish a port that is open until this process ends: see ``RankProcess``."""
    port = _process_ports.get(store)
    if port is None or port.fileno() < 0:  # closed in a fork
        _, (host, _) = _gloo_device()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        port = _process_ports[store] = socket.create_server((host, 0), family=family, backlog=4096)
        finalize(store, port.close).atexit = False  # at exit, ``close_process_ports`` closes it
        store.set(f"penstock/process/{rank}", json.dumps([socket.gethostname(), *port.getsockname()[:2]]))


def close_process_ports() -> None:
    """Break the liveness connections to this process, so that other ranks detect its end at once."""
    for port in list(_process_ports.values()):
        port.close()


# A fork of this process, such as a data loader's worker, must not keep its ports open.
os.register_at_fork(after_in_child=close_process_ports)


class RankProcess:
    """The process of another rank, which keeps a port open until it ends. ``store`` is that of the process group."""

    def __init__(self, store: Any, rank: int) -> None:
        self.rank = rank
        self._store, self._key = store, f"penstock/process/{rank}"
        self._connection: socket.socket | None = None
        self._reachable = True

    def ended(self) -> bool:
        """Whether the process has published its port and has ended since."""
        if self._connection is None and self._reachable and self._store.check([self._key]):
            machine, host, port = read_value(self._store, self._key, (str, str, int)) or ("", "", 0)
            same_machine = machine == socket.gethostname()  # needed for a loopback address
            try:
                if port and (same_machine or not ipaddress.ip_address(host).is_loopback):
                    self._connection = connect_liveness((host, port))
            except ConnectionRefusedError:
                return True
            except OSError:
                pass
            self._reachable = self._connection is not None
        return self._connection is not None and is_broken(self._connection)


_connections: dict[Address, socket.socket] = {}  # to the ports of other processes, for all pipelines


def connect_liveness(address: Address) -> socket.socket:
    """A connection to another process's port. Raises ``ConnectionRefusedError`` if it is closed."""
    for other, old in list(_connections.items()):
        if is_broken(old):
            _connections.pop(other, None)
            old.close()
    sock = _connections.get(address)
    if sock is None:
        sock = _connections[address] = socket.create_connection(address, timeout=2.0)
        sock.setblocking(False)
        # A machine that is switched off closes no connection: keepalive detects it within a minute.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 6)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock


def is_broken(sock: socket.socket) -> bool:
    """Whether the other end of a connection is gone."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


# ── the sockets of this process ──────────────────────────────────────────────────────────────────────────────────


def _new_sockets(make: Callable[[], T]) -> tuple[T, set[tuple[Address, Address | None]]]:
    """Call ``make``; return its result, and the addresses of the sockets that it has created."""
    with _creation_lock:
        before = {(local, remote) for _, local, remote in _sockets()}
        made = make()
        return made, {(local, remote) for _, local, remote in _sockets()} - before


def _sockets() -> Iterator[tuple[socket.socket, Address, Address | None]]:
    """The TCP sockets of this process with their addresses, as duplicates, which no other thread can close."""
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue  # closing the duplicate of a file would release the file's locks
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed by another thread
        with duplicate as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                remote: Address | None = None
                with contextlib.suppress(OSError):  # not connected
                    remote = sock.getpeername()[:2]
                if remote or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # else not connected yet
                    yield sock, sock.getsockname()[:2], remote


def _store_port(store: Any) -> int | None:
    """The port of a TCPStore; None for another store."""
    return getattr(_without_prefixes(store), "port", None)


def store_address(store: Any) -> str:
    store = _without_prefixes(store)
    return f"{getattr(store, 'host', 'this machine')}:{getattr(store, 'port', '')}".rstrip(":")


def _without_prefixes(store: Any) -> Any:
    return _without_prefixes(store.underlying_store) if hasattr(store, "underlying_store") else store


def limit_store_silence(store: Any, seconds: float | None) -> None:
    """Set the timeout of requests to the store, on all present connections of this process; None: no timeout.

    Torch waits for keys with ``poll``, to which this timeout does not apply.
    """
    limit = struct.pack("ll", 0, 0) if seconds is None else struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for sock in _store_sockets(store):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def disconnect_store(store: Any) -> None:
    """After a request that timed out: its late answer must not be read as the answer of another request."""
    for sock in _store_sockets(store):
        _shut_down(sock)


def _store_sockets(store: Any) -> Iterator[socket.socket]:
    port = _store_port(store)
    return (sock for sock, _, remote in _sockets() if port is not None and remote is not None and remote[1] == port)


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer has closed it already
        sock.shutdown(socket.SHUT_RDWR)
