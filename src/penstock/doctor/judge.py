"""From facts to lines: what is well, what may go wrong, what would fail, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import permutations
from typing import Literal

from penstock.doctor.facts import Exchange, Facts, Gpu
from penstock.doctor.launched import launcher_lines

__all__ = ["Line", "judge"]

Status = Literal["ok", "warn", "fail"]

_PYTHON, _TORCH = (3, 11), (2, 10)  # the oldest that are supported
_GIB = 1 << 30


@dataclass(frozen=True)
class Line:
    """One thing that was looked at; ``do`` says what to do where it is not well."""

    status: Status
    what: str
    text: str
    do: str = ""


def judge(facts: Facts) -> list[Line]:
    """All lines, in the order of what builds on what."""
    parts = (_versions, _machine, _limits, _devices, _network, _launch, _exchanges)
    return [line for part in parts for line in part(facts)]


def _versions(facts: Facts) -> Iterator[Line]:
    versions = facts.versions
    for what, found, oldest in (("python", versions.python, _PYTHON), ("torch", versions.torch, _TORCH)):
        needed = ".".join(map(str, oldest))
        if _number(found) < oldest:
            yield Line("fail", what, found, f"install {what} {needed} or later")
        else:
            yield Line("ok", what, found)
    yield Line("ok", "penstock", versions.penstock)
    yield Line("ok", "rich", versions.rich or "not installed: it is for colours and progress bars")
    yield Line("ok", "transformers", versions.transformers or "not installed: it is for models of Hugging Face")


def _machine(facts: Facts) -> Iterator[Line]:
    machine = facts.machine
    text = f"{machine.cores} of {machine.cpus} to use, {_count(machine.threads, 'thread')} for an operator of torch"
    if machine.threads > machine.cores:
        yield Line("warn", "cores", text, f"set OMP_NUM_THREADS={machine.cores}: more threads than cores take turns")
    else:
        yield Line("ok", "cores", text)
    if machine.memory is not None and machine.memory_free is not None:
        text = f"{_size(machine.memory_free)} free of {_size(machine.memory)}"
        if machine.memory_free < _GIB:
            yield Line("warn", "memory", text, "end other programs: a process that runs torch takes half of that")
        else:
            yield Line("ok", "memory", text)
    if machine.shm_free is None:
        yield Line("warn", "/dev/shm", "is not there", "mount it: workers of data loaders and NCCL use it")
    elif machine.shm_free < _GIB:
        what_to_do = "make it larger (docker run --shm-size=8g): workers of data loaders and NCCL use it"
        yield Line("warn", "/dev/shm", f"{_size(machine.shm_free)} free", what_to_do)
    else:
        yield Line("ok", "/dev/shm", f"{_size(machine.shm_free)} free")


def _limits(facts: Facts) -> Iterator[Line]:
    files, locked = facts.machine.open_files, facts.machine.locked_memory
    text = "no limit" if files is None else f"{files:,} at most"
    if files is not None and files < 1024:
        yield Line("warn", "open files", text, "ulimit -n 65536: each rank has connections to all others")
    else:
        yield Line("ok", "open files", text)
    text = "no limit" if locked is None else f"{_size(locked)} at most"
    if locked is not None and facts.machine.infiniband:
        yield Line("warn", "locked memory", text, "ulimit -l unlimited: InfiniBand locks what it sends")
    else:
        yield Line("ok", "locked memory", text)


def _devices(facts: Facts) -> Iterator[Line]:
    versions, gpus = facts.versions, facts.gpus
    if not gpus:
        hidden = facts.launch.variables.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and facts.machine.driver:
            why = f"CUDA_VISIBLE_DEVICES={hidden!r} hides what is there"
            yield Line("warn", "devices", f"the CPU: {why}", "unset it, or leave it so to train on the CPU")
        elif facts.machine.driver:
            do = "compare 'nvidia-smi' with the CUDA of torch" if versions.cuda else "install torch built with CUDA"
            text = f"the CPU: there is a driver for GPUs, and torch ({_cuda(versions.cuda)}) sees none"
            yield Line("warn", "devices", text, do)
        else:
            yield Line("ok", "devices", f"the CPU ({_cuda(versions.cuda)})")
        return
    for index, gpu in enumerate(gpus):
        yield _gpu(index, gpu, versions.cuda)
    if len(gpus) == 1:
        yield Line("ok", "peer access", "one GPU: it has no peers")
        return
    without = [(a, b) for a, b in permutations(range(len(gpus)), 2) if a < b and not {(a, b), (b, a)} <= {*facts.peers}]
    if without:
        text = "none between GPUs " + ", ".join(f"{a} and {b}" for a, b in without[:4]) + " …" * (len(without) > 4)
        yield Line("warn", "peer access", text, "messages go through the host: put neighbours where there is access")
    else:
        yield Line("ok", "peer access", f"between all {len(gpus)} GPUs")


def _gpu(index: int, gpu: Gpu, cuda: str | None) -> Line:
    what = f"cuda:{index}"
    major, minor = gpu.capability
    text = f"{gpu.name}, {_size(gpu.memory)}, compute capability {major}.{minor}"
    if not gpu.supported:
        return Line("fail", what, text, f"install a torch that has code for {major}.{minor}: this one has none")
    if gpu.error is not None:
        do = "look at 'nvidia-smi', or leave it out with CUDA_VISIBLE_DEVICES"
        return Line("fail", what, f"{text}: {gpu.error}", do)
    if gpu.memory_free is not None and gpu.memory_free < gpu.memory // 2:
        text = f"{text}, {_size(gpu.memory_free)} free"
        return Line("warn", what, text, "other programs use it: 'nvidia-smi' shows them")
    return Line("ok", what, f"{text} ({_cuda(cuda)})")


def _network(facts: Facts) -> Iterator[Line]:
    network, told = facts.network, facts.launch.variables
    apart = told.get("WORLD_SIZE", "1") != told.get("LOCAL_WORLD_SIZE", told.get("WORLD_SIZE", "1"))
    status: Status = "fail" if apart else "warn"  # on one machine nobody asks
    do = "enter it in /etc/hosts, or say GLOO_SOCKET_IFNAME=<interface> on each of several machines"
    if "GLOO_SOCKET_IFNAME" in told:
        yield from _interface(facts)
    elif network.error is not None:
        yield Line(status, "host name", f"{network.host!r} has no address: {network.error}", do)
    elif all(ip_address(address.partition("%")[0]).is_loopback for address in network.addresses):
        text = f"{network.host!r} is {', '.join(network.addresses)}, which other machines cannot reach"
        yield Line(status, "host name", text, do)
    else:
        yield Line("ok", "host name", f"{network.host!r} is {', '.join(network.addresses)}")
    if network.reverse:
        slowest = max(network.reverse)
        text = f"a peer's name is looked up in {slowest * 1000:.1f} ms"
        if slowest > 1:
            what_to_do = (
                "torch asks for the name of each peer that connects, and a name server does not answer: enter the "
                "addresses in /etc/hosts, or set 'options timeout:1 attempts:1' in /etc/resolv.conf"
            )
            yield Line("warn", "name server", f"a peer's name is looked up in {slowest:.1f} s", what_to_do)
        else:
            yield Line("ok", "name server", text)


def _interface(facts: Facts) -> Iterator[Line]:
    wanted = facts.launch.variables["GLOO_SOCKET_IFNAME"]
    missing = [name for name in wanted.split(",") if name not in facts.machine.interfaces]
    if missing:
        there = f"there are {', '.join(facts.machine.interfaces)}"
        yield Line("fail", "GLOO_SOCKET_IFNAME", f"{wanted}: no such interface", f"say another: {there}")
    else:
        yield Line("ok", "GLOO_SOCKET_IFNAME", wanted)


def _launch(facts: Facts) -> Iterator[Line]:
    for status, what, text, do in launcher_lines(facts.launch, len(facts.gpus), facts.machine.cores):
        yield Line(status, what, text, do)


def _exchanges(facts: Facts) -> Iterator[Line]:
    versions = facts.versions
    for exchange in facts.exchanges:
        yield _exchange(exchange)
    tried = {exchange.backend for exchange in facts.exchanges}
    if not tried:
        yield Line("fail", "gloo", "this torch has no gloo", "install a torch built with it: ranks on CPUs need it")
    elif "nccl" not in tried:
        if versions.nccl is None:
            why = "this torch has none"
        else:
            why = f"{versions.nccl}, not tried: it needs two GPUs, and there {_are(len(facts.gpus))}"
        if len(facts.gpus) > 1 and versions.nccl is None:
            yield Line("warn", "nccl", why, "install a torch built with NCCL: without, GPUs talk through the host")
        else:
            yield Line("ok", "nccl", why)


def _exchange(exchange: Exchange) -> Line:
    between = "two processes" if exchange.ranks is None else f"ranks {exchange.ranks[0]} and {exchange.ranks[1]}"
    if exchange.error is not None or exchange.latency is None:
        do = {
            "gloo": "a firewall, or a wrong interface? Say GLOO_SOCKET_IFNAME=lo for one machine; for several, allow "
            "connections between them on all ports",
            "nccl": "NCCL_DEBUG=INFO shows how far it comes; NCCL_SOCKET_IFNAME and NCCL_P2P_DISABLE=1 are to try",
        }.get(exchange.backend, "start all processes, and let each reach MASTER_ADDR:MASTER_PORT")
        return Line("fail", exchange.backend, f"messages between {between}: {exchange.error}", do)
    bandwidth = "" if exchange.bandwidth is None else f", {exchange.bandwidth / 1e9:.2f} GB/s"
    text = f"{exchange.latency * 1e6:,.0f} µs{bandwidth} between {between}"
    if exchange.latency > 0.02 or (exchange.bandwidth is not None and exchange.bandwidth < 20e6):
        return Line("warn", exchange.backend, text, "messages are slow: is the machine busy, or the network slow?")
    return Line("ok", exchange.backend, text)


def _number(version: str) -> tuple[int, ...]:
    """3.11.4 and 2.13.0+cpu as numbers."""
    parts = version.partition("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)


def _cuda(version: str | None) -> str:
    return f"CUDA {version}" if version else "torch is built without CUDA"


def _size(number: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number = number / 1024  # type: ignore[assignment]
    return f"{number:.1f} GiB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _are(number: int) -> str:
    return "is 1" if number == 1 else f"are {number or 'none'}"
