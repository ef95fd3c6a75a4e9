"""``python -m varuna.run_varuna``: run a training script on all GPUs of this machine, with Penstock's launcher.

    python -m penstock.compat.varuna.run_varuna --gpus_per_node 4 --nstages 2 --batch_size 64 --chunk_size 4 \\
        --no_morphing train.py --epochs 3

Every process runs ``train.py --rank=… --local_rank=… --stage_to_rank_map="0,2;1,3;" --batch_size=32 --chunk_size=4
--epochs 3``, where the batch size is that of a replica.
"""

from __future__ import annotations

import argparse
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock import cli
from penstock.compat.varuna.profiler import AutoConfig
from penstock.errors import PlanError

__all__ = ["main"]

_RANK = "--this-is-a-rank"  # the first argument in the processes that the launcher starts


def main(arguments: Sequence[str]) -> int:
    """Start the script in all processes; return its exit code."""
    if arguments and arguments[0] == _RANK:
        _run_script(*arguments[1:])
        return 0
    parser = _parser()
    args = parser.parse_args(arguments)
    _choose(parser, args)
    _check(parser, args)
    os.environ.update(_read_variables(parser, args.env_file))
    try:
        os.chdir(args.code_dir)
    except OSError as error:
        parser.error(f"--code_dir {args.code_dir}: {error.strerror}")
    if not Path(args.training_script).is_file():
        parser.error(f"there is no file {args.training_script!r} in {args.code_dir!r}")
    replicas = args.gpus_per_node // args.nstages
    # Consecutive ranks form a pipeline: stage 1 has the ranks 1, p + 1, 2p + 1, …
    stages = (",".join(str(d * args.nstages + s) for d in range(replicas)) for s in range(args.nstages))
    config = [f"{';'.join(stages)};", str(args.batch_size // replicas), str(args.chunk_size)]
    script = [args.training_script, *args.training_script_args, *(["--resume"] if args.resume else [])]
    grid = ["--stages", str(args.nstages), "--data", str(replicas)]
    return cli.main(["run", *grid, "-m", "penstock.compat.varuna.run_varuna", _RANK, *config, *script])


def _run_script(stage_to_rank_map: str, batch_size: str, chunk_size: str, script: str, *others: str) -> None:
    """Run the script in this process, with the arguments that Varuna's scripts take."""
    sys.argv = [
        script,
        f"--rank={os.environ['RANK']}",
        f"--local_rank={os.environ['LOCAL_RANK']}",
        f"--stage_to_rank_map={stage_to_rank_map}",
        f"--batch_size={batch_size}",
        f"--chunk_size={chunk_size}",
        *others,
    ]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _parser() -> argparse.ArgumentParser:
    text = "Run a training script on all GPUs of this machine, with Penstock's launcher."
    parser = argparse.ArgumentParser(prog="python -m varuna.run_varuna", description=text)
    add = parser.add_argument
    add("--machine_list", help="a file with the machines, one per line; here this machine alone")
    add("--manager_ip", help="for morphing")
    add("--gpus_per_node", type=int, default=4, help="processes on this machine (default 4)")
    add("--nstages", type=int, help="stages of the pipeline")
    add("--batch_size", type=int, required=True, help="samples in a mini-batch, over all replicas")
    add("--chunk_size", type=int, help="samples in a micro-batch")
    add("--profile_folder", help="results of Profiler, to choose the number of stages and the chunk size by")
    add("--code_dir", default=".", help="the folder in which the script runs")
    add("--no_morphing", action="store_true", help="keep the number of stages")
    add("--env_file", help="a file with variables for the script, NAME=VALUE, one per line")
    add("--resume", action="store_true", help="pass --resume to the script")
    add("training_script", help="the script to run")
    add("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _choose(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Choose the number of stages and the chunk size, where they are not given, by a profile."""
    if args.nstages is not None and args.chunk_size is not None:
        return
    if args.profile_folder is None:
        parser.error("give --nstages and --chunk_size, or, for them to be chosen, --profile_folder")
    try:
        config = AutoConfig(args.gpus_per_node, args.gpus_per_node, args.batch_size, args.profile_folder)
        fitting = [
            choice
            for choice in config.choices
            if args.nstages in (None, choice.stages) and args.chunk_size in (None, choice.chunk_size)
            if args.batch_size % choice.replicas == 0
        ]
    except PlanError as error:
        parser.error(str(error))
    if not fitting:
        parser.error(
            f"--profile_folder {args.profile_folder} has no configuration with these options that fits the memory"
        )
    best = min(fitting, key=lambda choice: choice.seconds)
    args.nstages, args.chunk_size = best.stages, best.chunk_size


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if not args.no_morphing:
        parser.error(
            "morphing, which changes the number of stages while a job runs, is not supported: pass --no_morphing"
        )
    for name in ("gpus_per_node", "nstages", "batch_size", "chunk_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be 1 at least, got {getattr(args, name)}")
    if args.gpus_per_node % args.nstages:
        parser.error(f"--gpus_per_node {args.gpus_per_node} cannot be divided into pipelines of {args.nstages} stages")
    replicas = args.gpus_per_node // args.nstages
    if args.batch_size % replicas:
        parser.error(f"--batch_size {args.batch_size} cannot be divided over {replicas} replicas alike")
    if args.machine_list is not None:
        machines = _read_lines(parser, args.machine_list)
        if len(machines) != 1 or not _is_this_machine(machines[0]):
            parser.error(
                f"--machine_list has {', '.join(machines) or 'nothing'}, which is not this machine alone: on several "
                "machines start 'penstock run --nnodes …' on each, see docs/many-machines.md"
            )


def _read_variables(parser: argparse.ArgumentParser, file: str | None) -> dict[str, str]:
    variables = {}
    for line in _read_lines(parser, file) if file is not None else ():
        name, equals, value = line.removeprefix("export ").partition("=")
        if not equals or not name.strip().isidentifier():
            parser.error(f"--env_file {file}: {line!r} is not NAME=VALUE")
        variables[name.strip()] = value.strip().strip("'\"")
    return variables


def _read_lines(parser: argparse.ArgumentParser, file: str) -> list[str]:
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        parser.error(f"{file} cannot be read: {error.strerror}")
    return [line for line in lines if line and not line.startswith("#")]


def _is_this_machine(machine: str) -> bool:
    """Whether a name or an address can be bound to, and so is this machine's."""
    try:
        with socket.create_server((machine, 0)):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
