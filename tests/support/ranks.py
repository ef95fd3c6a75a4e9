"""Rank processes for tests of distributed pipelines: started once, used for many cases, with a timeout.

    ranks = Ranks(2)
    ranks.run(case, *args)     # case(rank, *args) on every rank; per rank its result or its exception
    run_ranks(case, 2, *args)  # the same with new processes, killed afterwards

The test's own process hosts the store of the process group, as torchrun's agent does, so any rank may be killed. A case
that exceeds its timeout fails with the stack of every rank that is still running.

Each gloo group has a thread that polls a hundred times a second, which takes 0.3 % of a core. Groups of
``torch.distributed`` that a case leaves behind are therefore destroyed, and idle processes are paused.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import random
import signal
import socket
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = [
    "RankExited",
    "Ranks",
    "RanksHung",
    "forkserver_context",
    "free_port",
    "pause_all",
    "run_ranks",
    "start_ranks",
]

_ROOT = Path(__file__).parents[2]
_IMPORTS = ["torch", "torch.distributed", "penstock", "pytest", "tests.support.fork_python", "tests.support.preload"]

_FEW_THREADS = 16  # the main thread, and three for each of five gloo groups


def forkserver_context() -> Any:
    """A multiprocessing context whose processes are forks of one that has imported torch and penstock."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS)
    with contextlib.chdir(_ROOT):  # to import ``tests``
        forkserver.ensure_running()
    return context


class RankExited(Exception):
    """A rank whose process ended before its case did."""


class RanksHung(AssertionError):
    """Ranks were still running at the timeout."""


class Ranks:
    """``n`` processes in one gloo group. The first case starts them, and the next case after a rank exited."""

    def __init__(self, n: int, *, store: str = "parent") -> None:
        """``store="first"`` hosts the group's store in rank 0, as ``init_process_group`` does without torchrun."""
        self.n = n
        self.store = store
        self._members: list[_RankProcess] = []
        self._server: Any = None
        self._paused = False
        _all_ranks.add(self)

    def run(self, case: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Run ``case(rank, *args)`` on every rank: per rank its result, or the exception that it raised."""
        if not self._members:
            self._start(timeout)
        results = self._all(("run", case, args), timeout)
        if any(isinstance(result, RankExited) for result in results):
            self.stop()
        elif any(member.has_groups for member in self._members):
            self._all(("release groups",), timeout)
        return results

    def check(self, case: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Like ``run``, but an exception of any rank fails the test."""
        results = self.run(case, *args, timeout=timeout)
        raised = [(rank, r) for rank, r in enumerate(results) if isinstance(r, BaseException)]
        if raised:
            descriptions = "\n\n".join(f"rank {rank}: {_describe(error)}" for rank, error in raised)
            raise AssertionError(f"{len(raised)} of {self.n} ranks raised\n\n{descriptions}")
        return results

    def pause(self) -> None:
        """Stop the processes until the next case; end them if they have many threads, of groups that are left."""
        if any(member.num_threads() > _FEW_THREADS for member in self._members):
            self.stop()
            return
        for member in self._members:
            member.signal(signal.SIGSTOP)
        self._paused = True

    def stop(self) -> None:
        """Kill the processes. A later case starts new ones."""
        members, self._members, self._server, self._paused = self._members, [], None, False
        for member in members:
            member.end()

    def _start(self, timeout: float) -> None:
        if self.store == "parent":
            self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self._server.port
        else:
            port = free_port()
        self._members = [
            _RankProcess(rank, self.n, port, self.store == "first" and rank == 0) for rank in range(self.n)
        ]
        for result in self._all(("join",), timeout):
            if isinstance(result, BaseException):
                self.stop()
                raise result

    def _all(self, order: tuple[Any, ...], timeout: float) -> list[Any]:
        for member in self._members:
            if self._paused:
                member.signal(signal.SIGCONT)
            with contextlib.suppress(BrokenPipeError):
                member.pipe.send_bytes(pickle.dumps(order))
        self._paused = False
        results: dict[int, Any] = {}
        end = time.monotonic() + timeout
        try:
            while len(results) < self.n:
                waiting = {m.pipe: m for m in self._members if m.rank not in results}
                ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
                if not ready:
                    stacks = "\n\n".join(f"rank {m.rank} is at\n{m.stack()}" for m in waiting.values())
                    others = "\n\n".join(f"rank {r} gave {_describe(result)}" for r, result in results.items())
                    raise RanksHung(f"after {timeout:g} s, ranks are not done\n\n{stacks}\n\n{others}")
                for pipe in ready:
                    results[waiting[pipe].rank] = waiting[pipe].result()
        except BaseException:
            self.stop()
            raise
        return [results[rank] for rank in range(self.n)]


_all_ranks: weakref.WeakSet[Ranks] = weakref.WeakSet()


def pause_all() -> None:
    """Pause all ranks of this process until their next case."""
    for ranks in _all_ranks:
        ranks.pause()


@contextlib.contextmanager
def start_ranks(n: int, *, store: str = "parent") -> Iterator[Ranks]:
    """``n`` processes, killed at the end."""
    made = Ranks(n, store=store)
    try:
        yield made
    finally:
        made.stop()


def run_ranks(case: Callable[..., Any], n: int, *args: Any, timeout: float = 60.0, store: str = "parent") -> list[Any]:
    """Run ``case(rank, *args)`` on ``n`` fresh processes: per rank its result, or the exception that it raised."""
    with start_ranks(n, store=store) as made:
        return made.run(case, *args, timeout=timeout)


def _describe(result: Any) -> str:
    if not isinstance(result, BaseException):
        return repr(result)
    return "".join([f"{type(result).__name__}: {result}", *(f"\n{note}" for note in getattr(result, "__notes__", []))])


class _RankProcess:
    """The test's handle of one rank process."""

    def __init__(self, rank: int, n: int, port: int, keeps_store: bool) -> None:
        self.rank = rank
        self.has_groups = False  # other than the default one, after the last case
        self.log = Path(tempfile.mkstemp(prefix="penstock_rank")[1])
        context = forkserver_context()
        self.pipe, there = context.Pipe()
        arguments = (there, rank, n, port, keeps_store, str(self.log))
        self.process = context.Process(target=_rank_main, args=arguments, daemon=True)
        self.process.start()
        there.close()

    def result(self) -> Any:
        try:
            result, self.has_groups = pickle.loads(self.pipe.recv_bytes())
            return result
        except EOFError:
            self.process.join(5)
            return RankExited(f"rank {self.rank} ended with exit code {self.process.exitcode}")

    def stack(self) -> str:
        """The current stacks of all threads of the process."""
        self.signal(signal.SIGUSR1)
        time.sleep(0.3)
        return self.log.read_text() or "(no stack)"

    def num_threads(self) -> int:
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{self.process.pid}/task"))
        return 0

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.process.close()
        self.log.unlink(missing_ok=True)


def _rank_main(pipe: Any, rank: int, n: int, port: int, keeps_store: bool, log: str) -> None:
    """Main loop of a rank: join the group, then run cases until the test closes the pipe."""
    with open(log, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        with contextlib.suppress(AttributeError):  # Linux: a paused process would not see that the test has ended
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        torch.set_num_threads(1)
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")  # torch 2.12
        store: Any = None
        while True:
            try:
                order = pickle.loads(pipe.recv_bytes())
            except EOFError:
                os._exit(0)
            result: Any = None
            try:
                if order[0] == "join":
                    store = dist.TCPStore("127.0.0.1", port, n, is_master=keeps_store, wait_for_workers=False)
                    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=60))
                elif order[0] == "release groups":
                    _release_groups()
                else:
                    torch.manual_seed(0)  # the same on every rank, whichever cases ran before
                    random.seed(0)
                    result = order[1](rank, *order[2])
            except BaseException as error:
                result = _with_traceback(error)
            pipe.send_bytes(_pickled(result))
            del result, order


def _groups() -> list[dist.ProcessGroup]:
    """Groups that a case has made. Those of a DeviceMesh stay: DTensor's caches keep them for the next equal mesh."""
    world = distributed_c10d._world
    return [g for g in world.pg_map if g is not world.default_pg and not g.group_desc.startswith("mesh_")]


def _release_groups() -> None:
    """Destroy the groups that the last case has left behind; their connections close with the last reference."""
    for group in _groups():
        names = distributed_c10d._world.pg_names
        name = names[group]
        dist.destroy_process_group(group)
        names[object()] = name  # torch derives names from the number of groups; the store has keys of the old names
    gc.collect()


def _with_traceback(error: BaseException) -> BaseException:
    """The error with its traceback as a note, because pickling drops the traceback."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


def _pickled(result: Any) -> bytes:
    has_groups = bool(_groups())
    try:
        return pickle.dumps((result, has_groups))
    except Exception as error:
        return pickle.dumps((RuntimeError(f"a rank's result cannot be sent to the test: {error}"), has_groups))


def free_port() -> int:
    """A free port below the ephemeral range, from which connections of other tests could take it."""
    while True:
        port = random.SystemRandom().randrange(10000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
