"""Arguments of Varuna programs: which ranks run which stage, devices, sizes.

``stage_to_rank_map="0,2;1,3;"`` has two stages: the first on ranks 0 and 2, the second on 1 and 3. The n-th ranks of
all stages form the n-th pipeline: 0 → 1 and 2 → 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import penstock as ps

__all__ = ["StageToRankMap", "get_this_rank_config_varuna", "get_varuna_config", "parse_stage_to_rank_map"]

StageToRankMap = str | Sequence[Sequence[int]] | Mapping[int, Sequence[int]]
"""Text, or the ranks of each stage in a list or dict."""


def parse_stage_to_rank_map(stage_to_rank_map: StageToRankMap) -> dict[int, list[int]]:
    """The ranks of each stage in order: equally many for each, and each rank once."""
    given = stage_to_rank_map
    try:
        stages: Any = given.strip().rstrip(";").split(";") if isinstance(given, str) else given
        stages = [stages[stage] for stage in range(len(stages))]  # of a dict, too
        rows = [[int(rank) for rank in (stage.split(",") if isinstance(stage, str) else stage)] for stage in stages]
    except (KeyError, TypeError, ValueError):
        raise ps.PlanError(
            f"stage_to_rank_map says which ranks run each stage, as in '0,2;1,3;', got {given!r}"
        ) from None
    counts, ranks = [len(row) for row in rows], [rank for row in rows for rank in row]
    if not ranks or len(set(counts)) > 1:
        raise ps.PlanError(f"every stage must have equally many ranks, but {given!r} has {counts}")
    if len(set(ranks)) < len(ranks) or min(ranks) < 0:
        raise ps.PlanError(f"every rank has one stage, and is a number from 0 on: {given!r}")
    return dict(enumerate(rows))


def get_varuna_config(stage_to_rank_map: StageToRankMap) -> tuple[int, int]:
    """The number of stages and of replicas."""
    stages = parse_stage_to_rank_map(stage_to_rank_map)
    return len(stages), len(stages[0])


def get_this_rank_config_varuna(stage_to_rank_map: StageToRankMap, rank: int) -> tuple[int, int]:
    """The stage of a rank and the number of its replica."""
    for stage, ranks in parse_stage_to_rank_map(stage_to_rank_map).items():
        if rank in ranks:
            return stage, ranks.index(rank)
    raise RuntimeError(f"rank {rank} is not in stage_to_rank_map {stage_to_rank_map!r}: only its ranks run a stage")


def positive(name: str, number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ps.PlanError(f"{name} must be a whole number of samples from 1, got {number!r}")
    return number


def check_model(model: Any, fp16: bool) -> None:
    """Check that the model is on the CPU and, for ``fp16``, has float32 parameters."""
    if not isinstance(model, nn.Module):
        raise ps.PlanError(f"Varuna takes an nn.Module, got {type(model).__name__}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cpu":
            raise AssertionError(f"the model must be on the CPU, where it is cut, but {name} is on {tensor.device}")
        if fp16 and isinstance(tensor, nn.Parameter) and tensor.dtype is torch.float16:
            raise ps.PlanError(f"fp16=True computes in float16 from parameters in float32, but {name} is in float16")


def device_of(device: int | str | torch.device, local_rank: int = -1) -> torch.device | str:
    """A number is that of a GPU, or the CPU where there are no GPUs."""
    if not isinstance(device, int):
        return device
    if not torch.cuda.is_available():
        return "cpu"
    number = device if device >= 0 else local_rank
    return f"cuda:{number}" if number >= 0 else "cuda"
