"""The pipeline of the demo with a process for each rank, started from here and followed over pipes.

this process   trains the plain model         ◀──steps, accuracy──   the rank that has the last stage
               waits, watches, cleans up      ◀──why it failed────   any rank
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from penstock.data import mnist
from penstock.data.mnist import Digits
from penstock.demo.runs import PipelineRun, Settings, Step, device_of
from penstock.errors import PenstockError
from penstock.train.mesh import Mesh

__all__ = ["ProcessesRun"]

_PATIENCE = 120.0
"""Seconds without news after which the ranks are given up. Starting them, on a busy machine, takes ten."""

_FAREWELL = 10.0
"""Seconds that a rank has to end by itself."""


@dataclass(frozen=True)
class _Failure:
    """Why a rank stopped."""

    cause: str


@dataclass(frozen=True)
class _Waited:
    """The bubble of a rank in a step."""

    bubble: float


class ProcessesRun:
    """The same as ``PipelineRun``, in processes of its own. ``last`` is the rank that has the last stage."""

    def __init__(self, settings: Settings, ranks: int, last: int) -> None:
        self.last = last
        self._accuracy: float | None = None  # known when all is done
        self._bubbles: dict[int, float] = {}  # what each rank told last
        # The store is here, on a port that the system gave it: no other program can take it in between.
        self.store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        context = mp.get_context("spawn")
        self.processes: list[Any] = []
        self.news: dict[Connection, int] = {}  # from which rank
        for rank in range(ranks):
            inbox, outbox = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(settings, rank, ranks, self.store.port, last, outbox), daemon=True
            )
            with _ctrl_c_ignored():
                process.start()
            outbox.close()  # so that the pipe ends with the process
            self.processes.append(process)
            self.news[inbox] = rank

    def steps(self, train: Digits) -> Iterator[Step]:
        """The ranks read the same digits and make the same batches; here arrive the results."""
        while isinstance(news := self._next(), Step):
            yield replace(news, bubble=fmean(self._bubbles.values()) if self._bubbles else None)
        self._accuracy = news

    def accuracy(self, test: Digits) -> float:
        assert self._accuracy is not None
        return self._accuracy

    def close(self) -> None:
        """See the processes out, and end those that do not go."""
        for process in self.processes:
            process.join(0 if self._accuracy is None else _FAREWELL)
            if process.is_alive():
                process.terminate()
                process.join(_FAREWELL)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for inbox in self.news:
            inbox.close()
        self.processes.clear()
        self.news.clear()

    def _next(self) -> Any:
        """The next result. A failure of any rank, or a long silence, is an error."""
        while True:
            ready = wait(list(self.news), _PATIENCE)
            if not ready:
                raise PenstockError(f"the ranks have said nothing for {_PATIENCE:.0f} seconds: given up")
            for inbox in ready:
                assert isinstance(inbox, Connection)
                rank = self.news[inbox]
                try:
                    news = inbox.recv()
                except EOFError:
                    del self.news[inbox]
                    inbox.close()
                    self.processes[rank].join(_FAREWELL)
                    code = self.processes[rank].exitcode
                    if code or rank == self.last:
                        raise PenstockError(f"the process of rank {rank} ended early, with exit code {code}") from None
                    continue
                if isinstance(news, _Failure):
                    raise PenstockError(news.cause)
                if not isinstance(news, _Waited):
                    return news
                self._bubbles[rank] = news.bubble


def _work(settings: Settings, rank: int, ranks: int, port: int, last: int, outbox: Connection) -> None:
    """One rank, from its first to its last breath."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
        patience = timedelta(seconds=_PATIENCE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
        run = PipelineRun(settings, Mesh(pipe=ranks, device=device_of(settings, rank)))
        train, test = mnist.load(settings.data)
        for step in run.steps(train):
            if step.bubble is not None:
                outbox.send(_Waited(step.bubble))
            if rank == last:
                outbox.send(step)
        accuracy = run.accuracy(test)
        if rank == last:
            outbox.send(accuracy)
        run.close()
        dist.destroy_process_group()
    except BrokenPipeError:
        pass  # nobody is interested any more
    except Exception as error:
        cause = str(error) if isinstance(error, PenstockError) else f"rank {rank}: {traceback.format_exc()}"
        with suppress(BrokenPipeError):
            outbox.send(_Failure(cause))


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """What is started in here ignores Ctrl-C from its first moment: it is for the process that starts it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _follow_parent() -> None:
    """Whatever ends the process that started this one ends this one too."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
