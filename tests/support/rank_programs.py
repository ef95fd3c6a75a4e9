"""Run whole programs, one process per rank, that may end with an exception, with ``sys.exit`` or normally.

exits = run_programs(source, 3)         # python -c source, as a user starts it
exits = run_processes(function, 3)      # function(rank) in processes of multiprocessing
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.fork_python import fork_python
from tests.support.ranks import forkserver_context, free_port

__all__ = ["ProgramExit", "run_processes", "run_programs", "without_hostname_warnings"]

_HOSTNAME_WARNING = "The hostname of the client socket cannot be retrieved"


@dataclass(frozen=True)
class ProgramExit:
    """The exit code and the output of one rank's program."""

    code: int | None  # None: killed after the timeout
    text: str


def without_hostname_warnings(text: str) -> str:
    """Drop torch's warning about hosts whose names cannot be resolved: it may appear anywhere in the output."""
    return "".join(line for line in text.splitlines(keepends=True) if _HOSTNAME_WARNING not in line)


def run_programs(
    source: str, n: int, *args: str, timeout: float = 150.0, fresh: int | None = None
) -> list[ProgramExit]:
    """Run a program on ``n`` ranks; rank 0 hosts the store.

    The processes are forks, which start fast; rank ``fresh`` has a new interpreter.
    """
    with _folder() as folder:
        running = []
        for rank, environment in enumerate(_environments(n)):
            with open(folder / str(rank), "w") as log:
                command = [sys.executable if rank == fresh else fork_python(), "-c", source, *args]
                running.append(subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log))
        end = time.monotonic() + timeout
        codes: list[int | None] = []
        for process in running:
            try:
                codes.append(process.wait(max(0.1, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                codes.append(None)
        return [
            ProgramExit(code, without_hostname_warnings((folder / str(rank)).read_text()))
            for rank, code in enumerate(codes)
        ]


def run_processes(function: Callable[..., Any], n: int, *args: Any, timeout: float = 150.0) -> list[ProgramExit]:
    """Run a function on ``n`` ranks; rank 0 hosts the store."""
    context = forkserver_context()
    with _folder() as folder:
        running: list[Any] = []
        for rank, environment in enumerate(_environments(n)):
            process = context.Process(target=_run, args=(function, rank, environment, str(folder / str(rank)), args))
            process.start()
            running.append(process)
        end = time.monotonic() + timeout
        for process in running:
            process.join(max(0.1, end - time.monotonic()))
        codes = [process.exitcode for process in running]
        for process in running:
            process.kill()
            process.join()
        return [
            ProgramExit(code, without_hostname_warnings((folder / str(rank)).read_text()))
            for rank, code in enumerate(codes)
        ]


def _run(function: Callable[..., Any], rank: int, environment: dict[str, str], log: str, args: Any) -> None:
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # torch has been imported already
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    function(rank, *args)


def _environments(n: int) -> list[dict[str, str]]:
    port = str(free_port())
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"} for rank in range(n)]


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
