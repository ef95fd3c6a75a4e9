"""Process groups of a grid of data, pipeline and model ranks; model ranks are adjacent."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = [
    *("destroy_model_parallel", "initialize_model_parallel", "model_parallel_is_initialized"),
    *("get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size"),
    *("get_model_parallel_group", "get_model_parallel_rank", "get_model_parallel_world_size"),
    *("get_model_parallel_src_rank", "get_pipeline_parallel_group", "get_pipeline_parallel_ranks"),
]

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
    world, rank = dist.get_world_size(), dist.get_rank()
    size = min(model_parallel_size_, world)
    assert world % (size * pipeline_length) == 0, f"{world} is not divisible by {size * pipeline_length}"
    grid = torch.arange(world).view(-1, pipeline_length, size)
    kinds = [("data", ddp_backend), ("pipeline", pipeline_backend), ("model", model_parallel_backend)]
    for axis, (kind, backend) in enumerate(kinds):
        for ranks in grid.movedim(axis, -1).flatten(0, 1).tolist():
            group = dist.new_group(ranks, backend=backend)
            if rank in ranks:
                _groups[kind] = group


def model_parallel_is_initialized() -> bool:
    return bool(_groups)


def destroy_model_parallel() -> None:
    _groups.clear()


def _group(kind: str) -> dist.ProcessGroup:
    assert kind in _groups, f"{kind} parallel group is not initialized"
    return _groups[kind]


def get_model_parallel_group() -> dist.ProcessGroup:
    return _group("model")


def get_data_parallel_group() -> dist.ProcessGroup:
    return _group("data")


def get_pipeline_parallel_group() -> dist.ProcessGroup:
    return _group("pipeline")


def get_pipeline_parallel_ranks() -> list[int]:
    return dist.get_process_group_ranks(_group("pipeline"))


def get_model_parallel_world_size() -> int:
    return _group("model").size()


def get_model_parallel_rank() -> int:
    return _group("model").rank()


def get_model_parallel_src_rank() -> int:
    """The first global rank of this process's model group."""
    return dist.get_process_group_ranks(_group("model"))[0]


def get_data_parallel_world_size() -> int:
    return _group("data").size()


def get_data_parallel_rank() -> int:
    return _group("data").rank()
