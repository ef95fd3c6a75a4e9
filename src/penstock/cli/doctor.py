"""``penstock doctor``: whether this machine is ready for pipelines, and what would fail.

``collect`` gathers facts and lets processes exchange messages; ``diagnose`` turns the facts into findings: each is ok,
a warning or a failure, with a remedy.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import shutil
import socket
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from itertools import combinations, permutations
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import typer

from penstock import __version__
from penstock.errors import PenstockError, PlanError
from penstock.format import format_size
from penstock.profile.costs import Link
from penstock.profile.links import LinkError, measure_links, process_link
from penstock.train.launch import init, is_rank0, is_slurm, slurm_variables, usable_cores
from penstock.train.mesh import Mesh
from penstock.viz import print_text

_DETAILS = """\
Checks versions, cores, memory, devices, limits, host names and launchers, starts two processes and lets them exchange \
messages (over gloo, and over NCCL where there are two GPUs). Each line is ok, warn or fail, with a remedy. The exit \
code is 1 if something would fail, else 0.

Examples, the last between the processes of a launcher (or torchrun, srun):
  penstock doctor
  penstock doctor --json
  penstock run --stages 4 -m penstock doctor
"""

_OLDEST = {"python": (3, 11), "torch": (2, 10)}
_EXCHANGE_TIMEOUT = 110.0  # seconds; most of it for two processes to import torch on a busy machine
_JOIN_TIMEOUT = 20.0  # seconds for the processes of a launcher
_GIB = 1 << 30
_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_VARIABLES = (*_LAUNCHER, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_PREFIXES = ("SLURM_", "PENSTOCK_", "TORCHELASTIC_", "GLOO_", "NCCL_")

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Gpu:
    """A device, whether this torch has code for it, and the error of a small computation on it."""

    name: str
    memory: int
    capability: tuple[int, int]
    supported: bool
    memory_free: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Exchange:
    """Messages between two processes: seconds of a small one, bytes per second of large ones, or an error.

    ``ranks`` are those of a launcher; None: two processes that were started for it. A bandwidth of None was too large
    to be measured.
    """

    backend: str
    ranks: tuple[int, int] | None = None
    latency: float | None = None
    bandwidth: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Facts:
    """The state of a machine and of its launcher. Sizes are bytes; None: not known, or no limit."""

    versions: Mapping[str, str | None]
    cpus: int
    cores: int  # that this process may use
    threads: int  # of torch, for one operator
    host: str
    memory: int | None = None
    memory_free: int | None = None
    shm_free: int | None = None
    open_files: int | None = None
    locked_memory: int | None = None
    infiniband: bool = False
    driver: bool = False  # of NVIDIA GPUs
    interfaces: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()  # of ``host``
    host_error: str | None = None  # of looking them up
    reverse_seconds: tuple[float, ...] = ()  # of reverse lookups
    environ: Mapping[str, str] = field(default_factory=dict)  # the variables of a launcher
    master: tuple[str, ...] = ()  # addresses of MASTER_ADDR
    launcher_error: str | None = None
    gpus: tuple[Gpu, ...] = ()
    peers: tuple[tuple[int, int], ...] = ()  # pairs of GPUs that can access each other's memory
    exchanges: tuple[Exchange, ...] = ()


@dataclass(frozen=True)
class Finding:
    """The result of one check, with a remedy where it is not ok."""

    status: Status
    what: str
    text: str
    remedy: str = ""


app = typer.Typer(add_completion=False)


@app.command(epilog=_DETAILS)
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Write facts and findings as JSON.")] = False) -> int:
    """Check that this machine is ready."""
    facts = collect()
    findings = _of_all_ranks(list(diagnose(facts)))
    failed = any(finding.status == "fail" for finding in findings)
    if dist.is_initialized() and not is_rank0():
        return 0  # rank 0 prints for all: a launcher would end it if another rank failed first
    if as_json:
        found = {"ok": not failed, "findings": [asdict(finding) for finding in findings], "facts": asdict(facts)}
        text = json.dumps(found, indent=2)
    else:
        text = "\n".join(_page(findings, shutil.get_terminal_size((80, 24)).columns))
    print_text(text, sys.stdout)
    return int(failed)


def _of_all_ranks(findings: list[Finding]) -> list[Finding]:
    """Under a launcher: this rank's findings, and the warnings and failures that only other ranks have."""
    if not dist.is_initialized():
        return findings
    gathered: list[list[Finding]] = [[] for _ in range(dist.get_world_size())]
    try:
        dist.all_gather_object(gathered, findings)
    except RuntimeError as error:
        return [*findings, Finding("fail", "ranks", f"not all have finished: {error}", "check each of them alone")]
    seen = {(finding.what, finding.text) for finding in findings}
    for rank, others in enumerate(gathered):
        for finding in others:
            if finding.status != "ok" and (finding.what, finding.text) not in seen:
                seen.add((finding.what, finding.text))
                findings = [*findings, replace(finding, text=f"rank {rank}: {finding.text}")]
    return findings


def _page(findings: Sequence[Finding], width: int) -> list[str]:
    """The findings as lines of text, with a summary at the end."""
    label = max(len(finding.what) for finding in findings)
    indent = " " * (label + 8)

    def wrap(text: str, indent: str) -> list[str]:
        return textwrap.wrap(text, max(width, len(indent) + 20), subsequent_indent=indent, break_on_hyphens=False)

    page = []
    for finding in findings:
        page += wrap(f"{finding.status:<4}  {finding.what:<{label}}  {finding.text}", indent)
        if finding.remedy:
            page += wrap(f"{indent}-> {finding.remedy}", f"{indent}   ")
    failed = [finding.what for finding in findings if finding.status == "fail"]
    warned = sum(finding.status == "warn" for finding in findings)
    warnings = f"{warned} warning{'s' * (warned != 1)}" if warned else "no warnings"
    if failed:
        return [*page, "", f"What would fail: {', '.join(dict.fromkeys(failed))} ({warnings})."]
    return [*page, "", f"Nothing would fail ({warnings})."]


# ── facts ────────────────────────────────────────────────────────────────────────────────────────────────────────


def collect(environ: Mapping[str, str] = os.environ) -> Facts:
    """All facts. This takes some seconds: processes are started, and messages sent between them."""
    memory, memory_free = _memory()
    host = socket.gethostname()
    addresses, host_error = _lookup(host)
    gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
    pairs = permutations(range(len(gpus)), 2)
    variables, master, launcher_error = _launcher_environ(environ)
    return Facts(
        versions=_versions(),
        cpus=os.cpu_count() or 1,
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        host=host,
        memory=memory,
        memory_free=memory_free,
        shm_free=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        driver=Path("/proc/driver/nvidia/version").exists(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        addresses=addresses,
        host_error=host_error,
        reverse_seconds=tuple(_reverse_lookup() for _ in range(3)),
        environ=variables,
        master=master,
        launcher_error=launcher_error,
        gpus=gpus,
        peers=tuple(pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)),
        exchanges=_exchanges(variables, launcher_error, len(gpus)),
    )


def _versions() -> dict[str, str | None]:
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else None  # type: ignore[no-untyped-call]
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "penstock": __version__,
        "cuda": torch.version.cuda,
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
    }
    for name in ("rich", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, ...]:
    """Total and free memory; in a container, its own."""
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        total, free = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, KeyError):
        return None, None
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no limit
        return total, free
    return min(total, limit), min(free, max(0, limit - used))


def _reverse_lookup() -> float:
    """Seconds of a reverse lookup, which torch's store makes whenever a peer connects."""
    start = time.monotonic()
    with suppress(OSError):  # only the time matters
        socket.getnameinfo(("::ffff:127.0.0.1", 1, 0, 0), socket.NI_NUMERICSERV)
    return time.monotonic() - start


def _lookup(host: str) -> tuple[tuple[str, ...], str | None]:
    """The addresses of a host, or an error."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        return (), getattr(problem, "strerror", None) or str(problem)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found)), None


def _launcher_environ(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...], str | None]:
    """The variables of a launcher, the addresses of MASTER_ADDR, and an error."""
    variables = {k: v for k, v in environ.items() if k in _VARIABLES or k.startswith(_PREFIXES)}
    if "RANK" not in variables and is_slurm(variables):
        try:
            variables = {**slurm_variables(variables), **variables}
        except PlanError as problem:
            return variables, (), str(problem)
    if "MASTER_ADDR" not in variables:
        return variables, (), None
    master, error = _lookup(variables["MASTER_ADDR"])
    return variables, master, error and f"MASTER_ADDR {variables['MASTER_ADDR']!r} is not known: {error}"


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    free, error = None, None
    try:
        free = torch.cuda.mem_get_info(index)[0]
        if float(torch.ones(8, device=f"cuda:{index}").sum()) != 8:
            error = "a sum is wrong"
    except RuntimeError as problem:
        error = _first_line(problem)
    capability = (properties.major, properties.minor)
    return Gpu(properties.name, properties.total_memory, capability, _has_code(capability), free, error)


def _has_code(capability: tuple[int, int], built: list[str] | None = None) -> bool:
    """Whether this torch has code for a GPU: SASS of the same major and no later minor version, or any older PTX."""
    for arch in torch.cuda.get_arch_list() if built is None else built:
        kind, _, digits = arch.partition("_")
        digits = digits.rstrip("af")  # sm_90a
        major, minor = int(digits[:-1]), int(digits[-1])
        if (major, minor) <= capability and (kind == "compute" or major == capability[0]):
            return True
    return False


def _exchanges(variables: Mapping[str, str], error: str | None, gpus: int) -> tuple[Exchange, ...]:
    if all(name in variables for name in _LAUNCHER) and error is None and variables["WORLD_SIZE"] not in ("0", "1"):
        return _between_ranks()
    devices = {"gloo": "cpu"} if dist.is_gloo_available() else {}
    if gpus > 1 and dist.is_nccl_available():
        devices["nccl"] = "cuda"
    return tuple(_between_two(backend, device) for backend, device in devices.items())


def _between_two(backend: str, device: str) -> Exchange:
    """Two processes on this machine."""
    try:
        return _exchange(backend, None, process_link(device, 2, timeout=_EXCHANGE_TIMEOUT))
    except LinkError as error:
        return Exchange(backend, error=error.reason)


def _between_ranks() -> tuple[Exchange, ...]:
    """Each process of the launcher with the next, one pair at a time. All processes call this, and get all results."""
    try:
        device = init(timeout=_JOIN_TIMEOUT)
        backend = "nccl" if device.type == "cuda" and "nccl" in dist.get_backend_config() else "gloo"
        pairs = measure_links(Mesh(data=1, pipe=dist.get_world_size(), tensor=1, device=device)).pairs
    except (PenstockError, RuntimeError) as error:
        return (Exchange("torch.distributed", error=_first_line(error)),)
    return tuple(_exchange(backend, pair, link) for pair, link in pairs.items())


def _exchange(backend: str, ranks: tuple[int, int] | None, link: Link) -> Exchange:
    return Exchange(backend, ranks, link.latency, link.bandwidth if math.isfinite(link.bandwidth) else None)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# ── findings ─────────────────────────────────────────────────────────────────────────────────────────────────────


def diagnose(facts: Facts) -> Iterator[Finding]:
    """All findings, the basic ones first."""
    yield from _diagnose_versions(facts)
    yield from _diagnose_machine(facts)
    yield from _diagnose_devices(facts)
    yield from _diagnose_network(facts)
    yield from _diagnose_launcher(facts)
    yield from _diagnose_exchanges(facts)


def _check(bad: object, what: str, text: str, remedy: str, status: Status = "warn") -> Finding:
    return Finding(status, what, text, remedy) if bad else Finding("ok", what, text)


def _diagnose_versions(facts: Facts) -> Iterator[Finding]:
    for name, oldest in _OLDEST.items():
        found = facts.versions[name] or ""
        parts = found.partition("+")[0].split(".")[:2]  # 2.13.0+cpu
        number = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)
        yield _check(number < oldest, name, found, f"install {name} {oldest[0]}.{oldest[1]} or later", "fail")
    yield Finding("ok", "penstock", facts.versions["penstock"] or "")
    for name, use in (("rich", "colours and progress bars"), ("transformers", "models of Hugging Face")):
        yield Finding("ok", name, facts.versions.get(name) or f"not installed: it is for {use}")


def _diagnose_machine(facts: Facts) -> Iterator[Finding]:
    threads = f"{facts.threads} thread{'s' * (facts.threads != 1)}"
    text = f"{facts.cores} of {facts.cpus} to use, {threads} for an operator of torch"
    remedy = f"set OMP_NUM_THREADS={facts.cores}: more threads than cores take turns"
    yield _check(facts.threads > facts.cores, "cores", text, remedy)
    if facts.memory is not None and facts.memory_free is not None:
        text = f"{format_size(facts.memory_free)} free of {format_size(facts.memory)}"
        remedy = "end other programs: a process that runs torch takes half of that"
        yield _check(facts.memory_free < _GIB, "memory", text, remedy)
    if facts.shm_free is None:
        yield Finding("warn", "/dev/shm", "does not exist", "mount it: data loader workers and NCCL use it")
    else:
        remedy = "make it larger (docker run --shm-size=8g): data loader workers and NCCL use it"
        yield _check(facts.shm_free < _GIB, "/dev/shm", f"{format_size(facts.shm_free)} free", remedy)
    files, locked = facts.open_files, facts.locked_memory
    text = "no limit" if files is None else f"{files:,} at most"
    remedy = "ulimit -n 65536: each rank has connections to all others"
    yield _check(files is not None and files < 1024, "open files", text, remedy)
    text = "no limit" if locked is None else f"{format_size(locked)} at most"
    remedy = "ulimit -l unlimited: InfiniBand locks the memory that it sends"
    yield _check(locked is not None and facts.infiniband, "locked memory", text, remedy)


def _diagnose_devices(facts: Facts) -> Iterator[Finding]:
    cuda = facts.versions.get("cuda")
    built = f"CUDA {cuda}" if cuda else "torch is built without CUDA"
    if not facts.gpus:
        hidden = facts.environ.get("CUDA_VISIBLE_DEVICES")
        if not facts.driver:
            yield Finding("ok", "devices", f"the CPU ({built})")
        elif hidden is not None:
            text = f"the CPU: CUDA_VISIBLE_DEVICES={hidden!r} hides the GPUs"
            yield Finding("warn", "devices", text, "unset it, or keep it to train on the CPU")
        else:
            text = f"the CPU: there is a driver for GPUs, but torch ({built}) finds none"
            remedy = "compare 'nvidia-smi' with the CUDA of torch" if cuda else "install torch built with CUDA"
            yield Finding("warn", "devices", text, remedy)
        return
    for index, gpu in enumerate(facts.gpus):
        major, minor = gpu.capability
        text = f"{gpu.name}, {format_size(gpu.memory)}, compute capability {major}.{minor}"
        if not gpu.supported:
            remedy = f"install a torch that has code for {major}.{minor}: this one has none"
            yield Finding("fail", f"cuda:{index}", text, remedy)
        elif gpu.error is not None:
            remedy = "check 'nvidia-smi', or leave the GPU out with CUDA_VISIBLE_DEVICES"
            yield Finding("fail", f"cuda:{index}", f"{text}: {gpu.error}", remedy)
        elif gpu.memory_free is not None and gpu.memory_free < gpu.memory // 2:
            text = f"{text}, {format_size(gpu.memory_free)} free"
            yield Finding("warn", f"cuda:{index}", text, "other programs use it: 'nvidia-smi' shows them")
        else:
            yield Finding("ok", f"cuda:{index}", f"{text} ({built})")
    if len(facts.gpus) == 1:
        yield Finding("ok", "peer access", "one GPU: it has no peers")
        return
    without = [(a, b) for a, b in combinations(range(len(facts.gpus)), 2) if not {(a, b), (b, a)} <= {*facts.peers}]
    text = f"between all {len(facts.gpus)} GPUs"
    if without:
        text = "none between GPUs " + ", ".join(f"{a} and {b}" for a, b in without[:4]) + " …" * (len(without) > 4)
    remedy = "messages go through the host: place neighbouring stages on GPUs with peer access"
    yield _check(without, "peer access", text, remedy)


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def _diagnose_network(facts: Facts) -> Iterator[Finding]:
    environ = facts.environ
    world = environ.get("WORLD_SIZE", "1")
    status: Status = "fail" if world != environ.get("LOCAL_WORLD_SIZE", world) else "warn"  # one machine needs no name
    remedy = "enter it in /etc/hosts, or set GLOO_SOCKET_IFNAME=<interface> on each of several machines"
    text = f"{facts.host!r} is {', '.join(facts.addresses)}"
    interface = environ.get("GLOO_SOCKET_IFNAME")
    if interface is not None:
        missing = not set(interface.split(",")) <= set(facts.interfaces)
        text = f"{interface}: no such interface" if missing else interface
        remedy = f"set another: there are {', '.join(facts.interfaces)}"
        yield _check(missing, "GLOO_SOCKET_IFNAME", text, remedy, "fail")
    elif facts.host_error is not None:
        yield Finding(status, "host name", f"{facts.host!r} has no address: {facts.host_error}", remedy)
    elif all(map(_is_loopback, facts.addresses)):
        yield Finding(status, "host name", f"{text}, which other machines cannot reach", remedy)
    else:
        yield Finding("ok", "host name", text)
    if facts.reverse_seconds:
        slowest = max(facts.reverse_seconds)
        taken = f"{slowest:.1f} s" if slowest > 1 else f"{slowest * 1000:.1f} ms"
        remedy = (
            "torch looks up the name of each peer that connects, and a name server does not answer: enter the "
            "addresses in /etc/hosts, or set 'options timeout:1 attempts:1' in /etc/resolv.conf"
        )
        yield _check(slowest > 1, "name server", f"a peer's name is looked up in {taken}", remedy)


def _diagnose_launcher(facts: Facts) -> Iterator[Finding]:
    environ, again = facts.environ, "start the program with 'penstock run', torchrun or srun, which set them all"
    given = [name for name in _LAUNCHER if name in environ]
    if not given and "SLURM_PROCID" not in environ:
        text = "none: 'penstock run' starts processes by itself"
        if "SLURM_JOB_ID" in environ:
            text = "in a job of SLURM, not in a step: 'srun penstock doctor' checks its tasks"
        yield Finding("ok", "launcher", text)
    elif facts.launcher_error is not None:
        by_name = "enter it in /etc/hosts, or give an address instead of a name"
        remedy = by_name if "MASTER_ADDR" in environ else "start the program with srun"
        yield Finding("fail", "launcher", facts.launcher_error, remedy)
    elif len(given) < len(_LAUNCHER):
        missing = ", ".join(name for name in _LAUNCHER if name not in environ)
        text = f"{', '.join(given) or 'SLURM_PROCID'} without {missing}"
        yield Finding("fail", "launcher", text, f"unset them, or {again}")
    elif wrong := [name for name in _LAUNCHER if name != "MASTER_ADDR" and _whole(environ.get(name)) is None]:
        yield Finding("fail", "launcher", f"{wrong[0]}={environ[wrong[0]]!r} is not a whole number", again)
    else:
        yield from _diagnose_ranks(facts, again)


def _diagnose_ranks(facts: Facts, again: str) -> Iterator[Finding]:
    """Whether the variables of a launcher agree with each other, and with this machine."""
    environ = facts.environ
    rank, world, port = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    local = _whole(environ.get("LOCAL_WORLD_SIZE"))
    local = world if local is None else local
    local_rank = _whole(environ.get("LOCAL_RANK")) or 0
    master = f"{environ['MASTER_ADDR']}:{port}"
    if rank >= world:
        yield Finding("fail", "launcher", f"RANK is {rank} of WORLD_SIZE {world}, from 0 on", again)
    elif local_rank >= max(local, 1):
        yield Finding("fail", "launcher", f"LOCAL_RANK is {local_rank} of LOCAL_WORLD_SIZE {local}, from 0 on", again)
    elif not 0 < port < 65536:
        yield Finding("fail", "launcher", f"MASTER_PORT {port} is no port", "choose one from 1024 to 65535")
    elif local < world and all(map(_is_loopback, facts.master)):
        text = f"{world - local} of {world} ranks are on other machines, and {master} is each machine itself"
        yield Finding("fail", "launcher", text, "set MASTER_ADDR to the first machine's address in their network")
    else:
        yield Finding("ok", "launcher", f"rank {rank} of {world}, {local} on this machine, connecting to {master}")
    mesh = {name: environ[name] for name in ("PENSTOCK_DATA", "PENSTOCK_PIPE", "PENSTOCK_TENSOR") if name in environ}
    sizes = [_whole(size) for size in mesh.values()]
    if sizes and None not in sizes and math.prod(size for size in sizes if size is not None) != world:
        text = f"{' × '.join(f'{name}={size}' for name, size in mesh.items())} is not WORLD_SIZE {world}"
        yield Finding("fail", "mesh", text, "unset them: 'penstock run' sets them for its own processes")
    task = environ.get("SLURM_PROCID")
    if task is not None and "TORCHELASTIC_RUN_ID" not in environ and task != str(rank):
        remedy = "unset RANK and the others in the job's script: srun sets the rank of each task"
        yield Finding("fail", "launcher", f"RANK is {rank}, but SLURM_PROCID is {task}", remedy)
    gpus = len(facts.gpus)
    if gpus and local > gpus:
        text = f"{local} ranks on this machine share {gpus} GPU{'s' * (gpus > 1)}"
        remedy = "give each rank its own GPU: ranks that share one communicate by gloo, not NCCL"
        yield Finding("warn", "launcher", text, remedy)
    threads = _whole(environ.get("OMP_NUM_THREADS"))
    if threads is not None and threads * local > max(facts.cores, local):
        remedy = f"set OMP_NUM_THREADS={max(1, facts.cores // local)}, or leave it out"
        text = f"OMP_NUM_THREADS={threads} for {local} ranks on {facts.cores} cores"
        yield Finding("warn", "threads", text, remedy)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _diagnose_exchanges(facts: Facts) -> Iterator[Finding]:
    for exchange in facts.exchanges:
        backend, latency, bandwidth = exchange.backend, exchange.latency, exchange.bandwidth
        between = "two processes" if exchange.ranks is None else "ranks {} and {}".format(*exchange.ranks)
        if exchange.error is not None or latency is None:
            remedy = {
                "gloo": "a firewall, or a wrong interface? Set GLOO_SOCKET_IFNAME=lo for one machine; for several, "
                "allow connections between them on all ports",
                "nccl": "NCCL_DEBUG=INFO shows how far it gets; try NCCL_SOCKET_IFNAME and NCCL_P2P_DISABLE=1",
            }.get(backend, "start all processes, and let each reach MASTER_ADDR:MASTER_PORT")
            yield Finding("fail", backend, f"messages between {between}: {exchange.error}", remedy)
            continue
        rate = "" if bandwidth is None else f", {bandwidth / 1e9:.2f} GB/s"
        slow = latency > 0.02 or (bandwidth is not None and bandwidth < 20e6)
        remedy = "messages are slow: is the machine busy, or the network slow?"
        yield _check(slow, backend, f"{latency * 1e6:,.0f} µs{rate} between {between}", remedy)
    backends = {exchange.backend for exchange in facts.exchanges}
    nccl, gpus = facts.versions.get("nccl"), len(facts.gpus)
    if not backends:
        remedy = "install a torch built with it: ranks on CPUs need it"
        yield Finding("fail", "gloo", "this torch has no gloo", remedy)
    elif "nccl" not in backends:
        count = "is 1" if gpus == 1 else f"are {gpus or 'none'}"
        text = "this torch has none" if nccl is None else f"{nccl}, not tried: it needs two GPUs, and there {count}"
        remedy = "install a torch built with NCCL: without it, GPUs communicate through the host"
        yield _check(gpus > 1 and nccl is None, "nccl", text, remedy)
