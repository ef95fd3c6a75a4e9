"""Training with ``parallelize`` over four processes equals the plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.equivalence.parallel import train_case
from tests.equivalence.parallel_models import (
    DATA,
    DATA_TENSOR,
    EVEN,
    ONE_EMPTY,
    TENSOR,
    UNEVEN,
    checkpoint_blocks,
    ddp,
    ddp_inside,
    fsdp,
    fsdp_blocks,
    fsdp_nested,
    sequence_parallel,
    shard_ties_equally,
    tensor_parallel,
    tensor_parallel_and_fsdp,
    unchanged,
)
from tests.support.ranks import Ranks


@pytest.mark.parametrize(
    ("parallelize", "shards"), [(ddp, UNEVEN), (ddp, ONE_EMPTY), (ddp, (0, 3)), (fsdp_nested, (0, 3))]
)
def test_data_parallel_replicas(four: Ranks, parallelize: Callable[..., Any], shards: tuple[int, int]) -> None:
    four.check(train_case, parallelize, DATA, {"shards": shards})


@pytest.mark.parametrize(
    ("parallelize", "shards"),
    [
        (ddp_inside, ONE_EMPTY),
        (fsdp, ONE_EMPTY),
        (fsdp_blocks, ONE_EMPTY),
        (unchanged, ONE_EMPTY),
        (checkpoint_blocks, UNEVEN),
    ],
)
def test_partial_wrappers(four: Ranks, parallelize: Callable[..., Any], shards: tuple[int, int]) -> None:
    four.check(train_case, parallelize, DATA, {"shards": shards})


@pytest.mark.parametrize(
    ("parallelize", "sizes", "shards"),
    [
        (tensor_parallel, DATA_TENSOR, UNEVEN),
        (sequence_parallel, TENSOR, EVEN),
        (tensor_parallel_and_fsdp, TENSOR, UNEVEN),
        (unchanged, DATA_TENSOR, UNEVEN),
    ],
)
def test_tensor_parallel(
    four: Ranks, parallelize: Callable[..., Any], sizes: dict[str, int], shards: tuple[int, int]
) -> None:
    four.check(train_case, parallelize, sizes, {"shards": shards})


# ``test_skip_connections`` runs zbv with each of them.
@pytest.mark.parametrize(
    ("parallelize", "schedule", "recompute"),
    [
        (ddp, "zb_h1", "never"),
        (ddp, "interleaved", "always"),
        (fsdp_nested, "gpipe", "always"),
        (fsdp_nested, "zb_h1", "never"),
        (fsdp_nested, "interleaved", "never"),
        (tensor_parallel, "gpipe", "always"),
        (tensor_parallel, "zb_h1", "never"),
    ],
)
def test_schedules(four: Ranks, parallelize: Callable[..., Any], schedule: str, recompute: str) -> None:
    stages = 2 if schedule in ("gpipe", "zb_h1") else 4
    options = {"schedule": schedule, "recompute": recompute}
    sizes = TENSOR if parallelize is tensor_parallel else DATA
    four.check(train_case, parallelize, sizes, {"options": options, "stages": stages, "shards": (13, 2)})


@pytest.mark.parametrize("name", ["frozen", "tied", "model_with_empty_stage"])
@pytest.mark.parametrize("parallelize", [ddp, fsdp])
def test_frozen_tied_and_empty_stages(four: Ranks, parallelize: Callable[..., Any], name: str) -> None:
    more = {"stages": 4, "options": {"schedule": "interleaved"}} if name == "model_with_empty_stage" else {}
    four.check(train_case, parallelize, DATA, {"name": name, **more})


@pytest.mark.parametrize(("parallelize", "sizes"), [(ddp, DATA), (fsdp_nested, DATA), (tensor_parallel, TENSOR)])
def test_dynamic_messages(four: Ranks, parallelize: Callable[..., Any], sizes: dict[str, int]) -> None:
    four.check(train_case, parallelize, sizes, {"options": {"dynamic": True}})


@pytest.mark.parametrize("parallelize", [ddp, fsdp_nested, unchanged])
def test_mesh_without_replicas(four: Ranks, parallelize: Callable[..., Any]) -> None:
    four.check(train_case, parallelize, {"pipe": 4}, {})


@pytest.mark.parametrize("stages", [2, 4])
def test_collectives_at_stage_boundaries(four: Ranks, stages: int) -> None:
    options = {"schedule": "zbv" if stages == 4 else "1f1b"}
    four.check(train_case, tensor_parallel, TENSOR, {"name": "linear_pairs", "stages": stages, "options": options})


def test_sharded_tied_weights(four: Ranks) -> None:
    four.check(train_case, shard_ties_equally, TENSOR, {"name": "tied"})


@pytest.mark.parametrize(("parallelize", "sizes"), [(ddp, DATA), (fsdp_nested, DATA), (tensor_parallel, TENSOR)])
def test_skip_connections(four: Ranks, parallelize: Callable[..., Any], sizes: dict[str, int]) -> None:
    options = {"schedule": "zbv", "recompute": "except_last"}
    four.check(train_case, parallelize, sizes, {"name": "skips", "stages": 4, "options": options})
