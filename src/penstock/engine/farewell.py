"""What a process says when it ends without closing its pipelines.

    an exception that nobody caught    is published as the cause, with its traceback, before the process ends
    the end of the program             this rank has left, as if it had closed its pipelines

Programs end in several ways. An exception in the main thread comes by ``sys.excepthook``. A process of
``multiprocessing`` handles its exceptions itself, and runs finalisers while one is in flight. So does, without one, a
program that comes to its end.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing import util
from types import TracebackType
from typing import Any, Protocol

__all__ = ["Guest", "expect", "forget", "is_failure"]


class Guest(Protocol):
    """What is to say goodbye."""

    def part(self, error: BaseException | None) -> None:
        """The process ends, by an error or without one."""


_guests: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.RLock()  # a guest may leave while another comes: when it is collected as garbage
_hook: Callable[..., Any] | None = None  # the one before ours, while ours is there
_finaliser: util.Finalize | None = None


def expect(guest: Guest) -> None:
    """See to it that a guest does not leave without a word."""
    global _hook, _finaliser
    with _lock:
        _guests.add(guest)
        if _hook is None:
            _hook, sys.excepthook = sys.excepthook, _uncaught
        if _finaliser is None or not _finaliser.still_active():
            _finaliser = util.Finalize(None, _end, exitpriority=100)


def forget(guest: Guest) -> None:
    """It has left."""
    global _hook, _finaliser
    with _lock:
        _guests.discard(guest)
        if _guests:
            return
        if sys.excepthook is _uncaught and _hook is not None:  # else somebody's hook leads here, and may not be lost
            sys.excepthook, _hook = _hook, None
        if _finaliser is not None:
            _finaliser.cancel()
            _finaliser = None


def is_failure(error: BaseException | None) -> bool:
    """Whether a program that ends like this has failed."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None and not isinstance(error, GeneratorExit)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    hook = _hook or sys.__excepthook__  # goes back to its place with the last guest
    if not hasattr(sys, "ps1"):  # at a prompt, the program goes on
        for guest in list(_guests):
            guest.part(error)
    hook(kind, error, trace)


def _end() -> None:
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit) and error.__context__ is not None:  # as torch.multiprocessing.spawn ends
        error = error.__context__
    for guest in list(_guests):
        guest.part(error)
