"""``penstock run``: a script in as many processes as its mesh has, with torch's own launcher.

what the ranks print      rank 0   ─────────────────────────▶ this terminal
                          others   ──▶ files, one pair each ─▶ shown with --all-ranks
why a rank failed         all      ──▶ files, one each      ─▶ the first failure, once, at the end
"""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.launcher.agent import Failure, Launch, launch
from penstock.train.launch import usable_cores

__all__ = ["configure", "run"]

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


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.usage = "penstock run --stages N [options] (train.py | -m package.train) [arguments of the script]"
    parser.epilog = _DETAILS
    add = parser.add_argument
    add("--stages", type=_whole, required=True, metavar="N", help="processes in a pipeline: the mesh's 'pipe'")
    add("--data", type=_whole, default=1, metavar="N", help="replicas of the pipeline (default 1)")
    add("--tensor", type=_whole, default=1, metavar="N", help="processes that share a rank's layers (default 1)")
    add("--nnodes", type=_whole, default=1, metavar="N", help="machines, with as many processes each (default 1)")
    add("--node-rank", type=_number, metavar="K", help="which of them this is, from 0 on; with --master")
    add("--master", type=_endpoint, metavar="HOST:PORT", help="where they meet: machine 0, and a free port of it")
    add("--rdzv-endpoint", type=_endpoint, metavar="HOST:PORT", help="the same, where they number themselves")
    add("--cpu", action="store_true", help="use no GPUs")
    add("--all-ranks", action="store_true", help="show what every rank prints")
    add("--log-dir", metavar="DIR", help="keep what ranks 1, 2, … print as DIR/rank1.out and DIR/rank1.err, …")
    add("-m", action="store_true", dest="module", help="the script is a module, as for 'python -m'")
    add("script", metavar="train.py", help="what to run")
    add("arguments", nargs=argparse.REMAINDER, metavar="…", help="its arguments")
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Do what ``args`` say."""
    processes = _processes(args)
    _check_script(args)
    logs = _directory(args)
    wanted = Launch(
        command=(*(["-m"] * args.module), args.script, *args.arguments),
        processes=processes,
        nodes=args.nnodes,
        node_rank=args.node_rank,
        endpoint=args.master or args.rdzv_endpoint,
        logs=logs,
        show_all=args.all_ranks,
    )
    kept = args.log_dir is not None
    try:
        with _environment(args, processes):
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


def _processes(args: argparse.Namespace) -> int:
    """How many processes this machine starts."""
    total: int = args.stages * args.data * args.tensor
    if total % args.nnodes:
        args.usage_error(f"{total} processes cannot be shared by --nnodes {args.nnodes} machines alike")
    if args.master and args.rdzv_endpoint:
        args.usage_error("--master is for machines with a --node-rank, --rdzv-endpoint for those without: give one")
    if args.nnodes == 1 and (args.master or args.rdzv_endpoint or args.node_rank is not None):
        args.usage_error("--master, --rdzv-endpoint and --node-rank are for several machines: say --nnodes, too")
    if args.nnodes > 1 and not args.master and not args.rdzv_endpoint:
        args.usage_error(f"where do the {args.nnodes} machines meet? Give --rdzv-endpoint HOST:PORT, or --master")
    if args.master and args.node_rank is None:
        args.usage_error("--master needs --node-rank: which of the machines this is, from 0 on")
    if args.rdzv_endpoint and args.node_rank is not None:
        args.usage_error("with --rdzv-endpoint the machines number themselves: leave out --node-rank, or use --master")
    if args.node_rank is not None and args.node_rank >= args.nnodes:
        args.usage_error(f"--node-rank {args.node_rank} is too high: --nnodes {args.nnodes} are numbered from 0 on")
    if endpoint := args.master or args.rdzv_endpoint:
        host = endpoint.rpartition(":")[0].strip("[]")
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError):
            args.usage_error(f"the machine {host!r} is not known here: is its name right?")
    here: int = total // args.nnodes
    return here


def _check_script(args: argparse.Namespace) -> None:
    if args.module:
        package = args.script.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
            args.usage_error(f"there is no module {args.script!r}: {package!r} is not here, nor installed")
    elif not Path(args.script).is_file():
        args.usage_error(f"there is no file {args.script!r}")


def _directory(args: argparse.Namespace) -> Path:
    """Where the ranks' output goes."""
    if args.log_dir is None:
        return Path(tempfile.mkdtemp(prefix="penstock_"))
    try:
        Path(args.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        args.usage_error(f"cannot write to --log-dir {args.log_dir!r}: {error.strerror}")
    return Path(args.log_dir)


@contextmanager
def _environment(args: argparse.Namespace, processes: int) -> Iterator[None]:
    """What the processes inherit: the mesh, and threads that do not get into each other's way."""
    before = dict(os.environ)
    os.environ.update(PENSTOCK_PIPE=str(args.stages), PENSTOCK_DATA=str(args.data), PENSTOCK_TENSOR=str(args.tensor))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
    if args.cpu:
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


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def _endpoint(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return text
