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
import os
import socket
import stat
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

__all__ = ["Address", "Ends", "Lines", "StoreLine", "abort", "cut_between", "stranger_ends"]

T = TypeVar("T")
Address = tuple[str, int]
Ends = tuple[Address, Address]  # here and there
ABORTING = 10.0  # seconds that NCCL has for it, before it is left to itself
_making = threading.Lock()  # what is new since a look before is ours


class StoreLine:
    """The store, over a connection that nobody else uses meanwhile.

    A connection is kept for the next pipeline. To make one is not always fast: torch asks for the name of the other
    end, and a name server that does not know it may take seconds to say so.
    """

    def __init__(self, store: Any, name: str) -> None:
        """``name`` is before all keys that are written and read here."""
        self._of = store
        idle = _idle.setdefault(store, [])
        found = idle.pop() if idle else None
        usable = found is not None and found.pid == os.getpid() and not found.gone
        self._connection: _Connection | None = found if usable else _Connection(store)
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
            _idle.setdefault(self._of, []).append(self._connection)
        self._connection = self._of = self.store = None


class _Connection:
    """A connection to the store and, where the system shows it, its socket."""

    def __init__(self, store: Any) -> None:
        self.pid = os.getpid()
        self.store, made = _opened(store.clone)
        port = _port_of(store)
        self._sock: socket.socket | None = None
        for sock, _, there in _sockets():
            if there is not None and there[1] == port and _Ends.of(sock) in made:
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


_idle: WeakKeyDictionary[Any, list[_Connection]] = WeakKeyDictionary()  # connections to a store that nobody uses


class Lines:
    """A pipeline's own gloo device and store connection, and the NCCL groups made with them."""

    def __init__(self, store: Any, name: str) -> None:
        self.device: Any
        self.device, made = _opened(dist.ProcessGroupGloo.create_default_device)
        self.own = {ends.here for ends in made if ends.listens}
        self.theirs: set[Address] = set()  # where the peers' devices listen
        self._line = StoreLine(store, name)
        self.store = self._line.store
        self.timeout = timedelta(minutes=30)  # of groups, from the connecting on
        self.nccl: list[Any] = []
        _lines.add(self)

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
        abort(groups)
        self._line.cut()

    def close(self, *, keep: bool = False) -> None:
        """Let go of them; gloo closes its connections with the last reference to their groups."""
        keep = keep and not self.nccl  # whose threads may still use the store
        self.nccl.clear()
        self.device = self.store = None
        self._line.close(keep=keep)


_lines: WeakSet[Lines] = WeakSet()  # of all pipelines of this process


def stranger_ends(store: Any) -> list[Ends]:
    """The connections of this process that are neither a pipeline's nor the store's."""
    port, lines = _port_of(store), list(_lines)
    found = []
    for _, here, there in _sockets():
        if there is not None and port not in (here[1], there[1]) and not any(own.owns(here, there) for own in lines):
            found.append((here, there))
    return found


def cut_between(ends: Collection[Ends]) -> None:
    """Let everything fail that waits for connections with these ends."""
    for sock, here, there in _sockets():
        if there is not None and (here, there) in ends:
            _shut_down(sock)


def abort(groups: Sequence[Any]) -> None:
    """Abort groups of NCCL, all at once: to free one's memory waits for the device, and so for what others wait for."""
    threads = [threading.Thread(target=group.abort, name="penstock abort", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORTING)


class _Ends(NamedTuple):
    here: Address
    there: Address | None
    listens: bool

    @staticmethod
    def of(sock: socket.socket) -> _Ends:
        here, there = _ends(sock)
        return _Ends(here, there, bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)))


def _opened(make: Callable[[], T]) -> tuple[T, set[_Ends]]:
    """What ``make`` makes, and the sockets that this process has since."""
    with _making:
        before = {_Ends.of(sock) for sock, *_ in _sockets()}
        made = make()
        return made, {_Ends.of(sock) for sock, *_ in _sockets()} - before


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
                yield sock, *_ends(sock)


def _ends(sock: socket.socket) -> tuple[Address, Address | None]:
    try:
        return sock.getsockname()[:2], sock.getpeername()[:2]
    except OSError:
        return sock.getsockname()[:2], None


def _port_of(store: Any) -> int | None:
    """Where the store listens; only a TCPStore does."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end was faster
        sock.shutdown(socket.SHUT_RDWR)
