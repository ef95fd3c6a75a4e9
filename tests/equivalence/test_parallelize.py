"""Stages that the user's ``parallelize`` has made parallel, on four processes: all is as with the plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.equivalence.parallel import case
from tests.equivalence.ways import (
    DATA,
    DATA_TENSOR,
    EVEN,
    ONE_EMPTY,
    TENSOR,
    UNEVEN,
    both,
    checkpointed,
    ddp,
    ddp_inside,
    fsdp,
    fsdp_blocks,
    fsdp_nested,
    sequence_parallel,
    tensor_parallel,
    ties_alike,
    unchanged,
)
from tests.support.ranks import Ranks


@pytest.mark.parametrize("shards", [EVEN, UNEVEN, ONE_EMPTY, (0, 3)], ids=str)
@pytest.mark.parametrize("how", [ddp, fsdp_nested])
def test_replicas(four: Ranks, how: Callable[..., Any], shards: tuple[int, int]) -> None:
    four.check(case, how, DATA, {"shards": shards})


@pytest.mark.parametrize("shards", [UNEVEN, ONE_EMPTY], ids=str)
@pytest.mark.parametrize("how", [ddp_inside, fsdp, fsdp_blocks, unchanged, checkpointed])
def test_other_ways(four: Ranks, how: Callable[..., Any], shards: tuple[int, int]) -> None:
    four.check(case, how, DATA, {"shards": shards})


@pytest.mark.parametrize("sizes", [TENSOR, DATA_TENSOR], ids=str)
@pytest.mark.parametrize("how", [tensor_parallel, sequence_parallel, both, unchanged])
def test_tensor_parallel(four: Ranks, how: Callable[..., Any], sizes: dict[str, int]) -> None:
    four.check(case, how, sizes, {"shards": EVEN if how is sequence_parallel else UNEVEN})


RUNS = [("gpipe", "always"), ("zb_h1", "never"), ("interleaved", "never"), ("zbv", "never"), ("zbv", "always")]


@pytest.mark.parametrize(("schedule", "recompute"), RUNS)
@pytest.mark.parametrize("how", [ddp, fsdp_nested, tensor_parallel])
def test_schedules(four: Ranks, how: Callable[..., Any], schedule: str, recompute: str) -> None:
    stages = 2 if schedule in ("gpipe", "zb_h1") else 4
    options = {"schedule": schedule, "recompute": recompute}
    sizes = TENSOR if how is tensor_parallel else DATA
    four.check(case, how, sizes, {"options": options, "stages": stages, "shards": (13, 2)})


@pytest.mark.parametrize("name", ["frozen", "tied", "hollow"])
@pytest.mark.parametrize("how", [ddp, fsdp])
def test_models(four: Ranks, how: Callable[..., Any], name: str) -> None:
    more = {"stages": 4, "options": {"schedule": "interleaved"}} if name == "hollow" else {}
    four.check(case, how, DATA, {"name": name, **more})


@pytest.mark.parametrize(("how", "sizes"), [(ddp, DATA), (fsdp_nested, DATA), (tensor_parallel, TENSOR)])
def test_messages_that_describe_themselves(four: Ranks, how: Callable[..., Any], sizes: dict[str, int]) -> None:
    four.check(case, how, sizes, {"options": {"dynamic": True}})


@pytest.mark.parametrize("how", [ddp, fsdp_nested, unchanged])
def test_a_mesh_without_replicas(four: Ranks, how: Callable[..., Any]) -> None:
    four.check(case, how, {"pipe": 4}, {})


@pytest.mark.parametrize("stages", [2, 4])
def test_collectives_at_edges(four: Ranks, stages: int) -> None:
    options = {"schedule": "zbv" if stages == 4 else "1f1b"}
    four.check(case, tensor_parallel, TENSOR, {"name": "pairs", "stages": stages, "options": options})


def test_ties_in_parts(four: Ranks) -> None:
    four.check(case, ties_alike, TENSOR, {"name": "tied"})


@pytest.mark.parametrize(("how", "sizes"), [(ddp, DATA), (fsdp_nested, DATA), (tensor_parallel, TENSOR)])
def test_several_edges(four: Ranks, how: Callable[..., Any], sizes: dict[str, int]) -> None:
    options = {"schedule": "zbv", "recompute": "except_last"}
    four.check(case, how, sizes, {"name": "skips", "stages": 4, "options": options})
