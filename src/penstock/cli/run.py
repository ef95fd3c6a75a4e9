"""``penstock run``: starts a script in the processes of its mesh, with torch's launcher.

output of the ranks    rank 0   ─────────────────────────▶ this terminal
                       others   ──▶ files, one pair each ─▶ shown with --all-ranks
error of a rank        all      ──▶ files, one each      ─▶ the first failure, once, at the end
"""

from __future__ import annotations

import importlib.machinery
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from penstock.cli import UsageError, count, flag, value
from penstock.errors import PenstockError
from penstock.train.launch import usable_cores

_WORKER = str(Path(__file__).with_name("run_worker.py"))
_LAST_LINES = 30  # shown of the stderr of a rank that recorded no error

_DETAILS = """\
The processes are those of ps.Mesh(): --data replicas of a pipeline of --stages, with --tensor processes per rank. \
Arguments after the script are the script's own.

The output of rank 0 is shown. That of the others goes to files (--log-dir); --all-ranks shows it too, with the rank \
before each line. When a rank fails, all are ended, the error of the first that failed is shown, and its exit code is \
this command's. Ctrl-C ends all of them.

Examples:
  penstock run --stages 4 train.py --epochs 3   four processes on this machine
  penstock run --stages 4 --data 2 train.py     two replicas: eight processes
  penstock run --stages 4 -m package.train      a module

On two machines, with the same line on both, or with --node-rank 1 on the second:
  penstock run --stages 8 --nnodes 2 --rdzv-endpoint host0:29500 train.py
  penstock run --stages 8 --nnodes 2 --node-rank 0 --master host0:29500 train.py
"""


def _endpoint(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise typer.BadParameter(f"{text!r} is not HOST:PORT")
    return text


app = typer.Typer(add_completion=False)


@app.command(
    epilog=_DETAILS,
    context_settings={"allow_interspersed_args": False},  # options after the script are the script's
    options_metavar="--stages N [OPTIONS]",
)
def run(
    script: Annotated[str, typer.Argument(metavar="train.py", help="The script, or with -m the module.")],
    stages: Annotated[int, count("Processes in a pipeline: the mesh's 'pipe'.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="The script's arguments.")] = None,
    data: Annotated[int, count("Replicas of the pipeline.")] = 1,
    tensor: Annotated[int, count("Processes that share a rank's layers.")] = 1,
    nnodes: Annotated[int, count("Machines, with as many processes each.")] = 1,
    node_rank: Annotated[int | None, count("This machine's number; with --master.", minimum=0, metavar="K")] = None,
    master: Annotated[str | None, value("HOST:PORT", "Address of machine 0, a free port.", parser=_endpoint)] = None,
    rdzv_endpoint: Annotated[
        str | None, value("HOST:PORT", "The same, if machines have no --node-rank.", parser=_endpoint)
    ] = None,
    cpu: Annotated[bool, flag("--cpu", "Use no GPUs.")] = False,
    all_ranks: Annotated[bool, flag("--all-ranks", "Show the output of every rank.")] = False,
    log_dir: Annotated[str | None, value("DIR", "Keep the output of ranks 1, 2, … as DIR/rank1.out, …")] = None,
    module: Annotated[bool, flag("-m", "The script is a module, as for 'python -m'.")] = False,
) -> int:
    """Train a script as a pipeline."""
    total, endpoint = stages * data * tensor, master or rdzv_endpoint
    _check_machines(total, nnodes, node_rank, master, rdzv_endpoint)
    _check_script(script, module)
    logs = _Logs(_directory(log_dir), all_ranks)
    command = ("-u", _WORKER, *(["-m"] * module), script, *(arguments or ()))
    mesh = {"PENSTOCK_PIPE": str(stages), "PENSTOCK_DATA": str(data), "PENSTOCK_TENSOR": str(tensor)}
    keep = log_dir is not None
    config = LaunchConfig(
        min_nodes=nnodes,
        max_nodes=nnodes,
        nproc_per_node=total // nnodes,
        run_id="penstock" if endpoint else uuid.uuid4().hex,
        max_restarts=0,
        logs_specs=logs,
        log_line_prefix_template="[rank ${rank}] ",
        **_rendezvous(endpoint, node_rank),
    )
    try:
        with _environment(mesh, total // nnodes, cpu):
            elastic_launch(config, sys.executable)(*command)
        return 0
    except ChildFailedError as error:
        failure = _first_failure(error.failures, logs)
        printed = any(file.stat().st_size for file in logs.directory.glob("rank*.*"))
        keep = keep or printed
        text = failure.text.rstrip()
        machine = " (the first on this machine)" if nnodes > 1 else ""
        print(f"\npenstock: {failure.summary}{machine}{':' if text else ''}", file=sys.stderr)
        if text:
            print(f"\n{text}\n", file=sys.stderr)
        if printed:
            print(f"penstock: the output of ranks other than 0 is in {logs.directory}", file=sys.stderr)
        return failure.code
    except SignalException as error:
        return 128 + error.sigval
    except (RendezvousError, dist.DistError, TimeoutError) as error:
        at = f" at {endpoint}" if endpoint else ""
        raise PenstockError(f"the {nnodes} machines did not connect{at}: {error}") from error
    finally:
        if not keep:
            shutil.rmtree(logs.directory, ignore_errors=True)


def _check_machines(
    total: int, nnodes: int, node_rank: int | None, master: str | None, rdzv_endpoint: str | None
) -> None:
    if total % nnodes:
        raise UsageError(f"{total} processes cannot be shared equally by --nnodes {nnodes} machines")
    if master and rdzv_endpoint:
        raise UsageError("--master is for machines with a --node-rank, --rdzv-endpoint for those without: give one")
    if nnodes == 1 and (master or rdzv_endpoint or node_rank is not None):
        raise UsageError("--master, --rdzv-endpoint and --node-rank are for several machines: give --nnodes, too")
    if nnodes > 1 and not master and not rdzv_endpoint:
        raise UsageError(f"{nnodes} machines need an address to connect to: give --rdzv-endpoint HOST:PORT or --master")
    if master and node_rank is None:
        raise UsageError("--master needs --node-rank: which of the machines this is, from 0 on")
    if rdzv_endpoint and node_rank is not None:
        raise UsageError("with --rdzv-endpoint the machines number themselves: leave out --node-rank, or use --master")
    if node_rank is not None and node_rank >= nnodes:
        raise UsageError(f"--node-rank {node_rank} is too high: --nnodes {nnodes} are numbered from 0 on")
    if endpoint := master or rdzv_endpoint:
        host = endpoint.rpartition(":")[0].strip("[]")
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError):
            raise UsageError(f"the machine {host!r} is not known here: is its name right?") from None


def _check_script(script: str, module: bool) -> None:
    if module:
        package = script.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"there is no module {script!r}: {package!r} is not here, nor installed")
    elif not Path(script).is_file():
        raise UsageError(f"there is no file {script!r}")


def _directory(log_dir: str | None) -> Path:
    """The directory for the output of the ranks."""
    if log_dir is None:
        return Path(tempfile.mkdtemp(prefix="penstock_"))
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to --log-dir {log_dir!r}: {error.strerror}") from None
    return Path(log_dir)


def _rendezvous(endpoint: str | None, node_rank: int | None) -> dict[str, Any]:
    if endpoint is None:
        # The store is in this process, on a port that the system chooses: any rank may end without it.
        return {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "127.0.0.1"}
    if node_rank is None:
        return {"rdzv_backend": "c10d", "rdzv_endpoint": endpoint}
    return {"rdzv_backend": "static", "rdzv_endpoint": endpoint, "rdzv_configs": {"rank": node_rank}}


@contextmanager
def _environment(mesh: dict[str, str], processes: int, cpu: bool) -> Iterator[None]:
    """The environment that the processes inherit: the mesh, and as many threads as there are cores for each."""
    before = dict(os.environ)
    os.environ.update(mesh)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10")  # seconds from Ctrl-C until processes are killed
    if cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "LOGLEVEL" not in os.environ:  # torch's launcher logs its own steps when a rank fails
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Logs(LogsSpecs):
    """Rank 0 keeps the terminal, on which it may draw; the output of the others goes to files, and may be shown too."""

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
            out[local] = str(self.directory / f"rank{rank}.out") if rank else ""
            err[local] = str(self.directory / f"rank{rank}.err") if rank else ""
            errors[local] = env["TORCHELASTIC_ERROR_FILE"] = str(self.directory / f"error{rank}.json")
            Path(errors[local]).unlink(missing_ok=True)
        return LogsDest(
            stdouts=out,
            stderrs=err,
            tee_stdouts={local: file for local, file in out.items() if self.show_all and file},
            tee_stderrs={local: file for local, file in err.items() if self.show_all and file},
            error_files=errors,
        )


@dataclass(frozen=True)
class _Failure:
    """The first failure: in a line, in full, and as an exit code."""

    summary: str
    text: str
    code: int


def _first_failure(failures: dict[int, ProcessFailure], logs: _Logs) -> _Failure:
    """The failure that the others followed from."""
    records: dict[int, dict[str, Any]] = {}  # that ranks wrote before they ended
    for rank, failure in failures.items():
        file = Path(failure.error_file)
        try:
            records[rank] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        finally:
            file.unlink(missing_ok=True)

    def order(rank: int) -> tuple[int, float]:
        """Killed processes first. Those that were aborted, or asked to end, are no cause."""
        code, timestamp = failures[rank].exitcode, failures[rank].timestamp
        if rank in records:
            return 1, records[rank].get("time", timestamp)
        return ({signal.SIGABRT: 2, signal.SIGTERM: 3}.get(-code, 0) if code < 0 else 1), timestamp  # type: ignore[call-overload]

    rank = min(failures, key=order)
    failure = failures[rank]
    if rank in records:
        record = records[rank]
        code = record.get("code", 1)
        text = record["message"]["extraInfo"]["py_callstack"]
        return _Failure(f"rank {record.get('rank', rank)} failed, with exit code {code}", text, code)
    text = ""
    stderr = logs.directory / f"rank{rank}.err"
    if not logs.show_all and stderr.exists():
        text = "\n".join(stderr.read_text(errors="replace").splitlines()[-_LAST_LINES:])
    if failure.exitcode > 0:
        return _Failure(f"rank {rank} failed, with exit code {failure.exitcode}", text, failure.exitcode)
    return _Failure(f"rank {rank} was killed by {failure.signal_name()}", text, 128 - failure.exitcode)
