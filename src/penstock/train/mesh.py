"""The processes of a training run, and this one's place among them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from penstock.errors import PlanError

__all__ = ["Mesh"]


class Mesh:
    """``Mesh(pipe=4)``: four processes, one per rank of the pipeline.

    Uses the process group that there is, or starts one from the variables that ``torchrun`` sets. ``pipe=-1``
    takes as many ranks as there are processes.
    """

    def __init__(self, *, pipe: int = -1, device: torch.device | str | None = None) -> None:
        made = _ensure_group(device)
        world = dist.get_world_size()
        if pipe == -1:
            pipe = world
        if pipe < 1 or pipe != world:
            raise PlanError(f"Mesh(pipe={pipe}) needs {pipe} processes, but the world has {world}")
        self.pipe = pipe
        self.pipe_rank = dist.get_rank()
        self.ranks: Sequence[int] = tuple(range(world))  # of the pipeline, in the world
        self.device = _device(device, made)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def is_first(self) -> bool:
        return self.pipe_rank == 0

    @property
    def is_last(self) -> bool:
        return self.pipe_rank == self.pipe - 1

    def __repr__(self) -> str:
        return f"Mesh(pipe={self.pipe}), rank {self.pipe_rank} on {self.device}"


def _ensure_group(device: torch.device | str | None) -> bool:
    """Start the process group, unless there is one: whether it was started here."""
    if dist.is_initialized():
        return False
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise PlanError(
            f"a mesh needs several processes: {', '.join(missing)} not set. Start the program with "
            "'torchrun --nproc-per-node=4 train.py', or leave out mesh= to use threads in this process"
        )
    # NCCL wants a GPU for each process; processes that share one talk through the host.
    alone = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    dist.init_process_group("nccl" if alone and torch.device(device or "cuda").type == "cuda" else "gloo")
    return True


def _device(device: torch.device | str | None, made: bool) -> torch.device:
    if device is not None:
        return torch.device(device)
    # Who started gloo alone means the CPU.
    if not torch.cuda.is_available() or not (made or "nccl" in dist.get_backend()):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank())) % torch.cuda.device_count())
