"""Groups of ranks that talk, made straight from torch's backends under names of our own.

``torch.distributed.new_group`` wants every rank of the world to take part, or names a group after its members, so
that a second pipeline over the same ranks would meet what the first one left in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from penstock.engine.channel.sever import Lines

__all__ = ["Group", "open_group", "speaks_nccl"]

Group = Any  # a backend: ProcessGroupGloo or ProcessGroupNCCL


def speaks_nccl(device: torch.device) -> bool:
    """Whether ranks on such devices talk through NCCL: between GPUs, where the world uses it."""
    return device.type == "cuda" and dist.is_nccl_available() and "nccl" in dist.get_backend()


def open_group(lines: Lines, name: str, ranks: Sequence[int], rank: int, device: torch.device) -> Group:
    """The group of ``ranks`` as seen by ``rank``, one of them: NCCL where ``device`` speaks it, else gloo.

    All groups of gloo use the device of ``lines``, whose one thread moves their bytes: by default each has its own.
    """
    place = PrefixStore(name, lines.store)
    me = list(ranks).index(rank)
    if speaks_nccl(device):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = lines.timeout
        group = dist.ProcessGroupNCCL(place, me, len(ranks), options)
        lines.nccl.append(group)
        return group
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [lines.device]
    options._timeout = lines.timeout
    options._threads = 1
    return dist.ProcessGroupGloo(place, me, len(ranks), options)
