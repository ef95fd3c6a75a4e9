"""Groups of ranks that talk, made straight from torch's backends under names of our own.

``torch.distributed.new_group`` wants every rank of the world to take part, or names a group after its members, so
that a second pipeline over the same ranks would meet what the first one left in the store.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

__all__ = ["Group", "open_group", "speaks_nccl"]

Group = Any  # a backend: ProcessGroupGloo or ProcessGroupNCCL

TIMEOUT = timedelta(minutes=30)


def speaks_nccl(device: torch.device) -> bool:
    """Whether ranks on such devices talk through NCCL: between GPUs, where the world uses it."""
    return device.type == "cuda" and dist.is_nccl_available() and "nccl" in dist.get_backend()


def open_group(store: Any, name: str, ranks: Sequence[int], rank: int, device: torch.device) -> Group:
    """The group of ``ranks`` as seen by ``rank``, one of them: NCCL where ``device`` speaks it, else gloo."""
    place = PrefixStore(name, store)
    me = list(ranks).index(rank)
    if speaks_nccl(device):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        return dist.ProcessGroupNCCL(place, me, len(ranks), options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [_gloo_device()]
    options._timeout = TIMEOUT
    options._threads = 1
    return dist.ProcessGroupGloo(place, me, len(ranks), options)


@functools.cache
def _gloo_device() -> Any:
    """One thread moves the bytes of all groups of this process: by default every group has its own."""
    return dist.ProcessGroupGloo.create_default_device()
