"""Looks at this machine, at what is installed on it, and at what a launcher has said."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import permutations
from pathlib import Path

import torch
import torch.distributed as dist

from penstock import __version__
from penstock.doctor.exchange import between_ranks, between_two
from penstock.doctor.facts import Exchange, Facts, Gpu, Launch, Machine, Network, Versions
from penstock.errors import PlanError
from penstock.train.launch import is_slurm, slurm_variables, usable_cores

__all__ = ["look"]

_PREFIXES = ("SLURM_", "PENSTOCK_", "TORCHELASTIC_", "GLOO_", "NCCL_")
_NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


def look(environ: Mapping[str, str] = os.environ) -> Facts:
    """All facts. This takes some seconds: processes are started, and messages sent between them."""
    launch = _launch(environ)
    gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
    pairs = permutations(range(len(gpus)), 2)
    peers = tuple(pair for pair in pairs if torch.cuda.can_device_access_peer(*pair))
    return Facts(_versions(), _machine(), _network(), launch, gpus, peers, _exchanges(launch, len(gpus)))


def _versions() -> Versions:
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else None  # type: ignore[no-untyped-call]
    return Versions(
        penstock=__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        nccl=None if nccl is None else ".".join(map(str, nccl)),
        transformers=_installed("transformers"),
        rich=_installed("rich"),
    )


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _machine() -> Machine:
    total, free = _memory()
    return Machine(
        cpus=os.cpu_count() or 1,
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        memory=total,
        memory_free=free,
        shm_free=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        driver=Path("/proc/driver/nvidia/version").exists(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
    )


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, ...]:
    """All of it and what is free of it; in a container, of its own."""
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        total, free = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, KeyError):
        return None, None
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # there is none
        return total, free
    return min(total, limit), min(free, max(0, limit - used))


def _network() -> Network:
    host = socket.gethostname()
    addresses, error = _addresses(host)
    return Network(host, addresses, error, tuple(_reverse() for _ in range(3)))


def _reverse() -> float:
    """Seconds that torch's store would spend on the name of a peer, each time that one connects."""
    start = time.monotonic()
    with suppress(OSError):  # it is the time that matters
        socket.getnameinfo(("::ffff:127.0.0.1", 1, 0, 0), socket.NI_NUMERICSERV)
    return time.monotonic() - start


def _addresses(host: str) -> tuple[tuple[str, ...], str | None]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        return (), getattr(problem, "strerror", None) or str(problem)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found)), None


def _launch(environ: Mapping[str, str]) -> Launch:
    told = {k: v for k, v in environ.items() if k in _NAMES or k.startswith(_PREFIXES)}
    if "RANK" not in told and is_slurm(told):
        try:
            told = {**slurm_variables(told), **told}
        except PlanError as problem:
            return Launch(told, error=str(problem))
    if "MASTER_ADDR" not in told:
        return Launch(told)
    master, error = _addresses(told["MASTER_ADDR"])
    return Launch(told, master, None if error is None else f"MASTER_ADDR {told['MASTER_ADDR']!r} is not known: {error}")


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    free, error = None, None
    try:
        free = torch.cuda.mem_get_info(index)[0]
        if float(torch.ones(8, device=f"cuda:{index}").sum()) != 8:
            error = "it cannot add"
    except RuntimeError as problem:
        error = str(problem).splitlines()[0]
    capability = (properties.major, properties.minor)
    return Gpu(properties.name, properties.total_memory, capability, _has_code(capability), free, error)


def _has_code(capability: tuple[int, int], built: list[str] | None = None) -> bool:
    """Whether this torch runs there: code runs on the same generation, if it is for no later one, and PTX on all."""
    for word in torch.cuda.get_arch_list() if built is None else built:
        kind, _, digits = word.partition("_")
        digits = digits.rstrip("af")  # sm_90a
        major, minor = int(digits[:-1]), int(digits[-1])
        if (major, minor) <= capability and (kind == "compute" or major == capability[0]):
            return True
    return False


def _exchanges(launch: Launch, gpus: int) -> tuple[Exchange, ...]:
    told = launch.variables
    ready = all(name in told for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if ready and launch.error is None and told["WORLD_SIZE"] not in ("0", "1"):
        return between_ranks()
    backends = ["gloo"] if dist.is_gloo_available() else []
    if gpus > 1 and dist.is_nccl_available():
        backends.append("nccl")
    return tuple(between_two(backend) for backend in backends)
