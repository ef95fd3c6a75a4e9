"""What the variables of torchrun, ``penstock run`` and SLURM say, and whether they agree with each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from math import prod
from typing import Literal

from penstock.doctor.facts import Launch

__all__ = ["launcher_lines"]

_Line = tuple[Literal["ok", "warn", "fail"], str, str, str]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_AGAIN = "start the program with 'penstock run', torchrun or srun, which set them all"


def launcher_lines(launch: Launch, gpus: int, cores: int) -> Iterator[_Line]:
    """Lines of (status, what, text, what to do)."""
    told = launch.variables
    if not any(name in told for name in (*_NEEDED, "SLURM_PROCID")):
        if "SLURM_JOB_ID" in told:
            yield "ok", "launcher", "in a job of SLURM, not in a step: 'srun penstock doctor' looks at its tasks", ""
        else:
            yield "ok", "launcher", "none: 'penstock run' starts processes by itself", ""
        return
    missing = [name for name in _NEEDED if name not in told]
    if launch.error is not None:
        name = "enter it in /etc/hosts, or give an address instead of a name"
        yield "fail", "launcher", launch.error, name if "MASTER_ADDR" in told else "start the program with srun"
    elif missing:
        some = ", ".join(name for name in _NEEDED if name in told)
        yield "fail", "launcher", f"{some or 'SLURM_PROCID'} without {', '.join(missing)}", f"unset them, or {_AGAIN}"
    elif wrong := [name for name in _NEEDED if name != "MASTER_ADDR" and not _whole(told[name])]:
        yield "fail", "launcher", f"{wrong[0]}={told[wrong[0]]!r} is not a whole number", _AGAIN
    else:
        yield from _consistent(launch, gpus, cores)


def _consistent(launch: Launch, gpus: int, cores: int) -> Iterator[_Line]:
    told = launch.variables
    rank, world, port = (int(told[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    local = int(told["LOCAL_WORLD_SIZE"]) if _whole(told.get("LOCAL_WORLD_SIZE", "")) else world
    where = f"{told['MASTER_ADDR']}:{port}"
    if not rank < world:
        yield "fail", "launcher", f"RANK is {rank} of WORLD_SIZE {world}, from 0 on", _AGAIN
    elif _whole(told.get("LOCAL_RANK", "")) and not int(told["LOCAL_RANK"]) < local:
        yield "fail", "launcher", f"LOCAL_RANK is {told['LOCAL_RANK']} of LOCAL_WORLD_SIZE {local}, from 0 on", _AGAIN
    elif not 0 < port < 65536:
        yield "fail", "launcher", f"MASTER_PORT {port} is no port", "choose one from 1024 to 65535"
    elif local < world and all(ip_address(address.partition("%")[0]).is_loopback for address in launch.master):
        text = f"{world - local} of {world} ranks are on other machines, and {where} is each machine itself"
        yield "fail", "launcher", text, "set MASTER_ADDR to the first machine's address in their network"
    else:
        yield "ok", "launcher", f"rank {rank} of {world}, {local} on this machine, that meet at {where}", ""
    yield from _against_others(told, rank, world)
    if gpus and local > gpus:
        do = "give each a GPU of its own: those that share one talk through gloo, not NCCL"
        yield "warn", "launcher", f"{local} ranks on this machine share {gpus} GPU{'s' * (gpus > 1)}", do
    threads = told.get("OMP_NUM_THREADS", "")
    if _whole(threads) and int(threads) * local > max(cores, local):
        do = f"set OMP_NUM_THREADS={max(1, cores // local)}, or leave it out"
        yield "warn", "threads", f"OMP_NUM_THREADS={threads} for {local} ranks on {cores} cores", do


def _against_others(told: Mapping[str, str], rank: int, world: int) -> Iterator[_Line]:
    """Variables of other launchers, that say something else."""
    sizes = {name: told[name] for name in ("PENSTOCK_DATA", "PENSTOCK_PIPE", "PENSTOCK_TENSOR") if name in told}
    if sizes and all(map(_whole, sizes.values())) and prod(map(int, sizes.values())) != world:
        shown = " × ".join(f"{name}={value}" for name, value in sizes.items())
        yield "fail", "mesh", f"{shown} is not WORLD_SIZE {world}", "unset them: 'penstock run' sets them for its own"
    slurm = told.get("SLURM_PROCID")
    if slurm is not None and "TORCHELASTIC_RUN_ID" not in told and slurm != str(rank):
        do = "unset RANK and the others in the job's script: srun says which rank each task is"
        yield "fail", "launcher", f"RANK is {rank}, but SLURM_PROCID is {slurm}", do


def _whole(text: str) -> bool:
    return text.isascii() and text.isdigit()
