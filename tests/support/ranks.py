"""Rank processes for tests of distributed pipelines: started once, used for many cases, with a timeout.

    ranks = Ranks(2)
    ranks.run(case, *args)     # case(rank, *args) on every rank; per rank its result or its exception
    run_ranks(case, 2, *args)  # the same with new processes, killed afterwards

The test's own process hosts the store of the process group, as torchrun's agent does, so any rank may be killed. A case
that exceeds its timeout fails with the stack of every rank that is still running.
"""

from __future__ import annotations

import contextlib
import faulthandler
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
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankExited", "Ranks", "RanksHung", "forkserver_context", "free_port", "run_ranks", "start_ranks"]

_ROOT = Path(__file__).parents[2]
_IMPORTS = ["torch", "torch.distributed", "penstock", "pytest", "tests.support.fork_python", "tests.support.preload"]


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

    def run(self, case: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Run ``case(rank, *args)`` on every rank: per rank its result, or the exception that it raised."""
        if not self._members:
            self._start(timeout)
        results = self._all(("run", case, args), timeout)
        if any(isinstance(result, RankExited) for result in results):
            self.stop()
        return results

    def check(self, case: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Like ``run``, but an exception of any rank fails the test."""
        results = self.run(case, *args, timeout=timeout)
        raised = [(rank, r) for rank, r in enumerate(results) if isinstance(r, BaseException)]
        if raised:
            descriptions = "\n\n".join(f"rank {rank}: {_describe(error)}" for rank, error in raised)
            raise AssertionError(f"{len(raised)} of {self.n} ranks raised\n\n{descriptions}")
        return results

    def stop(self) -> None:
        """Kill the processes. A later case starts new ones."""
        members, self._members, self._server = self._members, [], None
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
            with contextlib.suppress(BrokenPipeError):
                member.pipe.send_bytes(pickle.dumps(order))
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
        self.log = Path(tempfile.mkstemp(prefix="penstock_rank")[1])
        context = forkserver_context()
        self.pipe, there = context.Pipe()
        arguments = (there, rank, n, port, keeps_store, str(self.log))
        self.process = context.Process(target=_rank_main, args=arguments, daemon=True)
        self.process.start()
        there.close()

    def result(self) -> Any:
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join(5)
            return RankExited(f"rank {self.rank} ended with exit code {self.process.exitcode}")

    def stack(self) -> str:
        """The current stacks of all threads of the process."""
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self.log.read_text() or "(no stack)"

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
                else:
                    result = order[1](rank, *order[2])
            except BaseException as error:
                result = _with_traceback(error)
            pipe.send_bytes(_pickled(result))
            del result, order


def _with_traceback(error: BaseException) -> BaseException:
    """The error with its traceback as a note, because pickling drops the traceback."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


def _pickled(result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        return pickle.dumps(RuntimeError(f"a rank's result cannot be sent to the test: {error}"))


def free_port() -> int:
    """A free port below the ephemeral range, from which connections of other tests could take it."""
    while True:
        port = random.SystemRandom().randrange(10000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
