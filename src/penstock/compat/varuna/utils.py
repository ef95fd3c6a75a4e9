"""Which ranks run which stage: ``"0,2;1,3;"`` has two stages, the first on the ranks 0 and 2, the second on 1 and 3.

stage 0: 0 2        the first rank of each stage is in the first replica,
stage 1: 1 3        the second in the second: pipelines 0 → 1 and 2 → 3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.errors import PlanError

__all__ = ["StageToRankMap", "get_this_rank_config_varuna", "get_varuna_config", "parse_stage_to_rank_map"]

StageToRankMap = str | Sequence[Sequence[int]] | Mapping[int, Sequence[int]]
"""As text, as a list with the ranks of each stage, or with the stages' numbers as keys."""


def parse_stage_to_rank_map(stage_to_rank_map: StageToRankMap) -> dict[int, list[int]]:
    """The ranks of each stage, in the order of the stages: as many for each, and no rank twice."""
    given = stage_to_rank_map
    try:
        if isinstance(given, str):
            rows = [[int(rank) for rank in stage.split(",")] for stage in given.strip().rstrip(";").split(";")]
        elif isinstance(given, Mapping):
            rows = [[int(rank) for rank in given[stage]] for stage in range(len(given))]
        else:
            rows = [[int(rank) for rank in ranks] for ranks in given]
    except (KeyError, TypeError, ValueError):
        raise PlanError(f"stage_to_rank_map says which ranks run each stage, as in '0,2;1,3;', got {given!r}") from None
    counts, ranks = [len(row) for row in rows], [rank for row in rows for rank in row]
    if not ranks or len(set(counts)) > 1:
        raise PlanError(f"every stage must have as many ranks as the others, but {given!r} gives them {counts}")
    if len(set(ranks)) < len(ranks) or min(ranks) < 0:
        raise PlanError(f"every rank has one stage, and is a number from 0 on: {given!r}")
    return dict(enumerate(rows))


def get_varuna_config(stage_to_rank_map: StageToRankMap) -> tuple[int, int]:
    """How many stages there are, and how many replicas."""
    stages = parse_stage_to_rank_map(stage_to_rank_map)
    return len(stages), len(stages[0])


def get_this_rank_config_varuna(stage_to_rank_map: StageToRankMap, rank: int) -> tuple[int, int]:
    """The stage of a rank, and its place among the ranks of that stage: the number of its replica."""
    stages = parse_stage_to_rank_map(stage_to_rank_map)
    for stage, ranks in stages.items():
        if rank in ranks:
            return stage, ranks.index(rank)
    raise RuntimeError(f"rank {rank} is not in stage_to_rank_map {stage_to_rank_map!r}: only its ranks run a stage")
