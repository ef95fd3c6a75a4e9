"""What SLURM tells a task of ``srun``, in the words of torchrun."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product

from penstock.errors import PlanError

__all__ = ["hosts", "is_slurm", "tasks_per_node", "variables"]

_PORTS = range(12_000, 32_000)
"""Below those that Linux gives to outgoing connections."""


def is_slurm(environ: Mapping[str, str]) -> bool:
    """Whether SLURM has started this process as one of its tasks."""
    return "SLURM_PROCID" in environ and ("SLURM_STEP_NUM_TASKS" in environ or "SLURM_NTASKS" in environ)


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of this task.

    The first host of the step is where the processes meet, on a port that follows from the numbers of job and step.
    """
    world = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    rank, node = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_NODEID", otherwise=0)
    if not rank < world:
        raise PlanError(f"SLURM_PROCID is {rank}, but SLURM says that there are {world} tasks")
    nodelist = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = hosts(nodelist) if nodelist else ["127.0.0.1"]
    here = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if here:
        counts = tasks_per_node(here)
        local = counts[min(node, len(counts) - 1)]
    else:
        local = _number(environ, "SLURM_NTASKS_PER_NODE", otherwise=-(-world // len(nodes)))
    job = _number(environ, "SLURM_JOB_ID", "SLURM_JOBID", otherwise=0)
    step = _number(environ, "SLURM_STEP_ID", "SLURM_STEPID", otherwise=0)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(_number(environ, "SLURM_LOCALID", otherwise=rank % local)),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": nodes[0],
        "MASTER_PORT": str(_PORTS[(job + step) % len(_PORTS)]),
    }


def hosts(nodelist: str) -> list[str]:
    """The hosts of a list as SLURM writes it: ``node[003-005,7],gpu1`` is node003, node004, node005, node7, gpu1."""
    found = [host for part in _split(nodelist) for host in _expand(part, nodelist)]
    if not found:
        raise PlanError(f"SLURM's list of nodes names none: {nodelist!r}")
    return found


def tasks_per_node(text: str) -> list[int]:
    """The tasks of each node as SLURM writes them: ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise PlanError(f"SLURM's tasks per node cannot be read: {text!r}, expected something like '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split(nodelist: str) -> list[str]:
    """At the commas outside of brackets."""
    if not re.fullmatch(r"(?:[^][]|\[[^][]*\])*", nodelist):
        raise PlanError(f"SLURM's list of nodes cannot be read: the brackets of {nodelist!r} do not match")
    return [part.strip() for part in re.findall(r"(?:[^][,]|\[[^][]*\])+", nodelist) if part.strip()]


def _expand(part: str, nodelist: str) -> Iterator[str]:
    """One name of a list, for each number in its brackets."""
    choices = [
        list(_numbers(piece[1:-1], nodelist)) if piece.startswith("[") else [piece]
        for piece in re.findall(r"\[[^]]*\]|[^[]+", part)
    ]
    return map("".join, product(*choices))


def _numbers(ranges: str, nodelist: str) -> Iterator[str]:
    for piece in ranges.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", piece)
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise PlanError(f"SLURM's list of nodes cannot be read: {piece!r} in {nodelist!r} is not a number or range")
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            yield f"{number:0{len(match[1])}}"


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _number(environ: Mapping[str, str], *names: str, otherwise: int | None = None) -> int:
    text = _first(environ, *names)
    if text is None and otherwise is not None:
        return otherwise
    if text is None or not text.isascii() or not text.isdigit():
        raise PlanError(f"{names[0]} must be a whole number, got {text!r}: was the program started with srun?")
    return int(text)
