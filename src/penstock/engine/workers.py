"""Persistent threads, one per rank of a pipeline in this process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import torch

from penstock.engine.channel.local import Cancelled
from penstock.errors import PipelineError

__all__ = ["RunReport", "WorkerThreads"]

Task = Callable[[], None]
Inbox: TypeAlias = "SimpleQueue[tuple[Task, RunReport] | None]"
_threads_lock = threading.Lock()

POLL_SECONDS = 0.2  # seconds of silence after which the one who waits looks around


@dataclass(frozen=True)
class RunReport:
    """How the jobs of one run ended, in that order; ``news`` wakes whoever waits for the next one."""

    news: SimpleQueue[None]
    outcomes: list[BaseException | None] = field(default_factory=list)


class WorkerThreads:
    """Runs one job per rank at a time, all at once, and waits for them all."""

    def __init__(self, devices: Sequence[torch.device], cpu_threads: int | None) -> None:
        """One worker per device; ``cpu_threads`` is how many threads an operator may use on the CPU in each of them."""
        self.inboxes: list[Inbox] = [SimpleQueue() for _ in devices]
        self._threads = [
            threading.Thread(
                target=_worker_loop, args=(inbox, device, cpu_threads), name=f"penstock rank {rank}", daemon=True
            )
            for rank, (inbox, device) in enumerate(zip(self.inboxes, devices, strict=True))
        ]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _stop, self.inboxes)

    def run(self, jobs: Sequence[Task], cancel: Callable[[], None], look: Callable[[], None]) -> None:
        """Run ``jobs[r]`` on worker ``r``. The first failure cancels the others and is raised here."""
        self.wait(self.start(jobs), cancel, look)

    def start(self, jobs: Sequence[Task]) -> RunReport:
        """Give ``jobs[r]`` to worker ``r``, which does it when it is done with those it was given before."""
        if self.closed:
            raise PipelineError("this pipeline was closed: build a new one from its plan")
        report = RunReport(SimpleQueue())
        for inbox, job in zip(self.inboxes, jobs, strict=True):
            inbox.put((job, report))
        return report

    def wait(self, report: RunReport, cancel: Callable[[], None], look: Callable[[], None]) -> None:
        """Wait for jobs that were started. The first failure cancels the others and is raised here.

        Meanwhile ``look`` is called from time to time. If it raises a ``PipelineError``, the waiting is over: the
        workers are to end, and a job that does not come to its end is left to its thread.
        """
        failure: BaseException | None = None
        while len(report.outcomes) < len(self.inboxes):
            try:
                if not _wait_for_outcome(report):
                    look()
                errors = [error for error in report.outcomes if error is not None]
            except KeyboardInterrupt as interrupt:  # may come just after the news: outcomes are counted, not news
                errors = [interrupt]
            except PipelineError:
                cancel()
                self._end()
                raise
            if errors and failure is None:
                failure = errors[0]
                cancel()
        if failure is None:
            failure = next((error for error in report.outcomes if error is not None), None)
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the threads, and wait for them for a moment. Closing twice is harmless."""
        self._end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5)

    @property
    def threads(self) -> list[int]:
        """The idents of the workers' threads."""
        return [thread.ident or 0 for thread in self._threads]

    @property
    def closed(self) -> bool:
        return not self._end.alive


def _wait_for_outcome(report: RunReport) -> bool:
    try:
        report.news.get(timeout=POLL_SECONDS)
    except Empty:
        return False
    return True


def _stop(inboxes: Sequence[SimpleQueue[Any]]) -> None:
    for inbox in inboxes:
        inbox.put(None)


def _worker_loop(inbox: Inbox, device: torch.device, cpu_threads: int | None) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # gives this thread the device's context, which cuBLAS complains to be without
    elif cpu_threads is not None:
        _limit_threads(cpu_threads)
    while (task := inbox.get()) is not None:
        job, report = task
        error: BaseException | None = None
        try:
            job()
        except Cancelled:
            pass  # the rank that failed says why
        except BaseException as raised:
            error = raised
        # Nothing of the step may stay alive in this frame until the next one comes.
        del task, job
        report.outcomes.append(error)
        report.news.put(None)
        del report, error


def _limit_threads(count: int) -> None:
    """Let operators called in this thread use ``count`` CPU threads, and leave other threads as they are.

    The number belongs to the thread, but setting it also sets what threads started later begin with.
    """
    with _threads_lock:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        if before != count:
            restore = threading.Thread(target=torch.set_num_threads, args=(before,))
            restore.start()
            restore.join()
