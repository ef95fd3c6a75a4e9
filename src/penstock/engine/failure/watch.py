"""The watch: a thread beside each rank's main thread that detects failures and ends the waits of its rank.

Five times a second it checks

    - whether a cause was published, or the next rank on the liveness ring is gone. If so, it shuts down this rank's
      connections, and aborts the send or receive that the rank waits for. The wait fails, and the main thread reads the
      cause and raises it. A main thread that computes is interrupted as by Ctrl-C, unless the program has its own
      handler, and raises the same error. If it still computes afterwards, it may be in a collective of its stage:
      connections of other process groups are shut down too (see ``sockets``);
    - the status of the main thread, which it sends to the others as a heartbeat about once a second;
    - whether the main thread has waited for long without progress. After ``stuck_after`` seconds it logs the chain of
      waits, and the status of the rank at its end. After ``timeout`` seconds this is the cause of a failure.

A rank in a call of the pipeline has five seconds to leave the call after a timeout. If it hangs in code that cannot be
interrupted, it prints its Python stack, and its process exits with code 1. After other failures it has ``timeout``
seconds. For a rank outside of any call, the next call fails.

A process that ends without closing its pipelines runs exit hooks:

    an uncaught exception    is published as the cause, with its traceback
    the end of the program   closes the pipelines of this rank

Exceptions of the main thread reach ``sys.excepthook``. A process of ``multiprocessing`` handles its exceptions itself,
and runs finalizers during the handling. A program that ends normally also runs finalizers.

The watch starts at the rendezvous of the ranks, which checks that all ranks build the same pipeline. Ranks poll the
store there instead of blocking on it: if a rank fails while it builds its pipeline, the others do not wait for its
connections. A process that has a mesh keeps a port open, so that the previous rank detects its end even if it never
builds its pipeline.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing import util
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]

from penstock._torch import abort_gloo_work, default_store
from penstock.engine.channel.base import ChannelError, WaitTimer
from penstock.engine.failure import sockets, status
from penstock.engine.failure.cause import PUBLISH_SECONDS, Cause, FailureStore, launcher_owns_store, store_unreachable
from penstock.engine.failure.sockets import read_value
from penstock.errors import PenstockError, PipelineError, PlanError
from penstock.schedule.provider import ScheduleProvider
from penstock.split.plan import Plan
from penstock.version import __version__

POLL_INTERVAL = 0.2
NEVER_BUILT = "its process ended, or was killed, before it built this pipeline"
PROCESS_DIED = "its process is gone without an error (killed, or out of memory?)"
INTERRUPT_AFTER = 1.0  # seconds until a main thread that computes is interrupted
ABORT_FOREIGN_AFTER = (3.0, 30.0)  # seconds until foreign groups are aborted: in a collective, and anywhere else
EXIT_AFTER = 5.0  # seconds from a timeout to the exit of a process that hangs
STORE_LINGER = 1.0  # seconds for the others to read a cause, if the store ends with this process
ARRIVAL_TIMEOUT = 300.0  # seconds for all ranks to begin to build the pipeline

logger = logging.getLogger("penstock")


class PipelineStopped(Exception):
    """Another rank's failure, or a timeout, ended the call of this rank."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.message)
        self.cause = cause


class Watch:
    """Watches one rank of a pipeline. Every call of the pipeline runs in its context: ``with watch: …``."""

    def __init__(self, store: Any, name: str, ranks: Sequence[int], rank: int) -> None:
        """``ranks`` are the world ranks of the mesh, ``rank`` is this process's, and ``name`` is the pipeline's."""
        self.rank = rank
        self.status = status.RankStatus()
        self.wait_timer = WaitTimer()
        self.sockets = sockets.PipelineSockets(store, name)
        self._store = main_store = PrefixStore(name, store)
        self.failures = FailureStore(main_store, ranks, rank)
        self.cause: Cause | None = None
        self.interrupted = False  # whether the main thread was interrupted
        self._on_sigint = self._raise_if_interrupted
        self._pid = os.getpid()
        # The thread has a separate connection to the store, because the main thread may block on the other one.
        self._client = sockets.StoreClient.open(store, name)
        self._thread_failures = FailureStore(self._client.store, ranks, rank)
        self._limits = status.HangLimits()
        self._detector = status.HangDetector(self.status, self._limits)
        self._heartbeat = status.Heartbeat(self._client.store, rank, self._limits)
        main_store.set(f"address/{rank}", json.dumps(self.sockets.address))
        following = ranks[(list(ranks).index(rank) + 1) % len(ranks)]
        self._next = None if following == rank else sockets.RankProcess(self._client.connection, following)
        self._stopped_at = 0.0
        self._lock = threading.Lock()  # held while a call ends, and while it is interrupted
        self._stopping = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"penstock watch of rank {rank}", daemon=True)
        self._thread.start()
        self._finalizer = util.Finalize(None, self._on_process_exit, exitpriority=100)
        _set_excepthook(self, watching=True)

    def set_limits(self, stuck_after: float | None, timeout: float | None) -> None:
        """Set the seconds of waiting after which to report, and after which to fail; None: never."""
        self._limits.stuck_after, self._limits.timeout = stuck_after, timeout
        sockets.limit_store_silence(self._store, None if timeout is None else max(timeout, PUBLISH_SECONDS))
        # The timeout of gloo is longer, so that the watch detects a hang first: gloo cannot name the rank that hangs.
        self.sockets.timeout = timedelta(days=365) if timeout is None else timedelta(seconds=2 * timeout + 60)

    # ── around each call ─────────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> None:
        if self.cause is not None:
            raise PipelineStopped(self.cause)
        # Background programs of a shell ignore SIGINT. Install a handler for the watch's interrupt during the call.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._on_sigint)
        self.status.enter_call()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        depth = self.status.call_depth - 1
        try:
            with self._lock:  # the watch sends no interrupt afterwards
                self.status.call_depth = depth
            if self.interrupted:
                time.sleep(0.1)  # receive a pending interrupt here
        finally:
            self.status.call_depth = depth  # the interrupt may have been received during the wait for the lock
            if not depth and signal.getsignal(signal.SIGINT) is self._on_sigint:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.cause is not None and (self.interrupted or error is None or isinstance(error, Exception)):
            raise PipelineStopped(self.cause) from error

    def explain(self, error: BaseException) -> PipelineError:
        """The error that all ranks raise for an exception that ended a call. The first rank to fail publishes it."""
        # Torch raises errors in this rank if another process is gone, for example in a collective of a stage.
        gone = isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        known = self.cause if self.interrupted else None
        if isinstance(error, ChannelError):
            known = self.failures.wait_for_cause(error.peer)
            if known is None:
                peer = self.rank if error.peer is None else error.peer
                observer = "" if peer == self.rank else f"seen by rank {self.rank}: "
                known = self.failures.publish(Cause(peer, "", f"{observer}{error}"))
        elif gone and not self.interrupted:
            known = self.failures.wait_for_cause()
        if known is not None:
            return known.error()
        at = self.status.runner.current if self.status.runner is not None else None
        stage = error.stage if isinstance(error, PlanError) else None
        place = (at.stage, at.microbatch, str(at)) if at is not None else (stage, None, None)
        return self.failures.report(error, *place).error()

    # ── closing ──────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """Publish that this rank has closed the pipeline, and end the thread. A second call has no effect."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.status.call_depth = 0
        self._finalizer.cancel()
        _set_excepthook(self, watching=False)
        if not self._client.gone:
            with suppress(RuntimeError):  # the store, and all readers with it, may be gone by now
                if self.cause is not None or self.failures.known_since is not None:
                    sockets.publish_foreign_connections(self._store, self.rank)
                self.failures.publish_closed(self.status.num_calls)
            known = [x for x in (self.failures.known_since, self._thread_failures.known_since) if x is not None]
            if known and self.rank == 0 and not launcher_owns_store():
                # The store may end with this process: wait until the others have read the cause.
                end = max(known) + STORE_LINGER
                ranks = self.failures.ranks
                while time.monotonic() < end and not self._client.gone and not self.failures.all_closed(*ranks):
                    time.sleep(0.02)
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5)
        self._next = None
        del self._thread_failures, self._heartbeat  # a connection closes with the last reference to its store
        intact = self.cause is None and self.failures.known_since is None and not self._thread.is_alive()
        self.sockets.close(keep=intact)
        self._client.close(keep=intact)
        self.status.runner = None

    def on_exit(self, error: BaseException | None) -> None:
        """Stop at the end of the process or of the pipeline's context; report ``error`` if it ended by one."""
        if self._closed or os.getpid() != self._pid:
            return
        if error is not None and is_failed_exit(error) and self.cause is None and not self._client.gone:
            self.cause = self.failures.report(error)
        self.stop()

    def _on_process_exit(self) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and error.__context__ is not None:  # as torch.multiprocessing.spawn ends
            error = error.__context__
        self.on_exit(error)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._poll(time.monotonic())
                self._stopping.wait(POLL_INTERVAL)
        except Exception:
            if not self._stopping.is_set():
                logger.exception("the watch of rank %d failed; the pipeline continues without it", self.rank)

    def _poll(self, now: float) -> None:
        snapshot = self._detector.update(now)
        if self.cause is None:
            try:
                cause = store_unreachable(self._store) if self._client.gone else self._find_cause(snapshot, now)
            except RuntimeError as error:
                cause = store_unreachable(self._store, error)
            if cause is None:
                return
            self.cause, self._stopped_at = cause, now
            self._with_store(partial(sockets.publish_foreign_connections, rank=self.rank))
            if cause.kind == status.TIMEOUT and cause.rank == self.rank:
                logger.error("%s", cause.error())
        if self.status.call_depth or snapshot.kind != "idle":
            self.sockets.shut_down()
            # In gloo, a connection that breaks during the transfer of a message does not end the wait for the message.
            abort_gloo_work(self.wait_timer.work)
        if self.status.call_depth:
            self._end_call(snapshot, now - self._stopped_at)

    def _find_cause(self, snapshot: status.Snapshot, now: float) -> Cause | None:
        """The cause of a failure, if there is one. Otherwise send a heartbeat and check for a hang."""
        failures = self._thread_failures
        cause = failures.read() or self._check_next_rank()
        if cause is None and snapshot.kind == "waits" and snapshot.age > 2:
            closed = next((rank for rank in snapshot.ranks if failures.all_closed(rank)), None)
            cause = None if closed is None else failures.publish(failures.left_early(closed))
        if cause is None:
            self._heartbeat.send(snapshot, now)
            chain = partial(status.wait_chain, self.rank, snapshot, lambda rank: self._heartbeat.read(rank, now))
            cause = self._detector.check(snapshot, now, chain)
            cause = None if cause is None else failures.publish(cause)
        return cause

    def _check_next_rank(self) -> Cause | None:
        """The cause if the process of the next rank is gone without having published one."""
        if self._next is None or not self._next.ended():
            return None
        rank, self._next = self._next.rank, None
        if self._thread_failures.all_closed(rank):
            return None
        begun = self._client.store.check([f"address/{rank}"])
        return self._thread_failures.publish(Cause(rank, "", PROCESS_DIED if begun else NEVER_BUILT))

    def _end_call(self, snapshot: status.Snapshot, waited: float) -> None:
        """End the main thread's call, which still runs ``waited`` seconds after the failure."""
        assert self.cause is not None
        if waited > INTERRUPT_AFTER and snapshot.kind == "works" and not self.interrupted:
            self._interrupt()
        in_collective, anywhere = ABORT_FOREIGN_AFTER
        aborts_foreign = waited > anywhere or (waited > in_collective and self.status.in_collective())
        if snapshot.kind == "works" and aborts_foreign:
            others = [rank for rank in self._thread_failures.ranks if rank != self.rank]
            self._with_store(partial(sockets.abort_foreign_groups, ranks=others))
        limit = EXIT_AFTER if self.cause.kind == status.TIMEOUT else self._limits.timeout
        if limit is not None and waited > limit:
            _, stack = self.status.python_stack()
            report = f"rank {self.rank} {snapshot}, and exits, because the pipeline has stopped:\n{self.cause.error()}"
            os.write(2, f"{report}\n\nOn rank {self.rank}:\n{stack}".encode())
            os._exit(1)

    def _with_store(self, action: Callable[[Any], None]) -> None:
        if not self._client.gone:
            with suppress(RuntimeError):
                action(self._client.store)

    def _interrupt(self) -> None:
        """Interrupt the main thread as by Ctrl-C, unless the program has its own handler."""
        main = threading.main_thread().ident
        handlers = (signal.default_int_handler, self._on_sigint)
        if main == self.status.thread and signal.getsignal(signal.SIGINT) in handlers:
            with self._lock:
                if self.status.call_depth:
                    self.interrupted = True
                    signal.pthread_kill(main, signal.SIGINT)

    def _raise_if_interrupted(self, number: int, frame: object) -> None:
        if self.interrupted:
            raise KeyboardInterrupt


# ── exit hooks ───────────────────────────────────────────────────────────────────────────────────────────────────


_watches: WeakSet[Watch] = WeakSet()
_excepthook_lock = threading.RLock()  # the garbage collector may stop a watch while another one starts
_previous_excepthook: Callable[..., Any] | None = None  # set while Penstock's hook is installed


def _set_excepthook(watch: Watch, *, watching: bool) -> None:
    """Add or remove a watch. The excepthook is installed with the first watch and removed with the last."""
    global _previous_excepthook
    with _excepthook_lock:
        (_watches.add if watching else _watches.discard)(watch)
        if _watches and _previous_excepthook is None:
            _previous_excepthook, sys.excepthook = sys.excepthook, _on_uncaught_exception
        # A hook that was installed later calls this one, which must be kept then.
        elif not _watches and sys.excepthook is _on_uncaught_exception and _previous_excepthook is not None:
            sys.excepthook, _previous_excepthook = _previous_excepthook, None


def on_exit_of_program() -> None:
    """Close all pipelines at the end of a program without an exception, so that ranks that use them fail."""
    for watch in list(_watches):
        watch.on_exit(None)
    sockets.close_process_ports()


def is_failed_exit(error: BaseException | None) -> bool:
    """Whether a program that ends by this exception has failed."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None and not isinstance(error, GeneratorExit)


def _on_uncaught_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    previous = _previous_excepthook or sys.__excepthook__  # ``on_exit`` may reset ``_previous_excepthook``
    if not hasattr(sys, "ps1"):  # at an interactive prompt, the program continues
        for watch in list(_watches):
            watch.on_exit(error)
    previous(kind, error, trace)


# ── rendezvous ───────────────────────────────────────────────────────────────────────────────────────────────────

_num_pipelines: Counter[tuple[int, ...]] = Counter()  # pipelines that this process has begun to build, by their ranks


class Rendezvous:
    """One pipeline's keys in the store, and the watch of this rank."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        """``ranks`` are world ranks, and ``rank`` is the world rank of this process."""
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        _num_pipelines[self.ranks] += 1
        name = f"penstock/{digest(str(self.ranks))}/{_num_pipelines[self.ranks]}"
        self._main_store = store = default_store()
        self.store = PrefixStore(name, store)
        self.complete = False  # whether all ranks have arrived
        sockets.limit_store_silence(store, ARRIVAL_TIMEOUT)
        with _store_errors(store):
            self.store.check(["begun"])  # fails at once if the store is gone; a new connection would wait
            self.watch = Watch(store, name, self.ranks, rank)
        sockets.limit_store_silence(store, ARRIVAL_TIMEOUT)  # of the new connections
        self._num_gathers = 0

    def cancel(self, error: BaseException) -> None:
        """Publish that this rank could not build its pipeline. If another rank caused it, raise that rank's error."""
        cause = None
        if self.complete and isinstance(error, (RuntimeError, ChannelError)) and not isinstance(error, PenstockError):
            cause = self.watch.failures.wait_for_cause()  # a connection to another rank may have failed
        if cause is None:
            self.watch.failures.report(error, prefix="could not build its pipeline: ")
        self.watch.stop()
        if cause is not None:
            raise cause.error() from error

    def compare(self, config: Mapping[str, Any]) -> None:
        """Wait for all ranks; raise if one does not arrive, or if its configuration differs from the first rank's.

        Mappings in it are compared by digest. If two digests differ, the error names the first difference.
        """
        mappings = {name: value for name, value in config.items() if isinstance(value, Mapping)}
        digests = {name: digest(str(sorted(value.items()))) for name, value in mappings.items()}
        configs = self.gather({**config, **digests})
        for name in dict.fromkeys(name for other in configs for name in other):
            first, *_ = values = [other.get(name, "missing") for other in configs]
            differ = {rank: value for rank, value in zip(self.ranks, values, strict=True) if value != first}
            if differ and name in mappings:
                self.compare(mappings[name])
            if differ:
                raise PlanError(
                    f"the ranks were given different pipelines: {name} is {first} on rank {self.ranks[0]}, but "
                    + ", ".join(f"{value} on rank {rank}" for rank, value in differ.items())
                    + ". Give every rank the same"
                    + (MEASURED_PLAN if name == "plan" else "")
                )

    def publish(self, value: Mapping[str, Any]) -> list[str]:
        """Publish this rank's value, which must be JSON, for the next ``gather``; return the keys of all ranks."""
        self._num_gathers += 1
        keys = [f"gather/{self._num_gathers}/{rank}" for rank in range(len(self.ranks))]
        self.store.set(keys[self.rank], json.dumps(value))
        return keys

    def gather(
        self, value: Mapping[str, Any], how: str = "until this pipeline is begun by", *, limited: bool = True
    ) -> list[dict[str, Any]]:
        """Gather the values of all ranks. Raises if a rank fails, or if ``limited`` and it does not arrive in time."""
        start, pause = time.monotonic(), 0.001
        others = [rank for place, rank in enumerate(self.ranks) if place != self.rank]
        with _store_errors(self._main_store), self.watch.status.waiting(others, how):
            keys = self.publish(value)
            while not self.store.check(keys):
                cause = self.watch.cause or self.watch.failures.read()
                if cause is not None and not self.store.check(keys):
                    raise cause.error()
                if limited and time.monotonic() - start > ARRIVAL_TIMEOUT:
                    missing = [self.ranks[r] for r, key in enumerate(keys) if not self.store.check([key])]
                    raise PipelineError(
                        f"after {ARRIVAL_TIMEOUT:.0f} s, ranks {missing} have not begun to build this pipeline: every "
                        "rank must build the same pipelines in the same order"
                    )
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        if not self.complete:
            self.complete = True
            addresses = self._read([f"address/{rank}" for rank in self.ranks], (str, int))
            self.watch.sockets.peer_addresses |= {(host, port) for host, port in addresses}
        return self._read(keys, {})

    def _read(self, keys: Sequence[str], schema: Any) -> list[Any]:
        values = {key: read_value(self.store, key, schema) for key in keys}
        if invalid := [key for key, value in values.items() if value is None]:
            raise PipelineError(f"{invalid[0]} in the store is not a rank's: does another program write to it?")
        return list(values.values())


@contextmanager
def _store_errors(store: Any) -> Iterator[None]:
    """A context for the rendezvous: errors of the store become a ``PipelineError``."""
    try:
        yield
    except DistError as error:
        raise store_unreachable(store, error).error() from error


MEASURED_PLAN = (
    ". With sample=, each rank measures layers by itself, and may cut elsewhere: pass balance='parameters' or the "
    "counts balance=[…], or load a plan that one rank has saved, ps.Plan.load(path, model)"
)


def pipeline_config(plan: Plan, source: ScheduleProvider, options: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that must be equal on all ranks. It includes versions, because messages are pickled."""
    schedule = source.training(source.microbatches)
    structure = (plan.stages, plan.edges, plan.ties)
    return {
        "penstock": __version__,
        "torch": torch.__version__,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "micro-batches": source.microbatches,
        "model": plan.require_chain().signature,
        "plan": f"{plan.num_stages} stages of {[*map(len, plan.groups)]} layers ({digest(str(structure))})",
        "schedule": f"{schedule.name} ({digest(str(schedule))})",
        **{name: repr(value) for name, value in options.items()},
    }


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
