"""Joining the other processes, as SLURM or torchrun has started them."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from penstock.train.launch import init, is_initialized

__all__ = ["setup_distributed"]


def setup_distributed(backend: str = "nccl", port: int | None = None) -> tuple[int, int, str | None, str | None]:
    """Make the process group: this rank, how many there are, and the port and address where they met.

    Where there are no GPUs, or not one for each process, ``"nccl"`` is gloo. ``port`` is for SLURM: torchrun has one.
    With ``"gloo"`` stages are on the CPU, unless ``tpc.device`` is set.
    """
    if port is not None and not is_initialized():
        os.environ.setdefault("MASTER_PORT", str(port))
    device = None if torch.cuda.is_available() and backend != "gloo" else "cpu"
    init(device, backend=None if backend == "nccl" else backend)
    met = os.environ.get("MASTER_PORT"), os.environ.get("MASTER_ADDR")
    return dist.get_rank(), dist.get_world_size(), *met
