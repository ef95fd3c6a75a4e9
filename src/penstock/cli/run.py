"""``penstock run``: start a script in the processes of its mesh, with torch's launcher.

output of the ranks    rank 0   ────────────────────────────▶ this terminal
                       others   ──▶ files, two per rank    ─▶ shown with --all-ranks
error of a rank        all      ──▶ files, one per rank    ─▶ the first failure, at the end
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from penstock.cli import UsageError, option, usage_errors
from penstock.errors import PenstockError
from penstock.train.checkpoint import PREEMPTED
from penstock.train.launch import usable_cores

_WORKER = str(Path(__file__).with_name("run_worker.py"))
_ELASTIC_CONFIG = {"last_call_timeout": 3, "keep_alive_interval": 1, "keep_alive_max_attempt": 5}  # seconds; count
_LOCALHOST = "127.0.0.1"
_LAST_LINES = 30  # lines shown of the stderr of a rank that recorded no error

_DETAILS = """\
The processes are those of ps.Mesh(): --data replicas of a pipeline of --stages, with --tensor processes per rank. \
Arguments after the script are passed to the script.

The output of rank 0 is shown. The output of other ranks is written to files (--log-dir); --all-ranks shows it too, \
with the rank before each line. When a rank fails, all ranks are ended, the first error is shown, and the command \
returns its exit code. Ctrl-C ends all ranks.

Examples:
  penstock run --stages 4 train.py --epochs 3   four processes on this machine
  penstock run --stages 4 --data 2 train.py     two replicas: eight processes
  penstock run --stages 4 -m package.train      a module

On two machines, with the same line on both, or with --node-rank 1 on the second:
  penstock run --stages 8 --nnodes 2 --rdzv-endpoint host0:29500 train.py
  penstock run --stages 8 --nnodes 2 --node-rank 0 --master host0:29500 train.py

An elastic run, in which machines may join and leave, with the same line on each; --stages is then per machine:
  penstock run --elastic --stages 2 --nnodes 1:4 --rdzv-endpoint host0:29500 train.py
"""


app = typer.Typer(add_completion=False)


@app.command(
    epilog=_DETAILS,
    context_settings={"allow_interspersed_args": False},  # options after the script are the script's
    options_metavar="--stages N [OPTIONS]",
)
def run(
    script: Annotated[str, typer.Argument(metavar="train.py", help="The script, or with -m the module.")],
    stages: Annotated[int, option("Processes per pipeline: 'pipe' of the mesh.", min=1)],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="The script's arguments.")] = None,
    data: Annotated[int, option("Replicas of the pipeline.", min=1)] = 1,
    tensor: Annotated[int, option("Processes that share the layers of a rank.", min=1)] = 1,
    nnodes: Annotated[
        str, option("Number of machines, with equal process counts; with --elastic, minimum:maximum.", metavar="N|N:M")
    ] = "1",
    elastic: Annotated[
        bool, option("Restart the ranks after a failure, and when machines join or leave.", "--elastic")
    ] = False,
    max_restarts: Annotated[int, option("Limit of restarts after failures; with --elastic.", min=0)] = 100,
    node_rank: Annotated[int | None, option("Number of this machine; with --master.", min=0)] = None,
    master: Annotated[str | None, option("Address and free port of machine 0.", metavar="HOST:PORT")] = None,
    rdzv_endpoint: Annotated[
        str | None, option("Address and free port of one machine, instead of --master.", metavar="HOST:PORT")
    ] = None,
    cpu: Annotated[bool, option("Use no GPUs.", "--cpu")] = False,
    all_ranks: Annotated[bool, option("Show the output of every rank.", "--all-ranks")] = False,
    log_dir: Annotated[
        str | None, option("Keep the output of ranks 1, 2, … as DIR/rank1.out, …", metavar="DIR")
    ] = None,
    module: Annotated[bool, option("Run a module, as 'python -m'.", "-m")] = False,
) -> int:
    """Run a training script in the processes of a pipeline."""
    total = stages * data * tensor
    least, most = _parse_nnodes(nnodes, elastic)
    if total % most and not elastic:
        raise UsageError(f"{total} processes cannot be divided equally among --nnodes {most} machines")
    if elastic and (data > 1 or tensor > 1):
        raise UsageError("with --elastic the script sets the mesh, ps.Mesh(data=…): leave out --data and --tensor")
    if elastic and master:
        raise UsageError("with --elastic machines have no fixed numbers: give --rdzv-endpoint instead of --master")
    if most == 1 and (master or rdzv_endpoint or node_rank is not None):
        raise UsageError("--master, --rdzv-endpoint and --node-rank are for several machines: give --nnodes, too")
    if most > 1 and bool(master) == bool(rdzv_endpoint):
        raise UsageError(f"{most} machines need one address to connect to: give --rdzv-endpoint or --master")
    endpoint = master or rdzv_endpoint
    host, _, port = (endpoint or "localhost:1").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{endpoint!r} is not HOST:PORT")
    if bool(master) != (node_rank is not None):
        raise UsageError("--master needs --node-rank, the number of this machine from 0; --rdzv-endpoint does not")
    if node_rank is not None and node_rank >= most:
        raise UsageError(f"--node-rank {node_rank} is too high: --nnodes {most} are numbered from 0 on")
    # torch looks up the names of peers; the default timeout is 5 s. The first lookup of a process reads this variable.
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    try:
        socket.getaddrinfo(host.strip("[]"), None)
    except (OSError, UnicodeError):
        raise UsageError(f"the host name {host!r} cannot be resolved: check its spelling, or give an address") from None
    if not module and not Path(script).is_file():
        raise UsageError(f"there is no file {script!r}")
    if module and PathFinder.find_spec(package := script.partition(".")[0], [os.getcwd(), *sys.path]) is None:
        raise UsageError(f"there is no module {script!r}: {package!r} is neither in this directory nor installed")
    with usage_errors(f"cannot write to --log-dir {log_dir!r}", OSError):
        directory = Path(log_dir or tempfile.mkdtemp(prefix="penstock_"))
        directory.mkdir(parents=True, exist_ok=True)
    processes = total if elastic else total // most
    config = LaunchConfig(
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=processes,
        run_id="penstock",
        max_restarts=max_restarts if elastic else 0,
        monitor_interval=0.1,
        logs_specs=_RankLogs(directory, all_ranks),
        log_line_prefix_template="[rank ${rank}] ",
        rdzv_backend="static" if master else "c10d" if endpoint else _LocalRendezvous.BACKEND,
        rdzv_endpoint=endpoint or "",
        rdzv_configs=_ELASTIC_CONFIG if elastic else {"rank": node_rank} if master else {},
    )
    mesh = {"PENSTOCK_PIPE": str(stages), "PENSTOCK_DATA": str(data), "PENSTOCK_TENSOR": str(tensor)}
    keep = log_dir is not None
    try:
        # Every group has a new store. torch's shared store may be on a machine that has left.
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if elastic else mesh
        with _environment(variables, processes, cpu, local=not endpoint):
            elastic_launch(config, sys.executable)("-u", _WORKER, *(["-m"] * module), script, *(arguments or ()))
        return 0
    except ChildFailedError as error:
        if _preempted(directory):
            return PREEMPTED
        summary, text, code = first_failure(error.failures, directory, all_ranks)
        printed = any(file.stat().st_size for file in directory.glob("rank*.*"))
        keep = keep or printed
        machine = " (the first on this machine)" if most > 1 else ""
        print(f"\npenstock: {summary}{machine}" + (f":\n\n{text}\n" if text else ""), file=sys.stderr)
        if printed:
            print(f"penstock: the output of ranks other than 0 is in {directory}", file=sys.stderr)
        return code
    except SignalException as error:
        return PREEMPTED if _preempted(directory) else 128 + error.sigval
    except (RendezvousError, dist.DistError, TimeoutError) as error:
        at = f" at {endpoint}" if endpoint else ""
        raise PenstockError(f"the {most} machines did not connect{at}: {error}") from error
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


class _LocalRendezvous(RendezvousHandler):
    """The rendezvous of a single machine. Its store listens on loopback; the stores of torch listen on all interfaces.

    The store is in this process, so that it does not end with a rank. Restarted ranks get a new store.
    """

    BACKEND = "penstock"
    use_agent_store = True

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.run_id = parameters.run_id

    def get_backend(self) -> str:
        return self.BACKEND

    def get_run_id(self) -> str:
        return self.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((_LOCALHOST, 0), backlog=4096)
        port = listener.getsockname()[1]
        make: Any = dist.TCPStore  # type: ignore[attr-defined]
        store = make(_LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_LOCALHOST, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(_LocalRendezvous.BACKEND, _LocalRendezvous)


def _parse_nnodes(nnodes: str, elastic: bool) -> tuple[int, int]:
    """The minimum and maximum number of machines."""
    least, _, most = nnodes.partition(":")
    if not all(n.isdecimal() and int(n) for n in (least, most or least)) or int(least) > int(most or least):
        raise UsageError(f"--nnodes {nnodes!r} must be a number of machines, at least 1, or minimum and maximum: 1:4")
    if most and not elastic:
        raise UsageError(f"--nnodes {nnodes} is a range: give --elastic, too")
    return int(least), int(most or least)


def _preempted(directory: Path) -> bool:
    """Whether a rank has ended with the exit code of a preemption, after it wrote a checkpoint."""
    for file in directory.glob("error*.json"):
        with suppress(OSError, ValueError):
            if json.loads(file.read_text(encoding="utf-8")).get("code") == PREEMPTED:
                return True
    return False


@contextmanager
def _environment(variables: dict[str, str], processes: int, cpu: bool, local: bool) -> Iterator[None]:
    """Set the environment of the processes: ``variables``, and their share of the cores as number of threads.

    ``local``: all processes are on this machine.
    """
    before = dict(os.environ)
    os.environ.update(variables, PENSTOCK_LAUNCHER=str(os.getpid()))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")  # seconds from a signal until processes are killed
    if local and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "LOGLEVEL" not in os.environ:  # torch's launcher logs the failure of a rank, too
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _RankLogs(LogsSpecs):
    """Rank 0 writes to the terminal. The output of other ranks is written to files, and shown if ``show_all``."""

    def __init__(self, directory: Path, show_all: bool) -> None:
        super().__init__()
        self.directory, self.show_all = directory, show_all

    @property
    def root_log_dir(self) -> str:
        return str(self.directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        out, err, errors = {}, {}, {}
        for local, env in envs.items():
            rank = int(env["RANK"])
            out[local], err[local] = (str(self.directory / f"rank{rank}.{k}") if rank else "" for k in ("out", "err"))
            errors[local] = env["TORCHELASTIC_ERROR_FILE"] = str(self.directory / f"error{rank}.json")
            Path(errors[local]).unlink(missing_ok=True)
        return LogsDest(
            stdouts=out,
            stderrs=err,
            tee_stdouts={local: file for local, file in out.items() if self.show_all and file},
            tee_stderrs={local: file for local, file in err.items() if self.show_all and file},
            error_files=errors,
        )


def first_failure(failures: dict[int, ProcessFailure], directory: Path, shown: bool) -> tuple[str, str, int]:
    """The failure that caused the others: a summary line, the full text, and the exit code.

    The full text is the error that the rank recorded, or the end of its stderr, unless that was ``shown``.
    """
    records: dict[int, dict[str, Any]] = {}
    for rank, failure in failures.items():
        file = Path(failure.error_file)
        with suppress(OSError, ValueError):
            records[rank] = json.loads(file.read_text(encoding="utf-8"))
        file.unlink(missing_ok=True)

    def order(rank: int) -> tuple[int, float]:
        """Sort killed processes first, and aborted or terminated processes last."""
        code, timestamp = failures[rank].exitcode, failures[rank].timestamp
        if rank in records:
            return 1, records[rank].get("time", timestamp)
        return {-signal.SIGABRT: 2, -signal.SIGTERM: 3}.get(code, int(code > 0)), timestamp

    rank = min(failures, key=order)
    if rank in records:
        record = records[rank]
        code, text = record.get("code", 1), record["message"]["extraInfo"]["py_callstack"]
        return f"rank {record.get('rank', rank)} failed, with exit code {code}", text.rstrip(), code
    code, text, stderr = failures[rank].exitcode, "", directory / f"rank{rank}.err"
    if not shown and stderr.exists():
        text = "\n".join(stderr.read_text(errors="replace").splitlines()[-_LAST_LINES:]).rstrip()
    if code < 0:
        return f"rank {rank} was killed by {failures[rank].signal_name()}", text, 128 - code
    return f"rank {rank} failed, with exit code {code}", text, code
