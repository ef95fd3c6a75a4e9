"""Process groups of a pipeline, made directly from torch's backends.

``torch.distributed.new_group`` needs every rank of the world to take part, or names a group after its members, so that
a second pipeline over the same ranks would find the keys of the first one in the store.
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

_NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}

Group = Any  # a backend: ProcessGroupGloo or ProcessGroupNCCL


def uses_nccl(device: torch.device) -> bool:
    """Whether ranks on such a device communicate by NCCL: GPUs, if the default group has an NCCL backend."""
    return device.type == "cuda" and dist.is_nccl_available() and "nccl" in dist.get_backend()


def open_group(sockets: PipelineSockets, name: str, ranks: Sequence[int], rank: int, device: torch.device) -> Group:
    """Connect the group of ``ranks``, of which this process is ``rank``: over NCCL if ``device`` uses it, else gloo.

    All gloo groups use the device of ``sockets``, and so share its one thread. By default each group has its own.
    """
    store = PrefixStore(name, sockets.store)
    index = list(ranks).index(rank)
    if uses_nccl(device):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = sockets.timeout
        with _nccl_without_error_handling():
            group = dist.ProcessGroupNCCL(store, index, len(ranks), options)
        sockets.nccl.append(group)
        return group
    options = gloo_options()
    options._devices = [sockets.device]
    options._timeout = sockets.timeout
    options._threads = 1
    return dist.ProcessGroupGloo(store, index, len(ranks), options)


@contextmanager
def _nccl_without_error_handling() -> Iterator[None]:
    """Set the environment variables that a new NCCL group reads, so that it leaves failures to the watch.

    By default a group whose peer is gone waits a minute for a dump, and then ends its process. The watch instead makes
    all ranks raise the cause, which programs may catch.
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
