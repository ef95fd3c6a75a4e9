"""Devices that need not be here: what their makers say of them, and how much of that is to be had.

Peaks are of dense matrix products in half precision, links of one direction and of one device. The makers' numbers are
from the public data sheets named beside them; ``efficiency`` and the shares below are assumptions, to be replaced by
whoever knows better: ``replace(hardware_of("h100"), efficiency=0.7)``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from penstock.errors import PlanError
from penstock.near import did_you_mean
from penstock.profile.costs import Link, check_number

__all__ = ["HARDWARE", "Hardware", "hardware_of"]

TERA, GIGA, GIB = 1e12, 1e9, float(1 << 30)


@dataclass(frozen=True)
class Hardware:
    """One device, and what connects it with others."""

    name: str
    flops: float  # the peak, in half precision, per second
    memory: float  # bytes
    memory_bandwidth: float  # bytes per second
    inside: float  # bytes per second to another device of the same machine
    outside: float  # bytes per second to a device of another machine
    per_machine: int = 8
    efficiency: float = 0.65  # what large matrix products reach of the peak
    memory_share: float = 0.8  # what operations that wait for memory reach of its bandwidth
    link_share: float = 0.8  # what messages of some megabytes reach of a link
    inside_latency: float = 5e-6
    outside_latency: float = 10e-6

    def __post_init__(self) -> None:
        for one in fields(self)[1:]:
            value = getattr(self, one.name)
            check_number(value, f"hardware {self.name!r}: {one.name}")
            if value == 0 and not one.name.endswith("latency"):
                raise PlanError(f"hardware {self.name!r}: {one.name} is 0, and nothing would ever be done")
            if value > 1 and one.name in ("efficiency", "memory_share", "link_share"):
                raise PlanError(f"hardware {self.name!r}: {one.name} is {value}, but it is a share, up to 1")

    def link(self, devices: int) -> Link:
        """The slowest link among neighbours of so many devices: inside of a machine, or out of it."""
        if devices <= self.per_machine:
            return Link(self.inside_latency, self.inside * self.link_share)
        return Link(self.outside_latency, self.outside * self.link_share)

    def compute(self, flops: float) -> float:
        """The seconds of large matrix products."""
        return flops / (self.flops * self.efficiency)

    def move(self, size: float) -> float:
        """The seconds in which so many bytes are read or written."""
        return size / (self.memory_bandwidth * self.memory_share)

    def all_reduce(self, size: float, devices: int) -> float:
        """The seconds in which ``devices`` sum up ``size`` bytes around a ring; half of it is a gather or a scatter."""
        if devices == 1:
            return 0.0
        link = self.link(devices)
        return link.latency + 2 * (devices - 1) / devices * size / link.bandwidth


HARDWARE = {
    one.name: one
    for one in (
        # NVIDIA V100 data sheet: 125 TFLOP/s, 32 GB, 900 GB/s, NVLink 300 GB/s both ways. DGX-1: four links of
        # 100 Gb/s for eight.
        Hardware("v100", 125 * TERA, 32 * GIB, 900 * GIGA, 150 * GIGA, 6.25 * GIGA, efficiency=0.7),
        # NVIDIA A100 data sheet: 312 TFLOP/s, NVLink 600 GB/s both ways; 80 GB: 2,039 GB/s, 40 GB: 1,555 GB/s.
        # DGX A100: a link of 200 Gb/s for each.
        Hardware("a100", 312 * TERA, 80 * GIB, 2039 * GIGA, 300 * GIGA, 25 * GIGA, efficiency=0.7),
        Hardware("a100-40gb", 312 * TERA, 40 * GIB, 1555 * GIGA, 300 * GIGA, 25 * GIGA, efficiency=0.7),
        # NVIDIA H100 data sheet (SXM): 1,979 TFLOP/s with sparsity, half of it without, 80 GB, 3.35 TB/s, NVLink
        # 900 GB/s both ways. DGX H100: a link of 400 Gb/s for each.
        Hardware("h100", 989.5 * TERA, 80 * GIB, 3350 * GIGA, 450 * GIGA, 50 * GIGA),
        # NVIDIA H200 data sheet: the H100's but for its memory, 141 GB at 4.8 TB/s.
        Hardware("h200", 989.5 * TERA, 141 * GIGA, 4800 * GIGA, 450 * GIGA, 50 * GIGA),
        # NVIDIA DGX B200 data sheet, an eighth: 36 PFLOP/s in FP8 without sparsity, half of it in half precision,
        # 1,440 GB, 64 TB/s, NVLink 14.4 TB/s both ways, links of 400 Gb/s.
        Hardware("b200", 2250 * TERA, 180 * GIGA, 8000 * GIGA, 900 * GIGA, 50 * GIGA),
        # NVIDIA L40S data sheet: 362 TFLOP/s, 48 GB, 864 GB/s, no NVLink: PCIe 4.0 x16, 64 GB/s both ways. A link of
        # 200 Gb/s for each two is an assumption.
        Hardware("l40s", 362 * TERA, 48 * GIGA, 864 * GIGA, 32 * GIGA, 12.5 * GIGA, efficiency=0.6),
        # No data sheet: a server with some 32 cores and eight channels of DDR5, all of it an assumption.
        Hardware("cpu", 4 * TERA, 256 * GIB, 300 * GIGA, 20 * GIGA, 12.5 * GIGA, per_machine=2, efficiency=0.5),
    )
}


def hardware_of(name: str | Hardware) -> Hardware:
    """Hardware by its name."""
    if isinstance(name, Hardware):
        return name
    key = str(name).lower()
    if key not in HARDWARE:
        hint = did_you_mean(key, HARDWARE, otherwise=f": known are {', '.join(HARDWARE)}")
        raise PlanError(f"hardware {name!r} is not known{hint}")
    return HARDWARE[key]
