"""The device of each rank of a pipeline that runs in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.errors import PlanError
from penstock.schedule.provider import ScheduleProvider
from penstock.split.plan import Plan

Devices = Sequence[torch.device | str | int] | torch.device | str | int | None


def named_devices(devices: Devices) -> list[torch.device] | None:
    """The list of devices; None without ``devices``, or with one device for all ranks."""
    if devices is None or isinstance(devices, (str, torch.device, int)):
        return None
    return [_parse_device(device) for device in devices]


def marked_devices(plan: Plan, source: ScheduleProvider) -> list[str] | None:
    """The device of each rank, if the plan has devices."""
    if plan.devices is None:
        return None
    device_of_rank: dict[int, str] = {}
    for stage, (rank, device) in enumerate(zip(source.placement, plan.devices, strict=True)):
        if device_of_rank.setdefault(rank, device) != device:
            raise PlanError(
                f"the plan puts stage {stage} on {device}, but the schedule gives it to rank {rank}, which has a stage "
                f"on {device_of_rank[rank]}: choose a schedule with one stage per rank, or say devices="
            )
    return [device_of_rank[rank] for rank in range(source.ranks)]


def assign_devices(devices: Devices, ranks: int) -> list[torch.device]:
    """One device per rank: the given list, the one given device, the GPUs in turn, or the CPU."""
    if devices is None:
        gpus = _gpus()
        return [torch.device("cuda", r % gpus) if gpus else torch.device("cpu") for r in range(ranks)]
    named = named_devices(devices)
    if named is None:
        assert isinstance(devices, (str, torch.device, int))
        named = [_parse_device(devices)] * ranks
    if len(named) < ranks:
        raise PlanError(
            f"too few devices: the pipeline has {ranks} ranks, but {len(named)} devices were given "
            f"({', '.join(map(str, named))}). Name a device several times to put several ranks on it, or choose a "
            "schedule that puts several stages on one rank, such as 'interleaved'"
        )
    for device in named[:ranks]:
        if device.type == "cuda" and (device.index or 0) >= _gpus():
            raise PlanError(f"device {device} is not there: this machine has {_gpus()} CUDA devices")
        if device.type not in ("cpu", "cuda"):
            raise PlanError(f"device {device} cannot run a stage: stages run on 'cpu' and on 'cuda' devices")
    return named[:ranks]


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _parse_device(device: torch.device | str | int) -> torch.device:
    """The device with an explicit index, so that equal devices compare equal."""
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise PlanError(f"{device!r} is not a device: {str(error).splitlines()[0]}") from error
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else found
