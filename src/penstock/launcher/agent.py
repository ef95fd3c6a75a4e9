"""Torch's launcher, with output that is there once, and failures that are told once."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from penstock.errors import PenstockError

__all__ = ["Failure", "Launch", "launch"]

_WORKER = str(Path(__file__).with_name("worker.py"))

_LAST_LINES = 30
"""Of what a rank has printed before it ended without a word."""


@dataclass(frozen=True)
class Launch:
    """What to start."""

    command: tuple[str, ...]  # a script and its arguments, or -m, a module and its arguments
    processes: int  # on this machine
    nodes: int
    node_rank: int | None
    endpoint: str | None  # where the machines meet, if there are several
    logs: Path
    show_all: bool


@dataclass(frozen=True)
class Failure:
    """How it failed first: in a line, in full, and as an exit code."""

    summary: str
    told: str
    code: int


def launch(wanted: Launch) -> int | Failure:
    """Run it to its end; 0, 128 plus the number of the signal that stopped it, or what failed."""
    if "LOGLEVEL" not in os.environ:
        _quieten()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10")  # seconds from Ctrl-C to the end of the patience
    output = _Output(wanted.logs, wanted.show_all)
    try:
        elastic_launch(_config(wanted, output), sys.executable)("-u", _WORKER, *wanted.command)
    except ChildFailedError as error:
        failure = _first(error.failures, output)
        here = " (the first on this machine)" if wanted.nodes > 1 else ""
        return replace(failure, summary=failure.summary + here)
    except SignalException as error:
        return 128 + error.sigval
    except (RendezvousError, dist.DistError, TimeoutError) as error:
        raise PenstockError(
            f"the {wanted.nodes} machines did not meet{f' at {wanted.endpoint}' if wanted.endpoint else ''}: {error}"
        ) from error
    return 0


def _config(wanted: Launch, output: LogsSpecs) -> LaunchConfig:
    if wanted.endpoint is None:
        # A store on a port that the system gives it, in this process: any rank may end without taking it along.
        where: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "127.0.0.1"}
    elif wanted.node_rank is None:
        where = {"rdzv_backend": "c10d", "rdzv_endpoint": wanted.endpoint}
    else:
        rank = {"rank": wanted.node_rank}
        where = {"rdzv_backend": "static", "rdzv_endpoint": wanted.endpoint, "rdzv_configs": rank}
    return LaunchConfig(
        min_nodes=wanted.nodes,
        max_nodes=wanted.nodes,
        nproc_per_node=wanted.processes,
        run_id="penstock" if wanted.endpoint else uuid.uuid4().hex,
        max_restarts=0,
        logs_specs=output,
        log_line_prefix_template="[rank ${rank}] ",
        **where,
    )


class _Output(LogsSpecs):
    """Rank 0 keeps the terminal, so that it can draw there; the others write to files, which may be followed."""

    def __init__(self, directory: Path, show_all: bool) -> None:
        super().__init__()
        self.directory = directory
        self.show_all = show_all

    @property
    def root_log_dir(self) -> str:
        return str(self.directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        out, err, errors = {}, {}, {}
        for local, env in envs.items():
            rank = int(env["RANK"])
            out[local] = str(self.printed(rank, "out")) if rank else ""
            err[local] = str(self.printed(rank, "err")) if rank else ""
            errors[local] = env["TORCHELASTIC_ERROR_FILE"] = str(self.directory / f"error{rank}.json")
            Path(errors[local]).unlink(missing_ok=True)
        shown = self.show_all
        return LogsDest(
            stdouts=out,
            stderrs=err,
            tee_stdouts={local: file for local, file in out.items() if shown and file},
            tee_stderrs={local: file for local, file in err.items() if shown and file},
            error_files=errors,
        )

    def printed(self, rank: int, kind: str) -> Path:
        return self.directory / f"rank{rank}.{kind}"


def _first(failures: dict[int, ProcessFailure], output: _Output) -> Failure:
    """The failure that the others followed from."""
    records = {rank: _record(failure) for rank, failure in failures.items()}
    for failure in failures.values():
        Path(failure.error_file).unlink(missing_ok=True)
    rank = min(failures, key=lambda rank: _place(failures[rank], records[rank]))
    failure, record = failures[rank], records[rank]
    if record is not None:
        code = record.get("code", 1)
        told = record["message"]["extraInfo"]["py_callstack"]
        return Failure(f"rank {record.get('rank', rank)} failed, with exit code {code}", told, code)
    told = "" if output.show_all else _tail(output.printed(rank, "err"))
    if failure.exitcode > 0:
        return Failure(f"rank {rank} failed, with exit code {failure.exitcode}", told, failure.exitcode)
    return Failure(f"rank {rank} was killed by {failure.signal_name()}", told, 128 - failure.exitcode)


def _place(failure: ProcessFailure, record: dict[str, Any] | None) -> tuple[int, float]:
    """Its place among others: who was killed is a cause; who gave up waiting, or was asked to end, is none."""
    if record is not None:
        return 1, record.get("time", failure.timestamp)
    order: dict[int, int] = {signal.SIGABRT: 2, signal.SIGTERM: 3}
    return (order.get(-failure.exitcode, 0) if failure.exitcode < 0 else 1), failure.timestamp


def _record(failure: ProcessFailure) -> dict[str, Any] | None:
    """What the rank wrote down before it ended."""
    try:
        record: dict[str, Any] = json.loads(Path(failure.error_file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record


def _tail(file: Path) -> str:
    try:
        return "\n".join(file.read_text(errors="replace").splitlines()[-_LAST_LINES:])
    except OSError:
        return ""


def _quieten() -> None:
    """Torch's launcher tells its steps in a failure, which the user has not asked about."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
