"""How ranks notice at once that another one's process is gone.

Each rank listens on a port where it never accepts anyone. The rank before it on the ring connects there. The systems
hold that connection, whatever the processes do, until the one that listens is gone or closes its beacon:

    rank 0 ──▶ rank 1 ──▶ rank 2 ──▶ rank 0          a killed process breaks the line to it; one that is busy, stopped
                                                     or swapped out does not
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref

from penstock.engine.channel.sever import Address

__all__ = ["Beacon", "Lifeline"]

_burning: weakref.WeakSet[Beacon] = weakref.WeakSet()


class Beacon:
    """This rank's port."""

    def __init__(self, host: str) -> None:
        self._sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._sock.bind((host, 0))
        self._sock.listen(16)
        self.address: Address = self._sock.getsockname()[:2]
        _burning.add(self)

    def close(self) -> None:
        self._sock.close()


class Lifeline:
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


def _put_out() -> None:
    """A child of this process must not keep its beacon burning."""
    for beacon in list(_burning):
        with contextlib.suppress(OSError):
            beacon.close()


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_put_out)
