"""``ps.init``: join the process group of torchrun or SLURM; choose backend, device and number of threads."""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from penstock._torch import default_store
from penstock.engine.failure.watch import on_exit_of_program
from penstock.errors import PipelineError, PlanError

_EXIT_WAIT = 10.0  # seconds that rank 0, which hosts the store, waits at exit for the others

_threads = torch.get_num_threads()  # the default, to detect whether the user has changed it

# The process group that ``init`` created, and its device.
_group: weakref.ref[dist.ProcessGroup] | None = None
_device: torch.device | None = None
_joins = 0  # calls of ``_join``: the same number on every rank


def is_distributed() -> bool:
    """Whether ``torchrun``, ``penstock run`` or ``srun`` started this process, so that there can be a mesh."""
    return dist.is_initialized() or "RANK" in os.environ or is_slurm(os.environ)


def init(
    device: torch.device | str | None = None,
    *,
    backend: str | None = None,
    threads: int | None = None,
    timeout: float | timedelta | None = None,
) -> torch.device:
    """Join the process group that the variables of ``torchrun`` or SLURM describe; returns this process's device.

    The device is by default the GPU with the local rank's number, or the CPU; it becomes torch's current device. The
    ``backend`` is NCCL for GPUs (and gloo for CPU tensors) if each process has its own GPU, else gloo. ``threads`` is
    torch's number of CPU threads, by default the value of OMP_NUM_THREADS or ``torch.set_num_threads``, or this
    process's share of the cores. ``timeout`` (seconds) is for joining and for torch's collectives. The group is
    destroyed at exit. An existing group is kept: the call then only sets the device, and ``threads`` if given.
    """
    if dist.is_initialized():
        if threads is not None:
            torch.set_num_threads(threads)
        return use_device(device, made=False)
    if timeout is not None and not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    if timeout is not None and timeout <= timedelta(0):
        raise PlanError(f"timeout must be a number of seconds above 0, got {timeout.total_seconds():g}")
    if "RANK" not in os.environ and is_slurm(os.environ):
        for name, value in slurm_variables(os.environ).items():
            os.environ.setdefault(name, value)
    missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        raise PlanError(
            f"a mesh needs several processes: {', '.join(missing)} not set. Start the program with "
            "'torchrun --nproc-per-node=4 train.py', 'penstock run --stages 4 train.py' or 'srun', or leave out mesh= "
            "to use threads in this process"
        )
    rank, world, _ = (_number(os.environ, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= world:
        raise PlanError(f"RANK is {rank}, but WORLD_SIZE is {world}: ranks are numbered from 0")
    here = use_device(device, made=True)
    processes = _join(here, backend, timeout)
    if threads is None and torch.get_num_threads() == _threads and not omp_threads_set_by_user(os.environ):
        threads = threads_per_process(processes, usable_cores(), os.environ)
    if threads is not None:
        torch.set_num_threads(threads)
    return here


def use_device(device: torch.device | str | None, *, made: bool) -> torch.device:
    """Make ``device``, by default this process's own, torch's current device.

    ``made``: Penstock created the process group, so the default is a GPU if there is one.
    """
    if device is None and _made_by_init():
        device = _device
    elif device is None and not made and "nccl" not in dist.get_backend():
        device = "cpu"  # the user has chosen gloo: use the CPU
    here = _device_here(device)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    return here


def is_rank0() -> bool:
    """Whether this process is rank 0 or the only one; also before the process group exists."""
    if dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def print0(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
    """``print`` on rank 0 only. Works with threads and before the process group exists, too."""
    if is_rank0():  # one write, so that output of other processes is not mixed in
        print(sep.join(map(str, values)) + end, end="", file=file, flush=True)


def num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def parse_device(device: torch.device | str | int) -> torch.device:
    """The CPU, or a CUDA device of this machine; an error for any other."""
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise PlanError(f"{device!r} is not a device: {str(error).splitlines()[0]}") from error
    if found.type not in ("cpu", "cuda"):
        raise PlanError(f"device {found} cannot run a stage: stages run on 'cpu' and on 'cuda' devices")
    if found.type == "cuda" and (found.index or 0) >= num_gpus():
        raise PlanError(f"device {found} is not there: this machine has {num_gpus()} CUDA devices")
    return found


def _device_here(device: torch.device | str | None) -> torch.device:
    """The device, with an index if it is a GPU; by default this process's GPU, or the CPU."""
    wanted = parse_device(device if device is not None else "cuda" if num_gpus() else "cpu")
    if wanted.type == "cpu":
        return torch.device("cpu")
    if wanted.index is not None:
        return wanted
    rank = os.environ.get("LOCAL_RANK") or (dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "0"))
    return torch.device("cuda", int(rank) % num_gpus())


def _join(device: torch.device, backend: str | None, timeout: timedelta | None) -> int:
    """Create the process group; return the number of its processes on this machine."""
    global _group, _device, _joins
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store, _, _ = next(rendezvous("env://", rank, world, **({} if timeout is None else {"timeout": timeout})))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE") == "1":
            # torchrun keeps its store after a restart, with the addresses of processes that have ended.
            store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
        host = socket.gethostname()
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
        _joins += 1  # gather by the store, because there is no process group yet
        store.set(f"penstock/init/{_joins}/{rank}", json.dumps([host, gpu]))
        members = [json.loads(m) for m in store.multi_get([f"penstock/init/{_joins}/{r}" for r in range(world)])]
        gpus = [gpu for _, gpu in members]
        if backend is None:
            # NCCL needs a GPU per process; processes that share one communicate through the host.
            exclusive = dist.is_nccl_available() and None not in gpus and len(set(gpus)) == world
            backend = "cpu:gloo,cuda:nccl" if exclusive else "gloo"
        bound = device if device.type == "cuda" and "nccl" in backend else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=bound)
        if "gloo" in backend:
            dist.all_reduce(torch.zeros(1))  # a barrier: no process may exit before all have joined
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
    return int(os.environ.get("LOCAL_WORLD_SIZE", [name for name, _ in members].count(host)))


def _leave() -> None:
    """Destroy the group at exit. After an exception, do not wait for other ranks.

    Without torchrun, rank 0 hosts the store and waits until the others no longer need it.
    """
    if getattr(sys, "last_value", None) is not None or not _made_by_init():
        return
    on_exit_of_program()  # first, because the other ranks may wait for this one
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        rank, store = dist.get_rank(), default_store()
        others = [f"penstock/exit/{_joins}/{r}" for r in range(1, dist.get_world_size())]
        end = time.monotonic() + _EXIT_WAIT
        with suppress(RuntimeError):
            if rank != 0:
                store.set(f"penstock/exit/{_joins}/{rank}", "")
            while rank == 0 and others and not store.check(others) and time.monotonic() < end:
                time.sleep(0.005)
    dist.destroy_process_group()


def _made_by_init() -> bool:
    """Whether ``init`` created the present process group."""
    return _group is not None and _group() is not None and _group() is dist.group.WORLD


# ── SLURM ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_PORTS = range(12_000, 32_000)  # below Linux's range of ephemeral ports


def is_slurm(environ: Mapping[str, str]) -> bool:
    return "SLURM_PROCID" in environ and ("SLURM_STEP_NUM_TASKS" in environ or "SLURM_NTASKS" in environ)


def slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for this SLURM task.

    The master is the first host of the step. Its port is derived from the ids of job and step.
    """
    world = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    rank, node = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_NODEID", otherwise=0)
    if not rank < world:
        raise PlanError(f"SLURM_PROCID is {rank}, but SLURM has {world} tasks")
    nodelist = _first_set(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    here = _first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if here:
        counts = slurm_tasks_per_node(here)
        local = counts[min(node, len(counts) - 1)]
    else:
        nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", otherwise=1)
        local = _number(environ, "SLURM_NTASKS_PER_NODE", otherwise=-(-world // nodes))
    job = _number(environ, "SLURM_JOB_ID", "SLURM_JOBID", otherwise=0)
    step = _number(environ, "SLURM_STEP_ID", "SLURM_STEPID", otherwise=0)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(_number(environ, "SLURM_LOCALID", otherwise=rank % local)),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": slurm_first_host(nodelist) if nodelist else "127.0.0.1",
        "MASTER_PORT": str(_PORTS[(job + step) % len(_PORTS)]),
    }


def slurm_first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: node003 of ``node[003-005,7],gpu1``."""
    match = re.match(r"((?:[^][,]|\[[^][]*\])+)(?:,|$)", nodelist)
    host = re.sub(r"\[\s*(\d+)[^][]*\]", r"\1", match[1]).strip() if match else ""
    if not host or "[" in host:
        raise PlanError(f"SLURM's list of nodes cannot be read: {nodelist!r}")
    return host


def slurm_tasks_per_node(text: str) -> list[int]:
    """Expand SLURM's tasks per node: ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise PlanError(f"SLURM's tasks per node cannot be read: {text!r}, expected something like '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_set(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _number(environ: Mapping[str, str], *names: str, otherwise: int | None = None) -> int:
    text = _first_set(environ, *names)
    if text is None and otherwise is not None:
        return otherwise
    if text is None or not text.isascii() or not text.isdigit():
        raise PlanError(f"{names[0]} must be a whole number, got {text!r}: start the program by torchrun or srun")
    return int(text)


# ── CPU threads ────────────────────────────────────────────────────────────────────────────────────────────────────


def usable_cores(proc: Path = Path("/proc/self/cgroup"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that this process may use: its CPU affinity, limited by the CPU quota of its cgroups."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError):
        for line in proc.read_text().splitlines():
            if line.startswith("0::"):  # version 2
                group = cgroups / line.removeprefix("0::").lstrip("/")
                for place in (group, *group.parents):  # limits of parent groups apply too
                    with suppress(OSError, ValueError):  # there is no file, or it contains "max"
                        quota, period = map(int, (place / "cpu.max").read_text().split())
                        cores = min(cores, max(1, quota // period))
    return cores


def threads_per_process(processes: int, cores: int, environ: Mapping[str, str]) -> int:
    """Threads for one of ``processes`` on this machine: its share of the cores, or SLURM's CPUs per task."""
    per_task = environ.get("SLURM_CPUS_PER_TASK", "") if "SLURM_PROCID" in environ else ""
    if per_task.isdigit() and "TORCHELASTIC_RUN_ID" not in environ:
        return max(1, min(int(per_task), cores))
    return max(1, cores // processes)


def omp_threads_set_by_user(environ: Mapping[str, str]) -> bool:
    """Whether the user has set OMP_NUM_THREADS. torchrun sets it to 1 if the user has not."""
    by_torchrun = "TORCHELASTIC_RUN_ID" in environ and environ.get("OMP_NUM_THREADS") == "1"
    return "OMP_NUM_THREADS" in environ and not by_torchrun
