"""How a process joins the others: the backend, the device and the threads that it works with, and who speaks."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from penstock.errors import PipelineError, PlanError
from penstock.train.cores import set_by_user, threads_for, usable_cores
from penstock.train.slurm import is_slurm, variables

__all__ = ["device_of_process", "init", "launched", "say", "speaks", "started"]

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_FAREWELL = 10.0  # seconds that rank 0 waits at its end for the others, where they need it

_threads = torch.get_num_threads()  # what it is unless somebody chooses

# The group that ``init`` has made, while it lives, and the device that it chose.
_group: weakref.ref[dist.ProcessGroup] | None = None
_device: torch.device | None = None
_joined = 0  # how often: the same number on every rank


def launched() -> bool:
    """Whether this is one of the processes of ``torchrun``, ``penstock run`` or ``srun``: there can be a mesh."""
    return started() or "RANK" in os.environ or is_slurm(os.environ)


def started() -> bool:
    """Whether this process has joined a process group."""
    return dist.is_initialized()


def init(
    device: torch.device | str | None = None,
    *,
    backend: str | None = None,
    threads: int | None = None,
    timeout: float | timedelta | None = None,
) -> torch.device:
    """Join the other processes, as the variables of ``torchrun`` or SLURM say; the device that this one is to use.

    That is the GPU of its number on this machine, or the CPU; it becomes torch's current device. The ``backend`` is
    NCCL for GPUs (beside gloo for what is on the CPU) where each process has one of its own, else gloo. On the CPU an
    operator uses ``threads``, by default what OMP_NUM_THREADS or ``torch.set_num_threads`` said before, or this
    process's share of the cores. ``timeout`` (seconds) is for joining, and for torch's own collectives. The group is
    left when the program ends. A second call changes nothing but the number of threads, where it is given.
    """
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise PlanError(f"threads must be a whole number from 1, got {threads!r}")
    if started():
        if threads is not None:
            torch.set_num_threads(threads)
        return _bound(device_of_process(device, False))
    patience = _patience(timeout)
    _find_variables()
    here = _bound(_device_here(device))
    processes = _join(here, backend, patience)
    if threads is None and torch.get_num_threads() == _threads and not set_by_user(os.environ):
        threads = threads_for(processes, usable_cores(), os.environ)
    if threads is not None:
        torch.set_num_threads(threads)
    return here


def device_of_process(device: torch.device | str | None, made: bool) -> torch.device:
    """The device that was asked for, or this process's own; ``made``: the group is for GPUs, where there are any."""
    if device is not None:
        return _device_here(device)
    if _ours():
        assert _device is not None
        return _device
    # Who started gloo alone means the CPU.
    return _device_here(None if made or "nccl" in dist.get_backend() else "cpu")


def speaks() -> bool:
    """Whether this process is the one that tells the user how it goes: rank 0, or the only one."""
    if started():
        return dist.get_rank() == 0
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def say(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
    """``print``, on rank 0 only; with threads, or before the processes have met, it works as well."""
    if speaks():  # in one piece, into which other processes cannot write
        print(sep.join(map(str, values)) + end, end="", file=file, flush=True)


def _find_variables() -> None:
    """Make sure that torchrun's variables are there, so that every other library finds them too."""
    if "RANK" not in os.environ and is_slurm(os.environ):
        for name, value in variables(os.environ).items():
            os.environ.setdefault(name, value)
    missing = [name for name in _NAMES if name not in os.environ]
    if missing:
        raise PlanError(
            f"a mesh needs several processes: {', '.join(missing)} not set. Start the program with "
            "'torchrun --nproc-per-node=4 train.py', 'penstock run --stages 4 train.py' or 'srun', or leave out mesh= "
            "to use threads in this process"
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ[name].isascii() or not os.environ[name].isdigit():
            raise PlanError(f"{name} must be a whole number, got {os.environ[name]!r}")
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if int(rank) >= int(world):
        raise PlanError(f"RANK is {rank}, but WORLD_SIZE says that there are {world} processes, from 0 on")


def _device_here(device: torch.device | str | None) -> torch.device:
    """With its number written out; by default this process's own GPU, or the CPU where there is none."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        wanted = torch.device(device if device is not None else "cuda" if gpus else "cpu")
    except RuntimeError as error:
        raise PlanError(f"{device!r} is not a device: {error}") from error
    if wanted.type == "cpu":
        return torch.device("cpu")
    if wanted.type != "cuda":
        raise PlanError(f"device {wanted} cannot run a stage: stages run on 'cpu' and on 'cuda' devices")
    if (wanted.index or 0) >= gpus:
        raise PlanError(f"device {wanted} is not there: this machine has {gpus} CUDA devices")
    if wanted.index is not None:
        return wanted
    rank = os.environ.get("LOCAL_RANK") or (dist.get_rank() if started() else os.environ.get("RANK", "0"))
    return torch.device("cuda", int(rank) % gpus)


def _bound(device: torch.device) -> torch.device:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _patience(timeout: float | timedelta | None) -> timedelta | None:
    if timeout is None:
        return None
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout > 0:
        return timedelta(seconds=timeout)
    if isinstance(timeout, timedelta) and timeout > timedelta(0):
        return timeout
    raise PlanError(f"timeout must be a number of seconds above 0, got {timeout!r}")


def _join(device: torch.device, backend: str | None, patience: timedelta | None) -> int:
    """Make the group; how many of its processes are on this machine."""
    global _group, _device
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store, _, _ = next(rendezvous("env://", rank, world, **({} if patience is None else {"timeout": patience})))
        host = socket.gethostname()
        everyone = _introduce(store, rank, world, [host, _gpu(device)])
        gpus = [gpu for _, gpu in everyone]
        if backend is None:
            # NCCL wants a GPU for each process; processes that share one talk through the host.
            alone = dist.is_nccl_available() and None not in gpus and len(set(gpus)) == world
            backend = "cpu:gloo,cuda:nccl" if alone else "gloo"
        bound = device if device.type == "cuda" and "nccl" in backend else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience, device_id=bound)
        if "gloo" in backend:
            dist.all_reduce(torch.zeros(1))  # so that nobody ends before the others have come
    except dist.DistError as error:
        raise PipelineError(
            f"rank {rank} of {world} could not join the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']}: {error}\nIs every process started, and can each reach that port?",
            rank=rank,
        ) from error
    if _device is None:
        atexit.register(_leave)
    _device = device
    assert dist.group.WORLD is not None
    _group = weakref.ref(dist.group.WORLD)
    return int(os.environ.get("LOCAL_WORLD_SIZE", [there for there, _ in everyone].count(host)))


def _introduce(store: Any, rank: int, world: int, word: Any) -> list[Any]:
    """Every rank's word, on every rank, through the store: there is no group yet."""
    global _joined
    _joined += 1
    store.set(f"penstock/hello/{_joined}/{rank}", json.dumps(word))
    return [json.loads(there) for there in store.multi_get([f"penstock/hello/{_joined}/{r}" for r in range(world)])]


def _gpu(device: torch.device) -> str | None:
    """What no other GPU is called, on any machine."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _leave() -> None:
    """Leave the group at the end of the program, without waiting for others where it ends by a failure."""
    if getattr(sys, "last_value", None) is not None or not _ours():
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _see_others_out()
    dist.destroy_process_group()


def _see_others_out() -> None:
    """The store lives in rank 0: it stays a moment longer than those who may still look there."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    with suppress(RuntimeError):
        if rank != 0:
            store.set(f"penstock/left/{_joined}/{rank}", "")
        others = [f"penstock/left/{_joined}/{r}" for r in range(1, world)]
        end = time.monotonic() + _FAREWELL
        while rank == 0 and others and not store.check(others) and time.monotonic() < end:
            time.sleep(0.005)


def _ours() -> bool:
    """Whether the process group that there is was made by ``init``."""
    return _group is not None and _group() is not None and _group() is dist.group.WORLD
