"""What is to be known of a machine and of how a program was started on it. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Exchange", "Facts", "Gpu", "Launch", "Machine", "Network", "Versions"]


@dataclass(frozen=True)
class Versions:
    """Of what is installed; None is what is not. ``cuda`` and ``nccl`` are those that torch was built with."""

    penstock: str
    python: str
    torch: str
    cuda: str | None = None
    nccl: str | None = None
    transformers: str | None = None
    rich: str | None = None


@dataclass(frozen=True)
class Machine:
    """Sizes are bytes; None is what the system does not say, and a limit of None is none."""

    cpus: int
    cores: int  # that this process may use
    threads: int  # that torch uses for an operator
    memory: int | None = None
    memory_free: int | None = None
    shm_free: int | None = None
    open_files: int | None = None
    locked_memory: int | None = None
    infiniband: bool = False
    driver: bool = False  # of NVIDIA GPUs
    interfaces: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """One device, whether this torch has code for it, and what it said when it was given something to do."""

    name: str
    memory: int
    capability: tuple[int, int]
    supported: bool
    memory_free: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Exchange:
    """Messages between two processes: seconds of a small one, bytes per second of large ones, or why there are none.

    ``ranks`` are those of a launcher; None is two processes that were started to try it. A bandwidth of None was too
    large to be measured.
    """

    backend: str
    ranks: tuple[int, int] | None = None
    latency: float | None = None
    bandwidth: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Network:
    """This machine's name, the addresses it stands for, and the seconds that questions for a peer's name took."""

    host: str
    addresses: tuple[str, ...] = ()
    error: str | None = None
    reverse: tuple[float, ...] = ()


@dataclass(frozen=True)
class Launch:
    """What a launcher has said: its variables, and the addresses of the machine at which the processes meet."""

    variables: Mapping[str, str] = field(default_factory=dict)
    master: tuple[str, ...] = ()
    error: str | None = None  # of looking it up


@dataclass(frozen=True)
class Facts:
    """All of it. ``peers`` are the pairs of GPUs that can read each other's memory."""

    versions: Versions
    machine: Machine
    network: Network
    launch: Launch = Launch()
    gpus: tuple[Gpu, ...] = ()
    peers: tuple[tuple[int, int], ...] = ()
    exchanges: tuple[Exchange, ...] = ()
