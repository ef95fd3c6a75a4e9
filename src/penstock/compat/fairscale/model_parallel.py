"""Process groups of a grid of data, pipeline and model ranks; model ranks are adjacent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

_groups: dict[str, dist.ProcessGroup] = {}  # this process's group of each kind


def initialize_model_parallel(
    model_parallel_size_: int,
    pipeline_length: int = 1,
    *,
    model_parallel_backend: str | None = None,
    pipeline_backend: str | None = None,
    ddp_backend: str | None = None,
) -> None:
    """Create the model, pipeline and data groups. Every process calls it."""
    assert dist.is_initialized(), "torch.distributed is not initialized"
    assert not _groups, "model parallel groups are already initialized"
    world = dist.get_world_size()
    size = min(model_parallel_size_, world)
    assert world % (size * pipeline_length) == 0, f"{world} is not divisible by {size * pipeline_length}"
    grid = torch.arange(world).view(-1, pipeline_length, size)
    kinds = [("data", ddp_backend), ("pipeline", pipeline_backend), ("model", model_parallel_backend)]
    for axis, (kind, backend) in enumerate(kinds):
        ranks = grid.movedim(axis, -1).flatten(0, 1).tolist()
        _groups[kind], _ = dist.new_subgroups_by_enumeration(ranks, backend=backend)  # type: ignore[no-untyped-call]


def parallel_group(kind: str) -> dist.ProcessGroup:
    assert kind in _groups, f"{kind} parallel group is not initialized"
    return _groups[kind]


def _ranks(kind: str) -> list[int]:
    return dist.get_process_group_ranks(parallel_group(kind))


NAMES: dict[str, Callable[..., Any]] = {
    "initialize_model_parallel": initialize_model_parallel,
    "model_parallel_is_initialized": lambda: bool(_groups),
    "destroy_model_parallel": _groups.clear,
    "get_pipeline_parallel_group": partial(parallel_group, "pipeline"),
    "get_pipeline_parallel_ranks": partial(_ranks, "pipeline"),
    "get_data_parallel_group": partial(parallel_group, "data"),
    "get_data_parallel_rank": lambda: parallel_group("data").rank(),
    "get_data_parallel_world_size": lambda: parallel_group("data").size(),
    "get_model_parallel_group": partial(parallel_group, "model"),
    "get_model_parallel_rank": lambda: parallel_group("model").rank(),
    "get_model_parallel_world_size": lambda: parallel_group("model").size(),
    "get_model_parallel_src_rank": lambda: _ranks("model")[0],
}
"""The functions of ``fairscale.nn.model_parallel``; the source rank is the first one of this process's model group."""
