"""Which device each rank of a pipeline in this process uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.errors import PlanError

__all__ = ["check_devices"]


def check_devices(devices: Sequence[torch.device | str | int] | None, ranks: int) -> list[torch.device]:
    """One device per rank: those given, or the GPUs there are in turn, or the CPU."""
    if devices is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [torch.device("cuda", r % gpus) if gpus else torch.device("cpu") for r in range(ranks)]
    if isinstance(devices, (str, torch.device, int)):
        raise PlanError(f"devices must be a list, one for each rank, got {devices!r}: write [{devices!r}] * {ranks}")
    found = [torch.device("cuda", d) if isinstance(d, int) else torch.device(d) for d in devices]
    if len(found) < ranks:
        raise PlanError(
            f"too few devices: the pipeline has {ranks} ranks, but {len(found)} devices were given "
            f"({', '.join(map(str, found))}). Name a device several times to put several ranks on it"
        )
    found = [torch.device("cuda", d.index or 0) if d.type == "cuda" else d for d in found[:ranks]]
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in found:
        if device.type == "cuda" and device.index >= available:
            raise PlanError(f"device {device} is not there: this machine has {available} CUDA devices")
    return found
