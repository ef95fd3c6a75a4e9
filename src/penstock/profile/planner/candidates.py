"""The ways in which a mini-batch can be trained on so many devices, and what each takes. Plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from penstock.profile.costs import Link
from penstock.profile.planner.segments import Cuts
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Schedule

__all__ = ["Candidate", "Cluster", "Configuration", "Rejection", "configurations", "device_grids"]


@dataclass(frozen=True)
class Cluster:
    """The devices, in the order in which ranks take them: replica by replica."""

    speed: tuple[float, ...]
    memory: tuple[float, ...]
    link: Link | None = None  # between replicas; None: as between the ranks of a pipeline

    @classmethod
    def alike(cls, devices: int, memory: float = inf, link: Link | None = None) -> Cluster:
        return cls((1.0,) * devices, (memory,) * devices, link)

    def __len__(self) -> int:
        return len(self.speed)

    def chosen(self, count: int) -> list[int]:
        """The devices that so many ranks take, in their order: the fastest, and of those alike the ones with most."""
        best = sorted(range(len(self)), key=lambda one: (-self.speed[one], -self.memory[one], one))
        return sorted(best[:count])


@dataclass(frozen=True)
class Configuration:
    """How many replicas, ranks and stages a rank there are, and how the mini-batch is cut."""

    data: int
    pipe: int
    shape: str  # "straight", "loop" or "v"
    v: int
    samples: int  # of a micro-batch
    microbatches: int  # of each replica
    recompute: bool | None = False  # all stages, none, or (None) those that need it for the memory
    tensor: int = 1  # devices that share each layer: a rank is a group of so many

    def __str__(self) -> str:
        stages = {"straight": "", "loop": f" × {self.v} looped", "v": " × 2 on a V"}[self.shape]
        parts = [f"{self.data} × " if self.data > 1 else "", f"{self.pipe} rank{'s' * (self.pipe > 1)}{stages}"]
        parts.append(f", {self.microbatches} micro-batch{'es' * (self.microbatches > 1)} of {self.samples}")
        if self.tensor > 1:
            parts.append(f", {self.tensor} devices each")
        return "".join(parts) + (", recomputed" if self.recompute else "")


@dataclass(frozen=True)
class Candidate:
    """A way, thought through: its cuts, its order, and what it will take."""

    way: Configuration
    cuts: Cuts
    schedule: Schedule
    seconds: float  # of a step
    floor: float  # no order of these stages takes less
    memory: tuple[float, ...]  # of each rank at its peak
    bubble: float
    costs: Costs | None = None  # of its stages and edges
    saved: tuple[float, ...] | None = None  # what is saved by forwards; None where activations are recomputed

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The stages whose forwards are run again."""
        return tuple(sorted({a.stage for order in self.schedule.orders for a in order if a.kind == "R"}))

    @property
    def gap(self) -> float:
        """How far above the floor."""
        return self.seconds / self.floor - 1 if self.floor else 0.0


@dataclass(frozen=True)
class Rejection:
    """A way that was not chosen, and why."""

    way: Configuration
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
    """All ways worth a look. ``grids``: numbers of replicas and of ranks; ``largest``: samples of a micro-batch."""
    found = []
    for data, pipe in grids:
        if pipe > layers or data > batch:
            continue
        share = -(-batch // data)
        for count in _counts(share, microbatches, largest):
            for shape, v in (("straight", 1), ("v", 2), ("loop", 2), ("loop", 3), ("loop", 4)):
                if pipe * v <= layers and (pipe > 1 or v == 1):
                    found.append(Configuration(data, pipe, shape, v, -(-share // count), count, recompute, tensor))
    return found


def device_grids(devices: int) -> list[tuple[int, int]]:
    """All numbers of replicas and ranks that use all devices."""
    return [(n, devices // n) for n in range(1, devices + 1) if devices % n == 0]


def _counts(share: int, microbatches: int | None, largest: int | None) -> list[int]:
    """Numbers of micro-batches, from few to many: of a whole share, its half, a quarter, and so on."""
    if microbatches is not None:
        return [min(share, microbatches)]
    sizes, size = [share], share
    while size > 1:
        size = -(-size // 2)
        sizes.append(size)
    return [-(-share // size) for size in sizes if largest is None or size <= largest] or [share]
