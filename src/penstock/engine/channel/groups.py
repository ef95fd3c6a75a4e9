"""Groups of ranks that talk, made straight from torch's backends under names of our own.

``torch.distributed.new_group`` wants every rank of the world to take part, or names a group after its members, so
that a second pipeline over the same ranks would meet what the first one left in the store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from penstock._torch import gloo_options
from penstock.engine.failure.sockets import PipelineSockets

__all__ = ["Group", "open_group", "uses_nccl"]

_NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}

Group = Any  # a backend: ProcessGroupGloo or ProcessGroupNCCL


def uses_nccl(device: torch.device) -> bool:
    """Whether ranks on such devices talk through NCCL: between GPUs, where the world uses it."""
    return device.type == "cuda" and dist.is_nccl_available() and "nccl" in dist.get_backend()


def open_group(lines: PipelineSockets, name: str, ranks: Sequence[int], rank: int, device: torch.device) -> Group:
    """The group of ``ranks`` as seen by ``rank``, one of them: NCCL where ``device`` speaks it, else gloo.

    All groups of gloo use the device of ``lines``, whose one thread moves their bytes: by default each has its own.
    """
    place = PrefixStore(name, lines.store)
    me = list(ranks).index(rank)
    if uses_nccl(device):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = lines.timeout
        with _nccl_without_error_handling():
            group = dist.ProcessGroupNCCL(place, me, len(ranks), options)
        lines.nccl.append(group)
        return group
    options = gloo_options()
    options._devices = [lines.device]
    options._timeout = lines.timeout
    options._threads = 1
    return dist.ProcessGroupGloo(place, me, len(ranks), options)


@contextmanager
def _nccl_without_error_handling() -> Iterator[None]:
    """While a group of NCCL is made: what it reads from the environment then.

    By default a group whose peer is gone waits a minute for a dump, and ends its process. Here the watch sees to
    it that all ranks raise the cause, and programs may catch that.
    """
    before = {name: os.environ.get(name) for name in _NCCL_ENVIRONMENT}
    os.environ.update(_NCCL_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
