"""The world as a grid of data, pipeline and model ranks, the model's next to each other."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = [
    "destroy_model_parallel",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_pipeline_parallel_group",
    "get_pipeline_parallel_ranks",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
]

_groups: dict[str, dist.ProcessGroup] = {}  # of this process, by what they are for


def initialize_model_parallel(
    model_parallel_size_: int,
    pipeline_length: int = 1,
    *,
    model_parallel_backend: str | None = None,
    pipeline_backend: str | None = None,
    ddp_backend: str | None = None,
) -> None:
    """Make the groups of ``model_parallel_size_`` by ``pipeline_length`` processes, and of their replicas."""
    assert dist.is_initialized(), "torch.distributed is not initialized"
    assert not _groups, "model parallel groups are already initialized"
    world, rank = dist.get_world_size(), dist.get_rank()
    size = min(model_parallel_size_, world)
    assert world % (size * pipeline_length) == 0, f"{world} is not divisible by {size * pipeline_length}"
    grid = torch.arange(world).view(-1, pipeline_length, size)
    for axis, (what, backend) in enumerate(
        [("data", ddp_backend), ("pipeline", pipeline_backend), ("model", model_parallel_backend)]
    ):
        for ranks in grid.movedim(axis, -1).flatten(0, 1).tolist():  # every process makes every group
            group = dist.new_group(ranks, backend=backend)
            if rank in ranks:
                _groups[what] = group


def model_parallel_is_initialized() -> bool:
    return bool(_groups)


def destroy_model_parallel() -> None:
    """Forget the groups."""
    _groups.clear()


def _group(what: str) -> dist.ProcessGroup:
    assert what in _groups, f"{what} parallel group is not initialized"
    return _groups[what]


def get_model_parallel_group() -> dist.ProcessGroup:
    return _group("model")


def get_data_parallel_group() -> dist.ProcessGroup:
    return _group("data")


def get_pipeline_parallel_group() -> dist.ProcessGroup:
    return _group("pipeline")


def get_pipeline_parallel_ranks() -> list[int]:
    return dist.get_process_group_ranks(_group("pipeline"))


def get_model_parallel_world_size() -> int:
    return get_model_parallel_group().size()


def get_model_parallel_rank() -> int:
    return get_model_parallel_group().rank()


def get_model_parallel_src_rank() -> int:
    """The first rank, in the world, of this process's model group."""
    return dist.get_process_group_ranks(get_model_parallel_group())[0]


def get_data_parallel_world_size() -> int:
    return get_data_parallel_group().size()


def get_data_parallel_rank() -> int:
    return get_data_parallel_group().rank()
