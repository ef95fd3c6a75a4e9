"""Unsupported results of ``parallelize`` raise an error on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from tests.equivalence.parallel import batch, mesh_of
from tests.equivalence.parallel_models import (
    CLASSES,
    DATA,
    TENSOR,
    TiedModel,
    blocks,
    ddp,
    fsdp,
    shard_first_tie_only,
    tensor_parallel,
    unchanged,
)
from tests.support.ranks import Ranks


def ddp_over_the_world(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
    return DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))


def ddp_ignoring_parameters(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, ["0.weight", "3.norm.bias"])
    return ddp(stage, mesh)


def fsdp_over_the_world(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(stage)


def fsdp_over_tensor(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(stage, mesh=mesh["tensor"])


def tensor_over_data(stage: nn.Module, mesh: ps.Mesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    name = next(name for name, part in stage.named_children() if isinstance(part, nn.Linear))
    parallelize_module(stage, mesh["data"], {name: ColwiseParallel()})


def sharded_output(stage: nn.Module, mesh: ps.Mesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    if mesh.pipe_rank == 0:
        last = ColwiseParallel(use_local_output=False)
        parallelize_module(stage, mesh["tensor"], {[name for name, _ in stage.named_children()][-1]: last})


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def wrap_in_module(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
    return Wrapper(stage)


def return_a_string(stage: nn.Module, mesh: ps.Mesh) -> Any:
    return "stage"


def fail_on_rank_1(stage: nn.Module, mesh: ps.Mesh) -> Any:
    if mesh.rank == 1:
        raise KeyError("no such layer")
    return stage


def composable_replicate(stage: nn.Module, mesh: ps.Mesh) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(stage, mesh=mesh["data"])


def composable_ddp_replicate(stage: nn.Module, mesh: ps.Mesh) -> None:
    from torch.distributed._composable.replicate import replicate

    replicate(stage, process_group=mesh["data"].get_group())


REFUSED: list[tuple[Any, dict[str, int], dict[str, Any], str]] = [
    (ddp_over_the_world, DATA, {}, r"over ranks \[0, 1, 2, 3\], but the stage's replicas are ranks \[.*mesh\["),
    (ddp_ignoring_parameters, DATA, {}, "does not support parameters that DistributedDataParallel ignores"),
    (fsdp_over_the_world, DATA, {}, r"fully_shard is over ranks \[0, 1, 2, 3\], but the stage's replicas"),
    (fsdp_over_tensor, TENSOR, {}, r'fully_shard is over ranks.*pass mesh=mesh\["data"\]'),
    (tensor_over_data, DATA, {}, r'is distributed over ranks.*use mesh\["tensor"\]'),
    (wrap_in_module, DATA, {}, r"it has inner\..* in the place of .*weight.*stay those of the model"),
    (return_a_string, DATA, {}, "parallelize returned a str for stage"),
    (fail_on_rank_1, DATA, {}, "no such layer"),
    (composable_replicate, DATA, {}, "replicate.* leave that out"),
    (composable_ddp_replicate, DATA, {}, "replicate.* leave that out"),
    (fsdp, DATA, {"accumulate": "fp32"}, "accumulate= and offload= are not supported for sharded parameters"),
    (
        tensor_parallel,
        TENSOR,
        {"accumulate": "fp32"},
        "accumulate= and offload= are not supported for sharded parameters",
    ),
    (fsdp, DATA, {"offload": ps.Offload()}, "offload= are not supported for sharded parameters"),
]


def construction_error(
    rank: int, parallelize: Callable[..., Any], sizes: dict[str, int], options: dict[str, Any]
) -> str:
    with pytest.raises((ps.PlanError, ps.PipelineError, KeyError)) as caught:
        ps.Pipeline(
            ps.split(blocks(), stages=2), F.cross_entropy, mesh=mesh_of(sizes), parallelize=parallelize, **options
        )
    return str(caught.value)


@pytest.mark.parametrize(("parallelize", "sizes", "options", "message"), REFUSED)
def test_unsupported_parallelize_is_refused(
    four: Ranks, parallelize: Callable[..., Any], sizes: dict[str, int], options: dict[str, Any], message: str
) -> None:
    for found in four.check(construction_error, parallelize, sizes, options):
        assert re.search(message, found), found


def local_ties_error(rank: int, parallelize: Callable[..., Any]) -> str:
    """Stages 0 and 3 are on the first rank: two calls of fully_shard would split their tied parameter in two."""
    mesh = mesh_of(DATA)
    options: dict[str, Any] = {"mesh": mesh, "schedule": "zbv", "microbatches": 4, "parallelize": parallelize}
    plan = ps.split(TiedModel(), stages=4)
    assert plan.ties[0].stages in ((0, 2), (0, 3))
    with pytest.raises((ps.PlanError, ps.PipelineError)) as caught:
        ps.Pipeline(plan, F.cross_entropy, **options)
    return str(caught.value)


def different_tie_layouts_error(rank: int) -> str:
    with pytest.raises((ps.PlanError, ps.PipelineError)) as caught:
        ps.Pipeline(
            ps.split(TiedModel(), stages=2), F.cross_entropy, mesh=mesh_of(TENSOR), parallelize=shard_first_tie_only
        )
    return str(caught.value)


def test_tied_parameters_need_equal_layouts(four: Ranks) -> None:
    for found in four.check(different_tie_layouts_error):
        assert "is one parameter of several stages, but parallelize has given it different layouts" in found


def test_tied_stages_of_one_process_cannot_be_sharded(four: Ranks) -> None:
    for found in four.check(local_ties_error, fsdp):
        assert "were one parameter, but parallelize has replaced it by several" in found


def sharded_output_error(rank: int) -> str:
    mesh = mesh_of(TENSOR)
    options: dict[str, Any] = {"mesh": mesh, "microbatches": 2, "parallelize": sharded_output}
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES))
    pipe = ps.Pipeline(ps.split(model, balance=[2, 1]), F.cross_entropy, **options)
    with pytest.raises((ps.PlanError, ps.PipelineError)) as caught:
        pipe.step(*batch(0, 4))
    return str(caught.value)


def test_dtensor_output_is_refused(four: Ranks) -> None:
    for found in four.check(sharded_output_error):
        assert "returns a DTensor with the layout" in found


def shard_twice_error(rank: int) -> str:
    mesh = mesh_of(DATA)
    model = blocks()
    ps.Pipeline(ps.split(model, stages=2), F.cross_entropy, mesh=mesh, parallelize=fsdp).close()
    with pytest.raises((ps.PlanError, ps.PipelineError)) as caught:
        ps.Pipeline(ps.split(model, stages=2), F.cross_entropy, mesh=mesh, parallelize=fsdp)
    return str(caught.value)


def test_sharded_model_cannot_be_sharded_again(four: Ranks) -> None:
    for found in four.check(shard_twice_error):
        assert "is a DTensor already" in found


def parallelize_on_some_ranks_error(rank: int) -> str:
    mesh, plan = mesh_of(DATA), ps.split(blocks(), stages=2)
    with pytest.raises(ps.PlanError) as caught:
        ps.Pipeline(plan, F.cross_entropy, mesh=mesh, parallelize=fsdp if rank else None)
    return str(caught.value)


def test_parallelize_must_be_given_on_all_ranks(four: Ranks) -> None:
    for found in four.check(parallelize_on_some_ranks_error):
        assert "parallelize is False on rank 0, but True on rank 1" in found


def test_parallelize_needs_a_mesh() -> None:
    plan = ps.split(blocks(), stages=2)
    with pytest.raises(ps.PlanError, match=r"pass mesh=ps\.Mesh.*stage\.compile\(\)"):
        ps.Pipeline(plan, F.cross_entropy, parallelize=unchanged)


def test_parallelize_takes_a_stage_and_the_mesh() -> None:
    """torch.compile alone takes the module and nothing else: the error is not that of a call inside the pipeline."""
    plan = ps.split(blocks(), stages=2)
    with pytest.raises(ps.PlanError, match=r"parallelize\(stage, mesh\).*lambda stage, mesh: torch\.compile\(stage\)"):
        ps.Pipeline(plan, F.cross_entropy, parallelize=torch.compile)
