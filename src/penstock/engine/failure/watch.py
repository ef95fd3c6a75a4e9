"""An interrupt of the main thread, as by Ctrl-C: it also ends a sleep, or a wait for a socket.

Programs in the background ignore Ctrl-C, for that is how scripts start them. They go on to do so, but not to ignore
what is sent here.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import util
from types import TracebackType
from typing import Any, Protocol

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from penstock.engine.channel.base import ChannelError
from penstock.engine.failure import sockets
from penstock.engine.failure.cause import (
    PROCESS_DIED,
    RANK_CLOSED,
    Cause,
    FailureStore,
    is_connection_error,
    launcher_owns_store,
    store_unreachable,
)
from penstock.engine.failure.hang import TIMEOUT, HangDetector, HangLimits, Heartbeat, wait_chain
from penstock.engine.failure.sockets import LivenessConnection, LivenessListener, PipelineSockets, StoreClient
from penstock.engine.failure.status import RankStatus, Snapshot
from penstock.errors import PipelineError, PlanError

__all__ = [
    "ExitHook",
    "MainThreadInterrupt",
    "PipelineStopped",
    "Watch",
    "is_failed_exit",
    "register_exit_hook",
    "unregister_exit_hook",
]


class MainThreadInterrupt:
    """Sent while the main thread is in a call, and heard there, unless the program has a handler of its own."""

    def __init__(self) -> None:
        self.sent = False
        self._handler = self._hear

    def listen(self) -> None:
        """A call begins."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and _in_main_thread():
            signal.signal(signal.SIGINT, self._handler)

    def end(self) -> None:
        """It is over, and nothing is sent any more."""
        if signal.getsignal(signal.SIGINT) is self._handler and _in_main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def heard_by(self, thread: int | None) -> bool:
        """Whether it would be."""
        handlers = (signal.default_int_handler, self._handler)
        main = thread == threading.main_thread().ident
        return main and signal.getsignal(signal.SIGINT) in handlers and hasattr(signal, "pthread_kill")

    def send(self) -> None:
        self.sent = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    def _hear(self, number: int, frame: object) -> None:
        if self.sent:
            raise KeyboardInterrupt


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


# What a process says when it ends without closing its pipelines.
#
#     an exception that nobody caught    is published as the cause, with its traceback, before the process ends
#     the end of the program             this rank has left, as if it had closed its pipelines
#
# Programs end in several ways. An exception in the main thread comes by ``sys.excepthook``. A process of
# ``multiprocessing`` handles its exceptions itself, and runs finalisers while one is in flight. So does, without one, a
# program that comes to its end.


class ExitHook(Protocol):
    """What is to say goodbye."""

    def part(self, error: BaseException | None) -> None:
        """The process ends, by an error or without one."""


_exit_hooks: weakref.WeakSet[Any] = weakref.WeakSet()
_exit_hooks_lock = threading.RLock()  # a guest may leave while another comes: when it is collected as garbage
_previous_excepthook: Callable[..., Any] | None = None  # the one before ours, while ours is there
_finaliser: util.Finalize | None = None


def register_exit_hook(guest: ExitHook) -> None:
    """See to it that a guest does not leave without a word."""
    global _previous_excepthook, _finaliser
    with _exit_hooks_lock:
        _exit_hooks.add(guest)
        if _previous_excepthook is None:
            _previous_excepthook, sys.excepthook = sys.excepthook, _on_uncaught_exception
        if _finaliser is None or not _finaliser.still_active():
            _finaliser = util.Finalize(None, _on_exit, exitpriority=100)


def unregister_exit_hook(guest: ExitHook) -> None:
    """It has left."""
    global _previous_excepthook, _finaliser
    with _exit_hooks_lock:
        _exit_hooks.discard(guest)
        if _exit_hooks:
            return
        if (
            sys.excepthook is _on_uncaught_exception and _previous_excepthook is not None
        ):  # else somebody's hook leads here, and may not be lost
            sys.excepthook, _previous_excepthook = _previous_excepthook, None
        if _finaliser is not None:
            _finaliser.cancel()
            _finaliser = None


def is_failed_exit(error: BaseException | None) -> bool:
    """Whether a program that ends like this has failed."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None and not isinstance(error, GeneratorExit)


def _on_uncaught_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    hook = _previous_excepthook or sys.__excepthook__  # goes back to its place with the last guest
    if not hasattr(sys, "ps1"):  # at a prompt, the program goes on
        for guest in list(_exit_hooks):
            guest.part(error)
    hook(kind, error, trace)


def _on_exit() -> None:
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit) and error.__context__ is not None:  # as torch.multiprocessing.spawn ends
        error = error.__context__
    for guest in list(_exit_hooks):
        guest.part(error)


# A thread beside each rank's main thread, which has time to look around while that one computes or waits.
#
# Five times a second it looks
#
#     - whether a cause was published, or the rank after this one on the ring is gone. If so, it cuts this rank's
#       connections: whoever waits for them fails, looks the cause up, and raises it. A main thread that computes is
#       interrupted as by Ctrl-C, where nothing else handles that, and raises the same. If that does not help, it may be
#       in a collective of its stage's own: what torch's groups have to the other ranks is cut, too (see ``strangers``);
#     - what the main thread is doing, and tells the others about once a second;
#     - whether the main thread waits in one place for long. After ``stuck_after`` seconds it logs a warning that says
#     for what, for whom, and what that one is doing. After ``timeout`` seconds that is the cause of a failure.
#
# A rank that a timeout finds in a call of the pipeline, and that does not come out of it within five seconds, because
# it hangs in code that nothing interrupts, says so on stderr with its Python stack, and its process ends with exit code
# 1. After other failures it has as long as the timeout. One that is in no call is not touched: its next call fails.

POLL_INTERVAL = 0.2
INTERRUPT_AFTER = 1.0  # seconds that a main thread has to notice by itself that all is over
ABORT_FOREIGN_AFTER = (
    3.0,
    30.0,
)  # seconds until what is not the pipeline's own is cut: in a collective, and wherever it is
EXIT_AFTER = 5.0  # seconds that it has, after a timeout, before its process ends
STORE_LINGER = 1.0  # seconds for the others to read a cause, where the store ends with this process

logger = logging.getLogger("penstock")


class PipelineStopped(Exception):
    """Another rank's failure, or a timeout, ended what this rank was doing."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.message)
        self.cause = cause


class Watch:
    """Looks after one rank of a pipeline. As a context it is around every call: ``with watch: …``."""

    def __init__(self, store: Any, name: str, ranks: Sequence[int], rank: int) -> None:
        """``ranks`` are those of the mesh in the world, ``rank`` is this one's; ``name`` is the pipeline's."""
        self.rank = rank
        self.status = RankStatus()
        self.sockets = PipelineSockets(store, name)
        self._corner = corner = PrefixStore(name, store)
        self.failures = FailureStore(corner, ranks, rank)
        self.cause: Cause | None = None
        self.interrupt = MainThreadInterrupt()
        self._pid = os.getpid()
        self._line = StoreClient(store, name)
        self._board = FailureStore(self._line.store, ranks, rank)
        self._limits = HangLimits()
        self._judge = HangDetector(self._limits)
        self._gossip = Heartbeat(self._line.store, rank, self._limits)
        self._beacon = None if self.sockets.address is None else LivenessListener(self.sockets.address[0])
        beacon = None if self._beacon is None else self._beacon.address
        corner.set(f"address/{rank}", json.dumps({"gloo": self.sockets.address, "beacon": beacon}))
        place = list(ranks).index(rank)
        self._next: int | None = ranks[(place + 1) % len(ranks)] if len(ranks) > 1 else None
        self._lifeline: LivenessConnection | None = None
        self._tries = 5
        self._key: Hashable = None
        self._since = time.monotonic()
        self._halted = 0.0
        self._lock = threading.Lock()  # held where a call ends, and where one is interrupted
        self._stopping = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._live, name=f"penstock watch of rank {rank}", daemon=True)
        self._thread.start()
        register_exit_hook(self)

    def limit(self, stuck_after: float | None, timeout: float | None) -> None:
        """When to report, and when to give up; None is never."""
        self._limits.stuck_after, self._limits.timeout = stuck_after, timeout
        # Beyond ours, so that it is ours that tells: gloo cannot say who is stuck.
        self.sockets.timeout = timedelta(days=365) if timeout is None else timedelta(seconds=2 * timeout + 60)

    def meet(self, addresses: Sequence[bytes]) -> None:
        """All ranks have come: learn where their devices listen."""
        found = [json.loads(address)["gloo"] for address in addresses]
        self.sockets.theirs |= {(host, port) for host, port in filter(None, found)}

    # ── around each call ─────────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> None:
        if self.cause is not None:
            raise PipelineStopped(self.cause)
        self.interrupt.listen()
        self.status.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outside = self.status.inside - 1
        try:
            with self._lock:  # no interrupt is sent from here on
                self.status.inside = outside
            if self.interrupt.sent:
                time.sleep(0.1)  # where the one that was sent comes at the latest
        finally:
            self.status.inside = outside  # it may have come while the lock was waited for
            if not outside:
                self.interrupt.end()
        if self.cause is not None and (self.interrupt.sent or error is None or isinstance(error, Exception)):
            raise PipelineStopped(self.cause) from error

    def explain(self, error: BaseException) -> PipelineError:
        """What has ended a call, as all ranks raise it; the others learn of it here, if it is this rank's failure."""
        if isinstance(error, ChannelError):
            return self.failures.lost(error).error()
        known = self.cause if self.interrupt.sent else self.failures.ask() if is_connection_error(error) else None
        if known is not None:
            return known.error()
        at = self.status.runner.current if self.status.runner is not None else None
        stage = error.stage if isinstance(error, PlanError) else None
        place = (at.stage, at.microbatch, str(at)) if at is not None else (stage, None, None)
        return self.failures.failed(error, *place).error()

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """Say that this rank leaves, and end the thread. Stopping twice is harmless."""
        if self._ended or os.getpid() != self._pid:
            return
        self._ended = True
        self.status.inside = 0
        unregister_exit_hook(self)
        if not self._line.gone:
            if self.cause is not None or self.failures.knew is not None:
                with suppress(RuntimeError):  # where the store is gone since
                    sockets.publish_foreign_connections(self._corner, self.rank)
            self.failures.leave()
            self._linger()
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5)
        for end in (self._beacon, self._lifeline):
            if end is not None:
                end.close()
        del self._board, self._gossip  # a connection is closed with the last reference to its store
        well = self.cause is None and not self._thread.is_alive()
        self.sockets.close(keep=well)
        self._line.close(keep=well)
        self.status.runner = None

    def part(self, error: BaseException | None) -> None:
        """The process ends, or the program leaves the pipeline, by an error or without one."""
        if self._ended or os.getpid() != self._pid:
            return
        if is_failed_exit(error) and self.cause is None and not self._line.gone:
            assert error is not None
            self.cause = self.failures.failed(error)
        self.stop()

    def _linger(self) -> None:
        """Where the store may end with this process, give the others time to read what has ended the pipeline."""
        knew = max((knew for knew in (self.failures.knew, self._board.knew) if knew is not None), default=None)
        if knew is None or self.rank != 0 or launcher_owns_store():
            return
        while time.monotonic() < knew + STORE_LINGER and not self._line.gone and not self.failures.all_left():
            time.sleep(0.02)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────

    def _live(self) -> None:
        try:
            while not self._stopping.is_set():
                self._tick(time.monotonic())
                self._stopping.wait(POLL_INTERVAL)
        except Exception:
            if not self._stopping.is_set():
                logger.exception("the watch of rank %d failed; the pipeline goes on without it", self.rank)

    def _tick(self, now: float) -> None:
        key, look = self.status.look()
        if key != self._key:
            self._key, self._since = key, now
            self._gossip.moved()
            self._judge.moved()
        age = now - self._since
        if self.cause is None:
            try:
                cause = store_unreachable() if self._line.gone else self._find(look, age, now)
            except RuntimeError:
                cause = store_unreachable()
            if cause is None:
                return
            self.cause, self._halted = cause, now
            self._ask_store(partial(sockets.publish_foreign_connections, rank=self.rank))
            if cause.kind == TIMEOUT and cause.rank == self.rank:
                logger.error("%s", cause.error())
        if self.status.inside or look.kind != "idle":
            self.sockets.cut()
        if self.status.inside:
            self._press(look, now - self._halted)

    def _find(self, look: Snapshot, age: float, now: float) -> Cause | None:
        """The cause, if something has failed; else tell the others what there is to tell."""
        cause = self._board.read() or self._lost_next()
        if cause is None and look.kind == "waits" and age > 2:
            left = next((rank for rank in look.ranks if self._board.left(rank)), None)
            cause = None if left is None else self._board.publish(Cause(left, "", RANK_CLOSED))
        if cause is None:
            self._gossip.tell(self.status, look, age, now)
            chain = partial(wait_chain, self.rank, look, lambda rank: self._gossip.hear(rank, now))
            cause = self._judge.judge(look, age, now, chain)
            cause = None if cause is None else self._board.publish(cause)
        return cause

    def _lost_next(self) -> Cause | None:
        """The cause, if the rank after this one is gone and has not said why."""
        if self._next is None:
            return None
        if self._lifeline is not None:
            broken = self._lifeline.broken
        else:
            broken = self._connect(self._next)
        if not broken:
            return None
        rank, self._next = self._next, None
        return None if self._board.left(rank) else self._board.publish(Cause(rank, "", PROCESS_DIED))

    def _connect(self, rank: int) -> bool:
        """Take hold of the next rank's beacon, once it is known; whether there is none any longer."""
        key = f"address/{rank}"
        if not self._line.store.check([key]):
            return False
        address = json.loads(self._line.store.get(key))["beacon"]
        if address is None:
            self._next = None
            return False
        try:
            self._lifeline = LivenessConnection((address[0], address[1]))
        except ConnectionRefusedError:
            return True
        except OSError:  # no way leads there: do without
            self._tries -= 1
            if self._tries == 0:
                self._next = None
        return False

    def _press(self, look: Snapshot, waited: float) -> None:
        """Get a main thread that is still in a call out of it."""
        assert self.cause is not None
        if waited > INTERRUPT_AFTER and look.kind == "works" and not self.interrupt.sent:
            self._interrupt()
        if (
            look.kind == "works"
            and waited > ABORT_FOREIGN_AFTER[0]
            and (waited > ABORT_FOREIGN_AFTER[1] or self.status.in_collective())
        ):
            self._ask_store(
                partial(sockets.abort_foreign_groups, ranks=[rank for rank in self._board.ranks if rank != self.rank])
            )
        patience = EXIT_AFTER if self.cause.kind == TIMEOUT else self._limits.timeout
        if patience is not None and waited > patience:
            _, stack = self.status.python()
            report = f"rank {self.rank} {look}, and ends, because the pipeline has stopped:\n{self.cause.error()}\n"
            os.write(2, f"{report}\nOn rank {self.rank}:\n{stack}".encode())
            os._exit(1)

    def _ask_store(self, what: Callable[[Any], None]) -> None:
        """Do something with the store, if it is still there."""
        if not self._line.gone:
            with suppress(RuntimeError):
                what(self._line.store)

    def _interrupt(self) -> None:
        if self.interrupt.heard_by(self.status.thread):
            with self._lock:
                if self.status.inside:
                    self.interrupt.send()
