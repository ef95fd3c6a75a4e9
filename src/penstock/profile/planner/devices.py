"""What ``ps.plan`` is told: the devices, how fast they are and how much memory they have; and numbers, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch

from penstock.errors import PlanError
from penstock.format import parse_bytes
from penstock.train.devices import assign_devices

__all__ = ["check_numbers", "device_memory", "device_names", "one_for_each"]


def check_numbers(asked: Mapping[str, Any]) -> None:
    """The numbers among what was asked for, by their names; None is what was left out."""
    for what in ("batch", "devices", "microbatches"):
        number = asked.get(what)
        if number is not None and (type(number) is not int or number < 1):
            raise PlanError(f"{what}={number!r} must be a whole number, from 1 up")
    seconds, seed = asked["seconds"], asked["seed"]
    if not isinstance(seconds, (int, float)) or not 0 < seconds < inf:
        raise PlanError(f"seconds={seconds!r}: expected how long to search, above 0")
    if type(seed) is not int:
        raise PlanError(f"seed={seed!r} must be a whole number")


def device_names(devices: Any) -> list[str]:
    """The names of the devices: those that were named, or so many GPUs, or as often the CPU."""
    gpus = torch.cuda.device_count()
    if devices is None:
        if gpus == 0:
            raise PlanError("say devices=, how many ranks there may be, or which devices: there is no GPU here")
        return [f"cuda:{i}" for i in range(gpus)]
    if type(devices) is int:
        if devices < 1:
            raise PlanError(f"devices={devices} must be at least 1")
        return [f"cuda:{i}" for i in range(devices)] if gpus >= devices else ["cpu"] * devices
    if not isinstance(devices, (list, tuple)):
        raise PlanError(
            f"devices={devices!r} must be how many ranks there may be, or a list of devices: "
            "one that is to have several ranks is named several times"
        )
    if not devices:
        raise PlanError("devices has none: say how many ranks there may be, or which devices")
    return [str(device) for device in assign_devices(devices, len(devices))]


def device_memory(memory: Any, places: Sequence[str]) -> list[float]:
    """The bytes that each of these devices has: as it was said, or what a GPU has, and without a limit on a CPU."""
    if memory is None:
        return [_has(torch.device(place)) for place in places]
    each = memory if isinstance(memory, (list, tuple)) else [memory] * len(places)
    return [float(parse_bytes(size)) for size in each]


def one_for_each(what: str, given: Any, devices: int) -> tuple[float, ...]:
    """Numbers above 0, one for each device."""
    numbers = (given,) * devices if isinstance(given, (int, float)) and what == "memory" else given
    if not isinstance(numbers, (list, tuple)):
        raise PlanError(f"{what}={given!r} must be a list of numbers, one for each device")
    if len(numbers) != devices:
        raise PlanError(f"{what} has {len(numbers)} numbers, but there are {devices} devices: give one for each")
    for number in numbers:
        if not isinstance(number, (int, float)) or isinstance(number, bool) or not number > 0:
            raise PlanError(f"{what} must be numbers above 0, got {list(numbers)}")
        if what == "speeds" and number == inf:
            raise PlanError(f"{what} must be numbers above 0, got {list(numbers)}: no device is as fast as that")
    return tuple(map(float, numbers))


def _has(device: torch.device) -> float:
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else inf
