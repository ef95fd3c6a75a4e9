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

Task = Callable[[], None]
Inbox: TypeAlias = "SimpleQueue[tuple[Task, RunReport] | None]"
_threads_lock = threading.Lock()

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class RunReport:
    """How the tasks of one run ended, in that order; ``news`` wakes the thread that waits for them."""

    news: SimpleQueue[None]
    outcomes: list[BaseException | None] = field(default_factory=list)


class WorkerThreads:
    """Runs one task per rank, all at once."""

    def __init__(self, devices: Sequence[torch.device], cpu_threads: int | None) -> None:
        """One worker per device; ``cpu_threads`` limits the threads that an operator uses on the CPU in each."""
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

    def run(self, tasks: Sequence[Task], cancel: Callable[[], None], detector: Callable[[], Task]) -> None:
        """Run ``tasks[r]`` on worker ``r``, and wait for all."""
        self.wait(self.start(tasks), cancel, detector)

    def start(self, tasks: Sequence[Task]) -> RunReport:
        """Queue ``tasks[r]`` on worker ``r``."""
        if self.closed:
            raise PipelineError("this pipeline was closed: build a new one from its plan")
        report = RunReport(SimpleQueue())
        for inbox, task in zip(self.inboxes, tasks, strict=True):
            inbox.put((task, report))
        return report

    def wait(self, report: RunReport, cancel: Callable[[], None], detector: Callable[[], Task]) -> None:
        """Wait for started tasks. The first failure cancels the others and is raised here.

        ``detector`` makes a hang detector, which is called while nothing happens. If it raises a ``PipelineError``, the
        workers are told to end, and a task that does not return is left to its thread.
        """
        failure: BaseException | None = None
        detect: Task | None = None
        while len(report.outcomes) < len(self.inboxes):
            try:
                try:
                    report.news.get(timeout=POLL_SECONDS)
                except Empty:
                    detect = detect or detector()
                    detect()
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
        """End the threads, and wait for them a few seconds. Closing twice is harmless."""
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


def _stop(inboxes: Sequence[SimpleQueue[Any]]) -> None:
    for inbox in inboxes:
        inbox.put(None)


def _worker_loop(inbox: Inbox, device: torch.device, cpu_threads: int | None) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # gives this thread the device's context, without which cuBLAS warns
    elif cpu_threads is not None:
        _limit_threads(cpu_threads)
    while (item := inbox.get()) is not None:
        task, report = item
        error: BaseException | None = None
        try:
            task()
        except Cancelled:
            pass  # the rank that failed reports why
        except BaseException as raised:
            error = raised
        # Nothing of the step may stay alive in this frame until the next one comes.
        del item, task
        report.outcomes.append(error)
        report.news.put(None)
        del report, error


def _limit_threads(count: int) -> None:
    """Let operators called in this thread use ``count`` CPU threads, and leave other threads as they are.

    The number belongs to the thread, but setting it also sets the default of threads started later.
    """
    with _threads_lock:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        if before != count:
            restore = threading.Thread(target=torch.set_num_threads, args=(before,))
            restore.start()
            restore.join()
