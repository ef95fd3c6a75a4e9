"""``python -m varuna.run_varuna``: run a training script on all GPUs of this machine, with Penstock's launcher.

    python -m penstock.compat.varuna.run_varuna --gpus_per_node 4 --nstages 2 --batch_size 64 --chunk_size 4 \\
        --no_morphing train.py --epochs 3

Every process runs ``train.py --rank=… --local_rank=… --stage_to_rank_map="0,2;1,3;" --batch-size=32 --chunk_size=4
--epochs 3``, with the batch size of a replica. A script with the option ``--batch_size`` gets that option.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock import cli

_RANK = "--this-is-a-rank"  # the first argument in the processes that the launcher starts
_HERE = (["localhost"], ["127.0.0.1"], [socket.gethostname()])


def main(arguments: Sequence[str]) -> int:
    """Start the script in all processes; return its exit code."""
    if arguments and arguments[0] == _RANK:
        _run_script(*arguments[1:])
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m varuna.run_varuna",
        description="Run a training script on all GPUs of this machine, with Penstock's launcher.",
    )
    add = parser.add_argument
    add("--machine_list", help="a file with the machines, one per line; here this machine alone")
    add("--manager_ip", help="for morphing")
    add("--gpus_per_node", type=int, default=4, help="processes on this machine (default 4)")
    add("--nstages", type=int, required=True, help="stages of the pipeline")
    add("--batch_size", "--batch-size", type=int, required=True, help="samples in a mini-batch, over all replicas")
    add("--chunk_size", type=int, required=True, help="samples in a micro-batch")
    add("--code_dir", default=".", help="the folder in which the script runs")
    add("--no_morphing", action="store_true", help="keep the number of stages")
    add("--env_file", help="a file with variables for the script, NAME=VALUE, one per line")
    add("--resume", action="store_true", help="pass --resume to the script")
    add("training_script", help="the script to run")
    add("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    args = parser.parse_args(arguments)
    if not args.no_morphing:
        parser.error("morphing (other stages in a running job) is not supported: pass --no_morphing")
    replicas, rest = divmod(args.gpus_per_node, max(args.nstages, 1))
    if rest or replicas < 1 or args.nstages < 1 or args.batch_size % replicas:
        parser.error(
            f"--gpus_per_node {args.gpus_per_node} must be a multiple of --nstages {args.nstages}, and --batch_size "
            f"{args.batch_size} one of the number of replicas, {args.gpus_per_node} / {args.nstages}"
        )
    if args.machine_list is not None and _read_lines(args.machine_list) not in _HERE:
        parser.error(
            "--machine_list must name this machine alone, as localhost: on several machines start "
            "'penstock run --nnodes …' on each, see docs/many-machines.md"
        )
    for line in _read_lines(args.env_file) if args.env_file is not None else ():
        name, equals, value = line.removeprefix("export ").partition("=")
        if not equals:
            parser.error(f"--env_file {args.env_file}: {line!r} is not NAME=VALUE")
        os.environ[name.strip()] = value.strip().strip("'\"")
    os.chdir(args.code_dir)
    # Consecutive ranks form a pipeline: stage 1 is on ranks 1, p + 1, 2p + 1, …
    stages = (",".join(str(d * args.nstages + s) for d in range(replicas)) for s in range(args.nstages))
    config = [f"{';'.join(stages)};", str(args.batch_size // replicas), str(args.chunk_size)]
    script = [args.training_script, *args.training_script_args, *(["--resume"] if args.resume else [])]
    grid = ["--stages", str(args.nstages), "--data", str(replicas)]
    return cli.main(["run", *grid, "-m", "penstock.compat.varuna.run_varuna", _RANK, *config, *script])


def _run_script(stage_to_rank_map: str, batch_size: str, chunk_size: str, script: str, *others: str) -> None:
    """Run the script in this process, with the arguments that Varuna's scripts take."""
    text = Path(script).read_text(encoding="utf-8")
    size = "batch_size" if "--batch-size" not in text and re.search("""["'-]batch_size""", text) else "batch-size"
    names = ("rank", "local_rank", "stage_to_rank_map", size, "chunk_size")
    values = (os.environ["RANK"], os.environ["LOCAL_RANK"], stage_to_rank_map, batch_size, chunk_size)
    sys.argv = [script, *(f"--{name}={value}" for name, value in zip(names, values, strict=True)), *others]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _read_lines(file: str) -> list[str]:
    """The lines of a file without comments."""
    lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
