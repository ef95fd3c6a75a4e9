"""The configurations to choose from: how a mini-batch can be trained on a number of devices. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from penstock.errors import PlanError
from penstock.profile.costs import Link
from penstock.profile.planner.segments import Cuts
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Schedule


@dataclass(frozen=True)
class Cluster:
    """Relative speed and memory of the devices, in the order in which ranks use them: replica by replica."""

    speed: tuple[float, ...]
    memory: tuple[float, ...]
    link: Link | None = None  # between replicas; None: as between the ranks of a pipeline

    @classmethod
    def uniform(cls, devices: int, memory: float = inf, link: Link | None = None) -> Cluster:
        return cls((1.0,) * devices, (memory,) * devices, link)

    def __len__(self) -> int:
        return len(self.speed)

    def fastest(self, count: int) -> list[int]:
        """The devices that ``count`` ranks use, in order: the fastest, and among equal ones those with most memory."""
        best = sorted(range(len(self)), key=lambda device: (-self.speed[device], -self.memory[device], device))
        return sorted(best[:count])


@dataclass(frozen=True)
class Configuration:
    """The number of replicas, ranks and stages per rank, and the division of the mini-batch."""

    data: int
    pipe: int
    shape: str  # "straight", "loop" or "v"
    v: int  # stages per rank
    samples: int  # of a micro-batch
    microbatches: int  # of each replica
    recompute: bool | None = False  # all stages, none, or (None) as few as the memory requires
    tensor: int = 1  # devices that share each layer: a rank is a group of them

    def __str__(self) -> str:
        stages = {"straight": "", "loop": f" × {self.v} looped", "v": " × 2 on a V"}[self.shape]
        parts = [f"{self.data} × " if self.data > 1 else "", f"{self.pipe} rank{'s' * (self.pipe > 1)}{stages}"]
        parts.append(f", {self.microbatches} micro-batch{'es' * (self.microbatches > 1)} of {self.samples}")
        if self.tensor > 1:
            parts.append(f", {self.tensor} devices each")
        return "".join(parts) + (", recomputed" if self.recompute else "")


@dataclass(frozen=True)
class Candidate:
    """A configuration with its cuts, its schedule, and the predicted time and memory of a step."""

    configuration: Configuration
    cuts: Cuts
    schedule: Schedule
    seconds: float  # of a step
    lower_bound: float  # no order of these stages is faster
    memory: tuple[float, ...]  # peak bytes of each rank
    bubble: float
    costs: Costs | None = None  # of its stages and edges
    saved: tuple[float, ...] | None = None  # peak bytes saved for backwards; None where activations are recomputed

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The stages with recomputed forwards."""
        return tuple(sorted({a.stage for order in self.schedule.orders for a in order if a.kind == "R"}))

    @property
    def gap(self) -> float:
        """Relative distance from the lower bound."""
        return self.seconds / self.lower_bound - 1 if self.lower_bound else 0.0


@dataclass(frozen=True)
class Rejection:
    """A configuration that was not chosen, and the reason."""

    configuration: Configuration
    reason: str
    seconds: float | None = None
    memory: float | None = None


def configurations(
    batch: int,
    grids: Iterable[tuple[int, int]],
    layers: int,
    *,
    microbatches: int | None = None,
    largest: int | None = None,
    recompute: bool | None = False,
    tensor: int = 1,
) -> list[Configuration]:
    """All candidates for these ``grids`` (replicas, ranks); ``largest`` is the largest micro-batch in samples."""
    found = []
    for data, pipe in grids:
        if pipe > layers or data > batch:
            continue
        share = -(-batch // data)
        for count in _microbatch_counts(share, microbatches, largest):
            for shape, v in (("straight", 1), ("v", 2), ("loop", 2), ("loop", 3), ("loop", 4)):
                if pipe * v <= layers and (pipe > 1 or v == 1):
                    found.append(Configuration(data, pipe, shape, v, -(-share // count), count, recompute, tensor))
    return found


def device_grids(devices: int) -> list[tuple[int, int]]:
    """All pairs (replicas, ranks) that use all devices."""
    return [(n, devices // n) for n in range(1, devices + 1) if devices % n == 0]


def _microbatch_counts(share: int, microbatches: int | None, largest: int | None) -> list[int]:
    """Numbers of micro-batches, ascending: micro-batches of the whole share, half of it, a quarter, and so on."""
    if microbatches is not None:
        return [min(share, microbatches)]
    sizes, size = [share], share
    while size > 1:
        size = -(-size // 2)
        sizes.append(size)
    return [-(-share // size) for size in sizes if largest is None or size <= largest] or [share]


def check_options(options: Mapping[str, Any]) -> None:
    """Check the numbers among the options of the planner; None means that an option was not given."""
    for name in ("batch", "devices", "microbatches"):
        number = options.get(name)
        if number is not None and (type(number) is not int or number < 1):
            raise PlanError(f"{name}={number!r} must be a whole number, from 1 up")
    seconds, seed = options["seconds"], options["seed"]
    if not isinstance(seconds, (int, float)) or not 0 < seconds < inf:
        raise PlanError(f"seconds={seconds!r}: expected how long to search, above 0")
    if type(seed) is not int:
        raise PlanError(f"seed={seed!r} must be a whole number")
