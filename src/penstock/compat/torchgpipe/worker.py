"""Threads that compute tasks, one for each device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import Queue
from threading import Thread
from types import TracebackType
from typing import Any, TypeAlias

import torch

from penstock.compat.torchgpipe.microbatch import Batch
from penstock.compat.torchgpipe.stream import AbstractStream, use_device, use_stream
from penstock.engine.forward_context import caller_context

__all__ = ["ExcInfo", "InQueue", "OutQueue", "Task", "create_workers", "join_workers", "spawn_workers", "worker"]

ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType]
InQueue: TypeAlias = "Queue[Task | None]"
OutQueue: TypeAlias = "Queue[tuple[bool, tuple[Task, Batch] | ExcInfo | None]]"

DONE = (False, None)


class Task:
    """A function that makes a batch, for a worker, and one that is called with it, in the thread that takes it.

    Both run on the stream, and in the state of the thread that has made the task: grad and inference mode, autocast,
    default device.
    """

    def __init__(
        self, stream: AbstractStream | None, *, compute: Callable[[], Batch], finalize: Callable[[Batch], None] | None
    ) -> None:
        self.stream = stream
        self._compute, self._finalize = compute, finalize
        self._grad_mode, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._ambient = caller_context()

    def compute(self) -> Batch:
        with self._state():
            return self._compute()

    def finalize(self, batch: Batch) -> None:
        if self._finalize is not None:
            with self._state():
                self._finalize(batch)

    @contextmanager
    def _state(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(use_stream(self.stream))
            stack.enter_context(torch.set_grad_enabled(self._grad_mode and torch.is_grad_enabled()))
            if self._inference:
                stack.enter_context(torch.inference_mode())
            for context in self._ambient.contexts():
                stack.enter_context(context)
            yield


def worker(in_queue: InQueue, out_queue: OutQueue, device: torch.device, grad_mode: bool = True) -> None:
    """Compute tasks until there comes None. Unless ``grad_mode``, without gradients.

    Each leaves ``(True, (task, batch))``, or ``(False, exc_info)`` if it raised; the end is ``(False, None)``.
    """
    try:
        with use_device(device), torch.set_grad_enabled(grad_mode):
            if device.type == "cuda":
                torch.zeros(1, device=device)  # gives this thread the device's context: cuBLAS complains without
            while (task := in_queue.get()) is not None:
                out_queue.put(_outcome(task))
                del task  # and nothing else of it stays here until the next one comes
    except BaseException:  # there is no such device
        out_queue.put((False, sys.exc_info()))  # type: ignore[arg-type]
    out_queue.put(DONE)


def _outcome(task: Task) -> Any:
    try:
        return True, (task, task.compute())
    except BaseException:
        return False, sys.exc_info()  # in no variable, as the traceback has this frame


def create_workers(devices: Sequence[torch.device], grad_mode: bool = True) -> tuple[list[InQueue], list[OutQueue]]:
    """Start one worker for each different device; for every device that is given, the queues of its worker."""
    known: dict[torch.device, tuple[InQueue, OutQueue]] = {}
    for device in map(_plain, devices):
        if device not in known:
            known[device] = Queue(), Queue()
            Thread(target=worker, args=(*known[device], device, grad_mode), daemon=True).start()
    queues = [known[_plain(device)] for device in devices]
    return [queue for queue, _ in queues], [queue for _, queue in queues]


def stop_workers(in_queues: Sequence[InQueue]) -> None:
    """Let the workers end when they are done with what they have."""
    for in_queue in set(in_queues):
        in_queue.put(None)


def join_workers(in_queues: Sequence[InQueue], out_queues: Sequence[OutQueue]) -> None:
    """Stop the workers, and wait until they have ended. What they made and nobody took is dropped."""
    stop_workers(in_queues)
    for out_queue in set(out_queues):
        while out_queue.get() != DONE:
            pass


@contextmanager
def spawn_workers(devices: Sequence[torch.device]) -> Iterator[tuple[list[InQueue], list[OutQueue]]]:
    """Workers that end with the context, however it is left. Under ``torch.no_grad()`` they make no gradients."""
    in_queues, out_queues = create_workers(devices, torch.is_grad_enabled())
    try:
        yield in_queues, out_queues
    finally:
        join_workers(in_queues, out_queues)


def _plain(device: torch.device) -> torch.device:
    """The same for all ways to say the same device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device
