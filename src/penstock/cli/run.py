"""``penstock run``: a script in as many processes as its mesh has, with torch's own launcher.

what the ranks print      rank 0   ─────────────────────────▶ this terminal
                          others   ──▶ files, one pair each ─▶ shown with --all-ranks
why a rank failed         all      ──▶ files, one each      ─▶ the first failure, once, at the end
"""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import UsageError, integer
from penstock.launcher.agent import Failure, Launch, launch
from penstock.train.launch import usable_cores

__all__ = ["app"]

_DETAILS = """\
The processes are those of ps.Mesh(): --data replicas of a pipeline of --stages, --tensor processes to each rank of it.
Arguments after the script are the script's own.

What rank 0 prints is shown, and what the others print is kept in files (--log-dir), so that everything is there once;
--all-ranks shows the others too, with their rank before each line. When a rank fails, all are ended, the error of the
first that failed is shown, and its exit code is this command's. Ctrl-C ends all of them.

examples:
  penstock run --stages 4 train.py --epochs 3      four processes on this machine
  penstock run --stages 4 --data 2 train.py        two replicas of that: eight processes
  penstock run --stages 4 -m package.train         a module
  penstock run --stages 8 --nnodes 2 --node-rank 0 --master host0:29500 train.py
                                                   on the first of two machines; on the second, --node-rank 1
  penstock run --stages 8 --nnodes 2 --rdzv-endpoint host0:29500 train.py
                                                   the same line on both
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
    stages: Annotated[
        int, typer.Option(parser=integer(1), metavar="N", help="Processes in a pipeline: the mesh's 'pipe'.")
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="The script's arguments.")] = None,
    data: Annotated[int, typer.Option(parser=integer(1), metavar="N", help="Replicas of the pipeline.")] = 1,
    tensor: Annotated[
        int, typer.Option(parser=integer(1), metavar="N", help="Processes that share a rank's layers.")
    ] = 1,
    nnodes: Annotated[
        int, typer.Option(parser=integer(1), metavar="N", help="Machines, with as many processes each.")
    ] = 1,
    node_rank: Annotated[
        int | None,
        typer.Option(parser=integer(0), metavar="K", help="Which of them this is, from 0 on; with --master."),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(parser=_endpoint, metavar="HOST:PORT", help="Where they meet: machine 0, and a free port of it."),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(parser=_endpoint, metavar="HOST:PORT", help="The same, where they number themselves."),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use no GPUs.")] = False,
    all_ranks: Annotated[bool, typer.Option("--all-ranks", help="Show the output of every rank.")] = False,
    log_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Keep the output of ranks 1, 2, … as DIR/rank1.out and DIR/rank1.err, …"),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="The script is a module, as for 'python -m'.")] = False,
) -> int:
    """Train a script as a pipeline."""
    total = stages * data * tensor
    _check_machines(total, nnodes, node_rank, master, rdzv_endpoint)
    _check_script(script, module)
    processes = total // nnodes
    logs = _directory(log_dir)
    wanted = Launch(
        command=(*(["-m"] * module), script, *(arguments or ())),
        processes=processes,
        nodes=nnodes,
        node_rank=node_rank,
        endpoint=master or rdzv_endpoint,
        logs=logs,
        show_all=all_ranks,
    )
    kept = log_dir is not None
    mesh = {"PENSTOCK_PIPE": str(stages), "PENSTOCK_DATA": str(data), "PENSTOCK_TENSOR": str(tensor)}
    try:
        with _environment(mesh, processes, cpu):
            outcome = launch(wanted)
        if isinstance(outcome, Failure):
            printed = any(file.stat().st_size for file in logs.glob("rank*.*"))
            kept = kept or printed
            _explain(outcome, f"what ranks other than 0 printed is in {logs}" if printed else None)
            return outcome.code
        return outcome
    finally:
        if not kept:
            shutil.rmtree(logs, ignore_errors=True)


def _check_machines(
    total: int, nnodes: int, node_rank: int | None, master: str | None, rdzv_endpoint: str | None
) -> None:
    if total % nnodes:
        raise UsageError(f"{total} processes cannot be shared by --nnodes {nnodes} machines alike")
    if master and rdzv_endpoint:
        raise UsageError("--master is for machines with a --node-rank, --rdzv-endpoint for those without: give one")
    if nnodes == 1 and (master or rdzv_endpoint or node_rank is not None):
        raise UsageError("--master, --rdzv-endpoint and --node-rank are for several machines: say --nnodes, too")
    if nnodes > 1 and not master and not rdzv_endpoint:
        raise UsageError(f"where do the {nnodes} machines meet? Give --rdzv-endpoint HOST:PORT, or --master")
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
    """Where the ranks' output goes."""
    if log_dir is None:
        return Path(tempfile.mkdtemp(prefix="penstock_"))
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to --log-dir {log_dir!r}: {error.strerror}") from None
    return Path(log_dir)


@contextmanager
def _environment(mesh: dict[str, str], processes: int, cpu: bool) -> Iterator[None]:
    """The environment that the processes inherit: the mesh, and as many threads as there are cores for each."""
    before = dict(os.environ)
    os.environ.update(mesh)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
    if cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _explain(failure: Failure, more: str | None) -> None:
    """The first failure, and where there is more to read."""
    told = failure.told.rstrip()
    print(f"\npenstock: {failure.summary}{':' if told else ''}", file=sys.stderr)
    if told:
        print(f"\n{told}\n", file=sys.stderr)
    if more is not None:
        print(f"penstock: {more}", file=sys.stderr)
