"""Equivalence with the plain model on a GPU: threads or processes on one device, and ranks on GPU and CPU in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.equivalence.check import check_step
from tests.equivalence.cuda_ranks import CudaRanks, cuda_ranks
from tests.equivalence.dynamic_models import LAYER_PAIRS, DynamicShapesCase
from tests.equivalence.models import TRAINING, Case, stages_for
from tests.equivalence.parallel import train
from tests.equivalence.parallel_models import (
    DATA,
    DATA_TENSOR,
    TENSOR,
    ddp,
    fsdp_nested,
    tensor_parallel,
    tensor_parallel_and_fsdp,
)
from tests.equivalence.test_dynamic import dynamic_skips
from tests.equivalence.test_skip_connections import dense_skips

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LAYERS = ("relu_", "tuple_edge", "twice", "dict_edge", "scale", "convs", "frozen", "layer_norm", "lookup", "tanh")


@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cpu")], ids=["one GPU", "GPU and CPU"])
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule(schedule: str, devices: tuple[str, ...]) -> None:
    for count, microbatches, batch in [(2, 4, 10), (4, 8, 13), (3, 5, 3)]:
        stages = stages_for(schedule, count)
        case = Case(LAYERS, True, 3, schedule, stages, microbatches, batch, "ignore")
        for recompute in ("never", "except_last", "always"):
            check_step(replace(case, recompute=recompute), devices=devices)


@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cpu")], ids=["one GPU", "GPU and CPU"])
def test_skip_connections(devices: tuple[str, ...]) -> None:
    for schedule in ("gpipe", "1f1b", "zbv"):
        check_step(dense_skips(schedule, 3), devices=devices)


@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cpu")], ids=["one GPU", "GPU and CPU"])
@pytest.mark.parametrize("schedule", TRAINING)
def test_offload_weights(schedule: str, devices: tuple[str, ...]) -> None:
    for count, microbatches, batch in [(2, 4, 10), (4, 8, 13)]:
        stages = stages_for(schedule, count)
        case = Case(LAYERS, True, 3, schedule, stages, microbatches, batch, "pair", weights=True)
        for recompute in ("never", "always"):
            check_step(replace(case, recompute=recompute), devices=devices)


@pytest.fixture(scope="module", params=["nccl", "gloo"])
def two_processes(request: pytest.FixtureRequest) -> Iterator[CudaRanks]:
    with cuda_ranks(2, request.param) as made:
        yield made


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_processes_on_one_gpu(schedule: str, two_processes: CudaRanks) -> None:
    stages = stages_for(schedule, 2)
    two_processes.check(Case(LAYERS, True, 3, schedule, stages, 4, 10, "ignore"))
    two_processes.check(dense_skips(schedule, 2))
    two_processes.check(Case(LAYERS, True, 3, schedule, stages, 4, 10, "pair", weights=True))


@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cpu")], ids=["one GPU", "GPU and CPU"])
def test_dynamic_shapes(devices: tuple[str, ...]) -> None:
    for first in LAYER_PAIRS:
        check_step(DynamicShapesCase(first, "zbv", 2, 4, 11), devices=devices)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_dynamic_shapes_over_processes_on_one_gpu(schedule: str, two_processes: CudaRanks) -> None:
    for first in LAYER_PAIRS:
        two_processes.check(DynamicShapesCase(first, schedule, 2, 5, 13))
    two_processes.check(dynamic_skips(schedule, 2, 4, 10))


@pytest.fixture(scope="module", params=["nccl", "gloo"])
def two_replicas(request: pytest.FixtureRequest) -> Iterator[CudaRanks]:
    with cuda_ranks(4, request.param, data=2) as made:
        yield made


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_replicas_on_one_gpu(schedule: str, two_replicas: CudaRanks) -> None:
    stages = stages_for(schedule, 2)
    for recompute in ("never", "always"):
        two_replicas.check(Case(LAYERS, True, 3, schedule, stages, 4, 10, "ignore", recompute=recompute))
    two_replicas.check(Case(LAYERS, True, 3, schedule, stages, 4, 10, "ignore", weights=True))


@pytest.fixture(scope="module")
def four_processes() -> Iterator[CudaRanks]:
    with cuda_ranks(4, "nccl") as made:
        yield made


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize(
    ("parallelize", "sizes"),
    [(ddp, DATA), (fsdp_nested, DATA), (tensor_parallel, TENSOR), (tensor_parallel_and_fsdp, DATA_TENSOR)],
)
def test_parallelize_on_one_gpu(
    four_processes: CudaRanks, parallelize: Callable[..., Any], sizes: dict[str, int], schedule: str
) -> None:
    options = {"schedule": schedule, "recompute": "always" if schedule == "zbv" else "never"}
    stages = sizes["pipe"] * (2 if schedule == "zbv" else 1)
    four_processes.check(
        partial(train, parallelize=parallelize, sizes=sizes, options=options, stages=stages, device="cuda:0")
    )
