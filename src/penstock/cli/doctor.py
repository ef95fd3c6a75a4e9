"""``penstock doctor``: check this machine for problems that affect pipelines.

``examine`` collects facts, and measures messages between processes. The ``check_…`` functions convert facts to
findings: each is ok, a warning or a failure, with a remedy.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import penstock as ps
from penstock.errors import PenstockError
from penstock.format import format_size
from penstock.profile.links import LinkError, measure_links, process_link
from penstock.train.launch import is_rank0, is_slurm, slurm_variables, usable_cores

_DETAILS = """\
Checks versions, cores, memory, devices, host names and launchers, and sends messages between two processes (over \
gloo, and over NCCL if there are two GPUs). Each line is ok, warn or fail, with a remedy. The exit code is 1 after a \
failure, otherwise 0.

Examples; the last one sends messages between the processes of a launcher (also torchrun, srun):
  penstock doctor
  penstock doctor --json
  penstock run --stages 4 -m penstock doctor
"""

_OLDEST = {"python": (3, 11), "torch": (2, 10)}
_EXCHANGE_TIMEOUT = 110.0  # seconds; on a busy machine, the import of torch in two processes takes most of it
_JOIN_TIMEOUT = 20.0  # seconds for the connection of a launcher's processes
_GIB = 1 << 30

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one check, with a remedy unless it is ok."""

    status: Status
    what: str
    text: str
    remedy: str = ""


app = typer.Typer(add_completion=False)


@app.command(epilog=_DETAILS)
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Write the findings as JSON.")] = False) -> int:
    """Check this machine for problems."""
    findings = _gather_findings(list(examine()))
    failed = list(dict.fromkeys(finding.what for finding in findings if finding.status == "fail"))
    if dist.is_initialized() and not is_rank0():
        return 0  # rank 0 prints for all ranks; a launcher would end it if another rank failed first
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        Console(highlight=False).print(table(findings))
        warned = sum(finding.status == "warn" for finding in findings)
        verdict = f"Failed: {', '.join(failed)}" if failed else "No failures"
        print(f"\n{verdict} ({warned or 'no'} warning{'s' * (warned != 1)}).")
    return int(bool(failed))


def _gather_findings(findings: list[Finding]) -> list[Finding]:
    """The findings of this rank; under a launcher also warnings and failures that only other ranks have."""
    if not dist.is_initialized():
        return findings
    gathered: list[list[Finding]] = [[] for _ in range(dist.get_world_size())]
    try:
        dist.all_gather_object(gathered, findings)
    except RuntimeError as error:
        return [*findings, Finding("fail", "ranks", f"not all have finished: {error}", "check each machine alone")]
    found = {(finding.what, finding.text): finding for finding in findings}
    for rank, others in enumerate(gathered):
        for other in others:
            if other.status != "ok":
                found.setdefault((other.what, other.text), replace(other, text=f"rank {rank}: {other.text}"))
    return list(found.values())


def table(findings: Sequence[Finding]) -> Table:
    """A table with one row per finding."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    for finding in findings:
        remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
        rows.add_row(*map(Text, (finding.status, finding.what, finding.text + remedy)))
    return rows


def examine() -> Iterator[Finding]:
    """All findings, basic ones first. This takes some seconds, because processes are started."""
    yield from check_versions({"python": platform.python_version(), "torch": str(torch.__version__)})
    shm_free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    yield from check_machine(usable_cores(), torch.get_num_threads(), _memory_free(), shm_free)
    for index in range(torch.cuda.device_count()):
        yield check_gpu(index)
    if not torch.cuda.device_count():
        driver = Path("/proc/driver/nvidia/version").exists()
        text = "the CPU" + (": there is a GPU driver, but torch finds no GPU" if driver else "")
        remedy = "install a torch with the CUDA of 'nvidia-smi', or unset CUDA_VISIBLE_DEVICES"
        yield _check(driver, "devices", text, remedy)
    environ = dict(os.environ)
    if "RANK" not in environ and is_slurm(environ):
        with suppress(PenstockError):  # the check of messages between ranks reports it
            environ = {**slurm_variables(environ), **environ}
    host, addresses = socket.gethostname(), dict[str, None]()
    with suppress(OSError, UnicodeError):  # the name cannot be resolved
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = dict.fromkeys(str(address[0]) for *_, address in found)
    yield from check_network(host, list(addresses), max(_reverse_lookup() for _ in range(3)), environ)
    if ps.is_distributed() and environ.get("WORLD_SIZE") != "1":
        yield from _check_ranks()
    else:
        yield _check_processes("gloo", "cpu")
        if torch.cuda.device_count() > 1 and dist.is_nccl_available():
            yield _check_processes("nccl", "cuda")


def _check(bad: object, what: str, text: str, remedy: str, status: Status = "warn") -> Finding:
    return Finding(status, what, text, remedy) if bad else Finding("ok", what, text)


def check_versions(versions: Mapping[str, str]) -> Iterator[Finding]:
    for name, oldest in _OLDEST.items():
        number = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in versions[name].split(".")[:2])
        yield _check(number < oldest, name, versions[name], f"install {name} {oldest[0]}.{oldest[1]} or later", "fail")
    yield Finding("ok", "penstock", ps.__version__)


def check_machine(cores: int, threads: int, memory_free: int | None, shm_free: int) -> Iterator[Finding]:
    """Checks of cores and memory. ``threads`` is torch's number per operator; ``memory_free`` is None if unknown."""
    remedy = f"set OMP_NUM_THREADS={cores}: more threads than cores are slow"
    yield _check(threads > cores, "cores", f"{cores} available; torch uses {threads} threads per operator", remedy)
    if memory_free is not None:
        remedy = "end other programs: a process with torch needs about 0.5 GiB"
        yield _check(memory_free < _GIB, "memory", f"{format_size(memory_free)} free", remedy)
    remedy = "make it larger (docker run --shm-size=8g): data loader workers and NCCL use it"
    yield _check(shm_free < _GIB, "/dev/shm", f"{format_size(shm_free)} free", remedy)


def _memory_free(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Free memory; in a container, at most the rest of its limit."""
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None
    with suppress(OSError, ValueError):  # no limit
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, max(0, limit - used))
    return free


def check_gpu(index: int) -> Finding:
    """Check a GPU by a small computation, and its free memory."""
    properties = torch.cuda.get_device_properties(index)
    text = f"{properties.name}, {format_size(properties.total_memory)}, CUDA {torch.version.cuda}"
    try:
        free = torch.cuda.mem_get_info(index)[0]
        torch.ones(8, device=f"cuda:{index}").sum().item()
    except RuntimeError as error:
        remedy = "check 'nvidia-smi' and the CUDA of torch, or exclude the GPU with CUDA_VISIBLE_DEVICES"
        return Finding("fail", f"cuda:{index}", f"{text}: {_first_line(error)}", remedy)
    used = free < properties.total_memory // 2
    remedy = "other programs use it: 'nvidia-smi' shows them"
    return _check(used, f"cuda:{index}", f"{text}, {format_size(free)} free", remedy)


def check_network(
    host: str, addresses: Sequence[str], reverse_seconds: float, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Checks of the host name, of the address of rank 0, and of the time of the slowest reverse lookup."""
    world = environ.get("WORLD_SIZE", "1")
    several = world != environ.get("LOCAL_WORLD_SIZE", world)  # several machines; a single one needs no name
    text = f"{host!r} is {', '.join(addresses) or 'unknown'}"
    local = all(ip_address(address.partition("%")[0]).is_loopback for address in addresses)
    remedy = "enter it in /etc/hosts, or set GLOO_SOCKET_IFNAME=<interface> on each of several machines"
    if local and "GLOO_SOCKET_IFNAME" not in environ:
        yield Finding("fail" if several else "warn", "host name", f"{text}, which other machines cannot reach", remedy)
    else:
        yield Finding("ok", "host name", text)
    remedy = (
        "torch looks up the name of each peer that connects, and a name server does not answer: enter the addresses "
        "in /etc/hosts, in the form '::ffff:127.0.0.1 localhost', or set RES_OPTIONS=timeout:1 for the launcher"
    )
    text = f"a lookup of a peer's name takes {reverse_seconds:.1f} s"
    yield _check(reverse_seconds > 1, "name server", text, remedy)
    if "RANK" not in environ:
        yield Finding("ok", "launcher", "none: 'penstock run' starts processes")
        return
    master = environ.get("MASTER_ADDR", "")
    text = f"rank {environ['RANK']} of {world}, connecting to {master}:{environ.get('MASTER_PORT', '')}"
    loopback = several and (master == "localhost" or master.startswith("127."))
    remedy = "a loopback address is local to each machine: set MASTER_ADDR to the network address of the first machine"
    yield _check(loopback, "launcher", text, remedy, "fail")


def _reverse_lookup() -> float:
    """Seconds of a reverse lookup, which torch's store does for each peer that connects."""
    start = time.monotonic()
    with suppress(OSError):  # only the time is needed
        socket.getnameinfo(("::ffff:127.0.0.1", 1, 0, 0), socket.NI_NUMERICSERV)
    return time.monotonic() - start


def _check_processes(backend: str, device: str) -> Finding:
    """Check messages between two processes on this machine."""
    try:
        link = process_link(device, 2, timeout=_EXCHANGE_TIMEOUT)
    except LinkError as error:
        return check_link(backend, "two processes", error=error.reason)
    return check_link(backend, "two processes", link.latency, link.bandwidth)


def _check_ranks() -> Iterator[Finding]:
    """Check messages between neighbouring processes of a launcher. All processes call this, and get all results."""
    try:
        device = ps.init(timeout=_JOIN_TIMEOUT)
        backend = "nccl" if device.type == "cuda" and "nccl" in dist.get_backend_config() else "gloo"
        pairs = measure_links(ps.Mesh(data=1, pipe=dist.get_world_size(), tensor=1, device=device)).pairs
    except (PenstockError, RuntimeError) as error:
        yield check_link("torch.distributed", "the ranks", error=_first_line(error))
        return
    for (a, b), link in pairs.items():
        yield check_link(backend, f"ranks {a} and {b}", link.latency, link.bandwidth)


def check_link(
    backend: str, between: str, latency: float = 0.0, bandwidth: float = 0.0, error: str | None = None
) -> Finding:
    """The finding for a link: latency in seconds and bandwidth in bytes per second, or an error."""
    if error is not None:
        remedy = {
            "gloo": "check the firewall and the interface: set GLOO_SOCKET_IFNAME=lo for one machine; for several, "
            "allow connections between them on all ports",
            "nccl": "NCCL_DEBUG=INFO shows the cause; try NCCL_SOCKET_IFNAME and NCCL_P2P_DISABLE=1",
        }.get(backend, "start all processes, and allow their connections to MASTER_ADDR:MASTER_PORT")
        return Finding("fail", backend, f"messages between {between}: {error}", remedy)
    text = f"{latency * 1e6:,.0f} µs, {bandwidth / 1e9:.2f} GB/s between {between}"
    remedy = "messages are slow: check the load of the machine, and the network"
    return _check(latency > 0.02 or bandwidth < 20e6, backend, text, remedy)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
