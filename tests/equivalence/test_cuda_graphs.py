"""Pipelines that replay CUDA graphs equal the plain model, and eager pipelines to the last bit.

On the CPU, recorded operators stand in for graphs (``tests/support/replayed_graphs``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from tests.equivalence.check import check_step
from tests.equivalence.cuda_ranks import CudaRanks, cuda_ranks
from tests.equivalence.front_end_models import FRONT_ENDS, FrontEndCase
from tests.equivalence.models import TRAINING, Case, stages_for
from tests.equivalence.test_skip_connections import dense_skips
from tests.equivalence.test_steps import ALL_LAYERS
from tests.support.ranks import Ranks
from tests.support.replayed_graphs import replay_on_cpu

STEPS = 5  # two of them are eager
LAYERS = ("relu_", "tuple_edge", "convs", "frozen", "layer_norm", "lookup", "tanh")

cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        replay_on_cpu(monkeypatch)
    return str(request.param)


def check_graphs(case: Any, device: str) -> None:
    check_step(case, devices=(device,), steps=STEPS, cuda_graphs=True)


@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule(schedule: str, device: str) -> None:
    for loss, (microbatches, batch) in [("ignore", (4, 10)), ("mean", (4, 8)), ("pair", (5, 13)), ("sum", (3, 2))]:
        case = Case(LAYERS, True, 3, schedule, stages_for(schedule, 3), microbatches, batch, loss)
        check_graphs(case, device)
    for recompute in ("except_last", "always"):
        check_graphs(replace(case, recompute=recompute, loss="ignore", batch=11), device)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
def test_skip_connections_and_shared_layers(schedule: str, device: str) -> None:
    check_graphs(dense_skips(schedule, 3), device)
    check_graphs(Case(ALL_LAYERS, True, 3, schedule, stages_for(schedule, 2), 4, 10, "ignore"), device)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_front_ends(front_end: str, device: str) -> None:
    for schedule, recompute in [("1f1b", "never"), ("zbv", "always")]:
        check_graphs(FrontEndCase(front_end, 4, schedule, 3, 8, recompute=recompute), device)


def graphs_on_rank(rank: int, case: Any) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        replay_on_cpu(monkeypatch)
        check_step(case, ps.Mesh(), steps=STEPS, cuda_graphs=True)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_over_two_processes(schedule: str, two: Ranks) -> None:
    two.check(graphs_on_rank, Case(LAYERS, True, 3, schedule, stages_for(schedule, 2), 4, 10, "ignore"))
    two.check(graphs_on_rank, dense_skips(schedule, 2))


# ── bit for bit, on a GPU ────────────────────────────────────────────────────────────────────────────────────────


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.dropout = norm(64), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def network(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (Block(**options) for _ in range(8))
    return nn.Sequential(nn.Embedding(32, 64), *blocks, nn.Linear(64, 32)).to("cuda", dtype)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), target)


def check_bits(model: nn.Sequential, *, amp: bool = False, **options: Any) -> None:
    """Seven steps of a pipeline with graphs, one of them with other shapes, equal those of one without."""
    twin = copy.deepcopy(model)
    stages = 8 if options["schedule"] in ("interleaved", "zbv") else 4
    options |= {"microbatches": 4, "devices": "cuda:0"}
    graphs = ps.Pipeline(ps.split(model, stages=stages), F.cross_entropy, cuda_graphs=True, **options)
    eager = ps.Pipeline(ps.split(twin, stages=stages), F.cross_entropy, **options)
    with graphs, eager:
        optimizers = [torch.optim.SGD(pipe.parameters(), 0.1) for pipe in (graphs, eager)]
        for step in range(7):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randint(32, (2, 13 if step == 5 else 16), generator=generator).cuda()
            for parameter in (*twin.parameters(), *(model.parameters() if step < 2 else ())):
                if parameter.grad is None:  # W adds to it in place, as in a graph
                    parameter.grad = torch.zeros_like(parameter)
            with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                ours, theirs = graphs.step(x, y), eager.step(x, y)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, twin.get_parameter(name).grad, rtol=0, atol=0)
            torch.testing.assert_close(ours.loss, theirs.loss, rtol=0, atol=0)
            torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=0, atol=0)
            for optimizer in optimizers:
                optimizer.step()
                if step != 3:
                    optimizer.zero_grad(set_to_none=optimizer is optimizers[0])
            torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()), rtol=0, atol=0)
        assert "eager" not in graphs.describe_graphs()


SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "auto"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("schedule", SCHEDULES)
class TestBits:
    def test_each_recompute_mode(self, schedule: str) -> None:
        for recompute in ("never", "except_last", "always"):
            check_bits(network(), schedule=schedule, recompute=recompute)

    def test_seeded_dropout(self, schedule: str) -> None:
        for recompute in ("never", "always"):
            check_bits(network(dropout=0.2), schedule=schedule, recompute=recompute, seed=7)

    def test_autocast(self, schedule: str) -> None:
        for recompute in ("never", "always"):
            check_bits(network(), amp=True, schedule=schedule, recompute=recompute)

    def test_batchnorm(self, schedule: str) -> None:
        for recompute in ("never", "always"):
            check_bits(network(norm=nn.BatchNorm1d), schedule=schedule, recompute=recompute)

    def test_bfloat16_with_float32_sums(self, schedule: str) -> None:
        check_bits(network(torch.bfloat16), schedule=schedule, accumulate="fp32")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_dropout_without_a_seed_is_that_of_one_thread() -> None:
    """All ranks of the device run in one thread: the random numbers of a step follow from the generator's state."""
    found = []
    for _ in range(2):
        pipe = ps.Pipeline(ps.split(network(dropout=0.5), stages=4), loss_fn, microbatches=4, cuda_graphs=True)
        x, y = torch.arange(32, device="cuda").reshape(2, 16)
        with pipe:
            for step in range(4):
                torch.manual_seed(step)
                found.append(pipe.step(x, y).loss)
    assert found[:4] == found[4:]
    assert len(set(map(float, found))) == 4


@pytest.fixture(scope="module", params=["nccl", "gloo"])
def two_processes(request: pytest.FixtureRequest) -> Iterator[CudaRanks]:
    with cuda_ranks(2, request.param) as made:
        yield made


def graphs_on_gpu(case: Any, rank: int) -> None:
    check_step(case, ps.Mesh(device="cuda:0"), steps=STEPS, cuda_graphs=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_two_processes_on_one_gpu(schedule: str, two_processes: CudaRanks) -> None:
    stages = stages_for(schedule, 2)
    two_processes.check(partial(graphs_on_gpu, Case(LAYERS, True, 3, schedule, stages, 4, 10, "ignore")))
    two_processes.check(partial(graphs_on_gpu, dense_skips(schedule, 2)))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:TensorFloat32")
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_compiled_stages(schedule: str) -> None:
    model = network()
    plain = copy.deepcopy(model)
    plan = ps.split(model, stages=2)
    with ps.Pipeline(plan, loss_fn, microbatches=4, schedule=schedule, cuda_graphs=True, compile=True) as pipe:
        for step in range(5):
            x, y = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(step)).cuda()
            result = pipe.step(x, y)
            loss = loss_fn(plain(x), y)
            loss.backward()
            torch.testing.assert_close(result.loss, loss.detach())
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-5)
        assert "eager" not in pipe.describe_graphs()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_close_returns_the_memory_of_the_graphs() -> None:
    model = network()
    reserved = []
    for _ in range(3):
        pipe = ps.Pipeline(ps.split(model, stages=4), loss_fn, microbatches=8, cuda_graphs=True)
        with pipe:
            for _ in range(4):
                pipe.step(torch.zeros(4096, dtype=torch.long), torch.zeros(4096, dtype=torch.long, device="cuda"))
        del pipe
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[2] <= reserved[0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_calls_in_the_graph_of_the_caller_run_between_steps() -> None:
    model = network()
    twin = copy.deepcopy(model)
    x, y = torch.arange(32, device="cuda").reshape(2, 16)
    with ps.Pipeline(ps.split(model, stages=4), loss_fn, microbatches=4, cuda_graphs=True) as pipe:
        for step in range(5):
            loss_fn(pipe(x) if step % 2 else pipe.forward(x), y).backward()
            pipe.step(x, y)
            loss_fn(twin(x), y).mul(2).backward()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, twin.get_parameter(name).grad)
