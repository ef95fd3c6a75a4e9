"""How a process joins the others: the backend, the device and the threads that it works with."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from penstock.errors import PlanError

__all__ = ["device_of_process", "init", "started"]


def started() -> bool:
    """Whether this process has joined a process group."""
    return dist.is_initialized()


def init(device: torch.device | str | None = None) -> torch.device:
    """Join the process group that the variables of ``torchrun`` describe; the device that this process is to use."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise PlanError(
            f"a mesh needs several processes: {', '.join(missing)} not set. Start the program with "
            "'torchrun --nproc-per-node=4 train.py', or leave out mesh= to use threads in this process"
        )
    # NCCL wants a GPU for each process; processes that share one talk through the host.
    alone = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    dist.init_process_group("nccl" if alone and torch.device(device or "cuda").type == "cuda" else "gloo")
    return device_of_process(device, True)


def device_of_process(device: torch.device | str | None, made: bool) -> torch.device:
    """The device that was asked for, or this process's own; ``made``: the group was started by us, for the GPU."""
    if device is not None:
        return torch.device(device)
    # Who started gloo alone means the CPU.
    if not torch.cuda.is_available() or not (made or "nccl" in dist.get_backend()):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank())) % torch.cuda.device_count())
