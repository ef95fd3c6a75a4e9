"""TorchDistPackage's topology and partitions, of any number of processes, and where its names are."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import penstock as ps
from penstock.compat import torchdistpackage
from penstock.compat.torchdistpackage import (
    CallableModule,
    fix_rand,
    flat_and_partition,
    flatten_model,
    get_mp_ckpt_suffix,
    is_using_pp,
    partition_balanced,
    partition_uniform,
    setup_node_groups,
    tpc,
)
from tests.support.fork_python import fork_python
from tests.support.models import mlp
from tests.support.ranks import free_port


@contextmanager
def as_rank(rank: int, world: int, config: list[tuple[str, float]]) -> Iterator[Any]:
    """A process that believes to be one of many, with its topology."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        tpc.setup_process_groups(config)
        yield tpc
    finally:
        tpc.__init__()  # type: ignore[misc]
        dist.destroy_process_group()


# ── topology ─────────────────────────────────────────────────────────────────────────────────────────────────────

SIXTEEN = [("data", 4), ("pipe", 2), ("tensor", 2)]


@pytest.mark.parametrize("rank", range(16))
def test_the_documented_grid(rank: int) -> None:
    data, pipe, tensor = rank // 4, rank // 2 % 2, rank % 2
    with as_rank(rank, 16, SIXTEEN) as topology:
        assert topology.get_ranks_in_group("data") == [4 * d + rank % 4 for d in range(4)]
        assert topology.get_ranks_in_group("pipe") == [4 * data + tensor, 4 * data + 2 + tensor]
        assert topology.get_ranks_in_group("tensor") == [rank - tensor, rank - tensor + 1]
        assert topology.get_ranks_in_group("model") == list(range(4 * data, 4 * data + 4))
        assert topology.get_ranks_in_group("global") == list(range(16))
        places = {"dp": (data, 4), "pp": (pipe, 2), "tp": (tensor, 2), "mp": (rank % 4, 4)}
        for name, place in places.items():
            found = getattr(topology, f"get_{name}_rank")(), getattr(topology, f"get_{name}_size")()
            assert found == place
        modes = {"data": "dp", "pipeline": "pp", "tensor": "tp", "model": "mp"}
        for mode, name in modes.items():
            at, size = places[name]
            assert getattr(topology, f"is_first_in_{mode}_group")() == (at == 0)
            assert getattr(topology, f"is_last_in_{mode}_group")() == (at == size - 1)
        assert topology.is_first_in_group("pipe") == (pipe == 0)
        assert topology.is_last_in_group("data") == (data == 3)
        assert topology.is_first_group("model") == (data == 0)
        assert topology.get_prev_global_rank() == topology.get_next_global_rank() == 4 * data + 2 * (1 - pipe) + tensor
        assert topology.get_next_global_rank("data") == (rank + 4) % 16
        assert topology.get_prev_global_rank("data") == (rank - 4) % 16
        assert topology.all_ranks("tensor") == [[2 * i, 2 * i + 1] for i in range(8)]
        for mode in ("data", "pipe", "tensor", "model", "global"):
            assert dist.get_process_group_ranks(topology.get_group(mode)) == topology.get_ranks_in_group(mode)
            assert topology.get_group_rank(mode) == topology.get_group(mode).rank()
        assert get_mp_ckpt_suffix() == f"_tp_{tensor}_pp_{pipe}.pth"


def test_order_of_dimensions() -> None:
    with as_rank(5, 8, [("tensor", 2), ("data", 2), ("pipe", 2)]) as topology:
        assert topology.get_ranks_in_group("pipe") == [4, 5]
        assert topology.get_ranks_in_group("data") == [5, 7]
        assert topology.get_ranks_in_group("tensor") == [1, 5]
        assert topology.get_ranks_in_group("model") == [0, 1, 4, 5]


def test_a_pipeline_without_a_data_dimension() -> None:
    """The original raised an IndexError."""
    with as_rank(2, 4, [("pipe", 4)]) as topology:
        assert is_using_pp()
        assert topology.get_ranks_in_group("model") == [0, 1, 2, 3]
        assert (topology.get_prev_global_rank(), topology.get_next_global_rank()) == (1, 3)
        assert not topology.is_mode_inited("data")
        with pytest.raises(AssertionError, match="data is not initialized!"):
            topology.get_dp_rank()
        assert get_mp_ckpt_suffix() == "_pp_2.pth"
    with as_rank(0, 2, [("data", 2)]):
        assert not is_using_pp()
        with pytest.raises(AssertionError, match="pipe is not initialized!"):
            tpc.is_first_in_pipeline_group()


@pytest.mark.parametrize("sizes", [{"moe_dp_size": 2, "moe_ep_size": 4}, {"moe_dp_size": 2}, {"moe_ep_size": 4}])
def test_groups_of_experts_divide_the_data_groups(sizes: dict[str, int]) -> None:
    with as_rank(5, 16, [("data", 8), ("pipe", 2)]) as topology:
        topology.build_moe_groups(**sizes)
        assert topology.get_ranks_in_group("data") == [1, 3, 5, 7, 9, 11, 13, 15]
        assert topology.get_ranks_in_group("moe_ep") == [1, 3, 5, 7]
        assert topology.get_ranks_in_group("moe_dp") == [5, 13]
        with pytest.raises(ps.PlanError, match="moe_dp_size 3 × moe_ep_size 4 must be the size of a data group, 8"):
            topology.build_moe_groups(3, 4)


def test_quotients_as_sizes() -> None:
    with as_rank(2, 4, [("pipe", 2), ("data", 4 / 2)]) as topology:
        assert topology.get_ranks_in_group("pipe") == [0, 2]
        assert topology.get_ranks_in_group("model") == [0, 2]
        assert topology.get_dp_size() == 2


def test_invalid_grids() -> None:
    with as_rank(0, 4, [("pipe", 4)]) as topology:
        with pytest.raises(
            ps.PlanError, match=r"\('pipe', 2\), \('tensor', 3\). needs 6 processes, but the world has 4"
        ):
            topology.setup_process_groups([("pipe", 2), ("tensor", 3)])
        with pytest.raises(ps.PlanError, match="every dimension once"):
            topology.setup_process_groups([("pipe", 2), ("pipe", 2)])
        with pytest.raises(ps.PlanError, match="with a whole number"):
            topology.setup_process_groups([("pipe", 1.6), ("data", 2.5)])
        assert topology.get_pp_size() == 4


def test_machines_of_some_processes_each() -> None:
    with as_rank(4, 7, [("data", 7)]):
        assert dist.get_process_group_ranks(setup_node_groups(3)) == [3, 4, 5]
    with as_rank(6, 7, [("data", 7)]):
        assert dist.get_process_group_ranks(setup_node_groups(3)) == [6]


# ── layers ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
        self.more = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        for layer in self.more:
            x = layer(x)
        return self.head(x.abs())


def test_flatten_model() -> None:
    model = Net()
    layers = flatten_model(model, ["stem", "body", "more", torch.abs, model.head], return_list=True)
    assert isinstance(layers, list)
    kinds = [nn.Linear, nn.Linear, nn.Sequential, nn.Linear, nn.Tanh, CallableModule, nn.Linear]
    assert [type(layer) for layer in layers] == kinds
    assert layers[1] is model.body[0]
    whole = flatten_model(model, ["stem", "body", "more", lambda x: x.abs(), "head"])
    assert isinstance(whole, nn.Sequential)
    assert list(whole.state_dict())[-1] == "6.bias"
    x = torch.randn(3, 4)
    torch.testing.assert_close(whole(x), model(x))
    assert CallableModule(torch.add)(x, x).equal(2 * x)
    with pytest.raises(NotImplementedError, match="a layer must be a name, a module or a function, got 3"):
        flatten_model(model, ["stem", 3])  # type: ignore[list-item]
    with pytest.raises(ps.PlanError, match="no module 'stam' in Net: did you mean 'stem'"):
        flatten_model(model, ["stam"])


@pytest.mark.parametrize(("extra", "expected"), [(0, [0, 2, 4, 6, 11]), (4, [0, 3, 6, 9, 11])])
def test_partition_uniform(extra: int, expected: list[int]) -> None:
    layers = list(range(11))
    for rank in range(4):
        with as_rank(rank, 4, [("pipe", 4)]):
            assert partition_uniform(layers, extra) == layers[expected[rank] : expected[rank + 1]]


def test_partition_balanced_by_parameters() -> None:
    widths = [64, 4, 4, 4, 4, 64]
    layers = nn.Sequential(*(nn.Linear(w, w) for w in widths))
    found = []
    for rank in range(3):
        with as_rank(rank, 3, [("pipe", 3)]):
            found.append([layer.in_features for layer in partition_balanced(layers)])
            assert len(partition_balanced(list(layers))) == len(found[-1])
    assert found == [[64], [4, 4, 4, 4], [64]]


@pytest.mark.parametrize(("policy", "level"), [("uniform", 1), ("balanced", 1), ("uniform", 2), ("balanced", 0)])
def test_flat_and_partition(policy: str, level: int) -> None:
    """A balanced partition was a TypeError."""
    model = nn.Sequential(mlp(2), nn.Sequential(mlp(2), nn.Tanh()), nn.Linear(4, 4))
    x, parts = torch.randn(3, 4), []
    for rank in range(2):
        with as_rank(rank, 2, [("pipe", 2)]):
            parts.append(flat_and_partition(model, level, partition_policy=policy))
            with pytest.raises(NotImplementedError, match="'uniform' or 'balanced', got 'best'"):
                flat_and_partition(model, partition_policy="best")
    assert sum(map(len, parts)) == {0: 3, 1: 6, 2: 8}[level]
    torch.testing.assert_close(parts[1](parts[0](x)), model(x))


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("", "tpc setup_distributed flatten_model forward_backward clip_grad_norm_ NaiveDDP test_comm fix_rand"),
        ("dist", "tpc setup_distributed"),
        ("dist.process_topo", "tpc torch_parallel_context is_using_pp test_comm"),
        ("dist.launch_from_slurm", "setup_distributed"),
        ("dist.node_group", "setup_node_groups"),
        ("dist.model_parallel_ckpt", "get_mp_ckpt_suffix"),
        ("ddp.naive_ddp", "NaiveDDP"),
        ("utils", "fix_rand"),
        *[
            (f"{parent}.{name}", names)
            for parent in ("parallel", "parallel.pipeline_parallel")
            for name, names in (
                ("pipeline_sched", "forward_backward forward_eval"),
                ("clip_grad_parallel", "clip_grad_norm_ NativeScalerPP"),
                ("pipeline_helper", "flatten_model partition_uniform partition_balanced flat_and_partition"),
            )
        ],
    ],
)
def test_both_generations_import_paths(module: str, names: str) -> None:
    found = importlib.import_module(f"penstock.compat.torchdistpackage{'.' if module else ''}{module}")
    for name in names.split():
        everywhere = getattr(torchdistpackage, name)
        assert getattr(found, name) is everywhere


def test_missing_attributes_name_the_document() -> None:
    with pytest.raises(AttributeError, match=r"no Bf16ZeroOptimizer\. docs/migrating\.md"):
        torchdistpackage.Bf16ZeroOptimizer  # noqa: B018


def test_fix_rand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deterministic", "benchmark"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    draws = []
    for rank in (0, 1, 0):
        fix_rand(rank)
        draws.append(float(torch.rand(())))
    assert draws[0] == draws[2] != draws[1]


PROGRAM = """
import torch.distributed as dist
from penstock.compat.torchdistpackage import setup_distributed, tpc
print(*setup_distributed(PORT), dist.get_backend(), *setup_distributed())
tpc.setup_process_groups([("pipe", 1)])
print(tpc.device)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_setup_distributed(launcher: str) -> None:
    port = str(free_port())
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODELIST": "localhost"}
    said = {"torchrun": ({**torchrun}, ""), "slurm": ({**slurm, "SLURM_JOB_ID": "7"}, f"port={port}")}
    variables, argument = said[launcher]
    kept = {k: v for k, v in os.environ.items() if not re.match("SLURM|RANK|WORLD_SIZE|LOCAL_|MASTER_", k)}
    program = PROGRAM.replace("PORT", argument)
    done = subprocess.run(
        [fork_python(), "-W", "error", "-c", program],
        env={**kept, **variables, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == [f"0 1 {port} localhost gloo 0 1 {port} localhost", "cpu"], done.stderr
