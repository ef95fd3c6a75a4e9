"""Two replicas of a two-rank pipeline with shards of one mini-batch equal one process with the whole mini-batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from tests.equivalence.parallel_models import CLASSES, ConditionalLayer, TiedModel
from tests.support.ranks import Ranks

EVEN, UNEVEN, TINY, ONE_EMPTY = (6, 6), (7, 2), (1, 1), (5, 0)
SHARDS = [EVEN, UNEVEN, TINY, ONE_EMPTY, (0, 3)]


# ── models and losses ──────────────────────────────────────────────────────────────────────────────────────────────


def mlp() -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(4):
        parts += [nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(6, CLASSES))


class SparseEmbedding(nn.Module):
    """An embedding with sparse gradients, indexed by the sign of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 6, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows((x[:, 0] > 0).long()) + x  # type: ignore[no-any-return]


def sparse() -> nn.Module:
    return nn.Sequential(SparseEmbedding(), *mlp().children())


def frozen() -> nn.Module:
    model = mlp()
    for parameter in list(model.parameters())[:4]:
        parameter.requires_grad_(False)
    return model


def cross_entropy_ignoring_0(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=0)


def pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    kept = target > 0
    return (F.cross_entropy(output, target, reduction="none") * kept).sum(), kept.sum()


def sum_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output.sum(1) - target).square().sum()


Plain = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, tuple[Callable[..., Any], str | None, Plain]] = {
    "counted": (nn.CrossEntropyLoss(ignore_index=0), None, cross_entropy_ignoring_0),
    "weighted": (
        nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5, 3.0])),
        None,
        nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5, 3.0])),
    ),
    "mean": (lambda o, y: (o.sum(1) - y).square().mean(), None, lambda o, y: (o.sum(1) - y).square().mean()),
    "sum": (sum_of_squares, "sum", sum_of_squares),
    "pair": (pair, None, lambda o, y: pair(o, y)[0] / pair(o, y)[1]),
}
MODELS = {"mlp": mlp, "tied": TiedModel, "frozen": frozen, "sparse": sparse}


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 6, generator=generator), torch.randint(0, CLASSES, (size,), generator=generator)


def replica_samples(mesh: ps.Mesh, shards: Sequence[int], *tensors: Tensor) -> list[Tensor]:
    """This replica's samples."""
    start = sum(shards[: mesh.data_rank])
    return [tensor[start : start + shards[mesh.data_rank]] for tensor in tensors]


def dense(grad: Tensor | None) -> Tensor | None:
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def check_gradients(pipe: ps.Pipeline, plain: nn.Module) -> None:
    expected = dict(plain.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        there = expected[name].grad
        if there is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(dense(parameter.grad), dense(there), msg=lambda text, n=name: f"{n}: {text}")


# ── steps ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(
    rank: int, name: str, loss: str, shards: Sequence[int], options: dict[str, Any], stages: int = 2, steps: int = 3
) -> None:
    mesh = ps.Mesh(data=2, pipe=2)
    torch.manual_seed(mesh.data_rank)  # replicas start with different weights and must take those of the first one
    model = MODELS[name]()
    torch.manual_seed(0)
    plain = MODELS[name]()
    if mesh.data_rank == 0:
        model.load_state_dict(plain.state_dict())
    loss_fn, reduction, plain_loss = LOSSES[loss]
    options = {"microbatches": 3, "mesh": mesh, "reduction": reduction, **options}
    with ps.Pipeline(ps.split(model, stages=stages), loss_fn, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
        reference = torch.optim.SGD(plain.parameters(), lr=0.05)
        for step in range(steps):
            x, y = batch(step, sum(shards))
            result = pipe.step(*replica_samples(mesh, shards, x, y))
            expected = plain_loss(plain(x), y)
            expected.backward()
            torch.testing.assert_close(result.loss, expected.detach())
            check_gradients(pipe, plain)
            if step != 1:  # the third step accumulates into the gradients of the second
                if name != "sparse":
                    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                    torch.testing.assert_close(pipe.clip_grad_norm_(0.5), norm)
                optimizer.step()
                reference.step()
                optimizer.zero_grad()
                reference.zero_grad()
        with torch.no_grad():
            x, y = batch(9, sum(shards))
            found = pipe.evaluate(*replica_samples(mesh, shards, x, y))
            torch.testing.assert_close(found.loss, plain_loss(plain(x), y))
            if pipe.has_last_stage and shards[mesh.data_rank]:
                torch.testing.assert_close(found.outputs, *replica_samples(mesh, shards, plain(x)))


@pytest.mark.parametrize(
    ("loss", "shards"),
    [*(("counted", shards) for shards in SHARDS), *((n, s) for n in LOSSES if n != "counted" for s in SHARDS[1:4:2])],
    ids=str,
)
def test_every_loss_over_uneven_shards(four: Ranks, loss: str, shards: tuple[int, int]) -> None:
    four.check(train, "mlp", loss, shards, {})


@pytest.mark.parametrize("shards", [UNEVEN, ONE_EMPTY], ids=str)
@pytest.mark.parametrize("name", ["tied", "frozen", "sparse"])
def test_ties_frozen_and_sparse_parameters(four: Ranks, name: str, shards: tuple[int, int]) -> None:
    four.check(train, name, "counted", shards, {})


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("gpipe", "always"), ("zb_h1", "never"), ("interleaved", "always"), ("zbv", "always"), ("v_half", "never")],
)
def test_schedules(four: Ranks, schedule: str, recompute: str) -> None:
    stages = 2 if schedule in ("gpipe", "zb_h1") else 4
    four.check(train, "mlp", "counted", UNEVEN, {"schedule": schedule, "recompute": recompute}, stages)


@pytest.mark.parametrize("bucket", [1, 300, 1 << 20])
def test_bucket_sizes(four: Ranks, bucket: int) -> None:
    four.check(train_with_bucket_size, bucket)


def train_with_bucket_size(rank: int, bucket: int) -> None:
    import penstock.engine.replicas.reduce as reduce

    before, reduce.BUCKET = reduce.BUCKET, bucket
    try:
        train(rank, "mlp", "counted", UNEVEN, {"schedule": "interleaved"}, 4)
    finally:
        reduce.BUCKET = before


def test_parameters_unused_on_some_replicas(four: Ranks) -> None:
    four.check(train_with_unused_parameters)


def train_with_unused_parameters(rank: int) -> None:
    """A parameter used by no replica has no gradient; one used by any replica has a gradient on all."""
    mesh = ps.Mesh(data=2, pipe=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), ConditionalLayer(), nn.Linear(6, CLASSES))
    plain = copy.deepcopy(model)
    with ps.Pipeline(
        ps.split(model, balance=[2, 2]), sum_of_squares, reduction="sum", microbatches=2, mesh=mesh
    ) as pipe:
        x, y = batch(0, 12)
        model[2].use_second = mesh.data_rank == 1
        pipe.step(*replica_samples(mesh, EVEN, x, y))
        for replica, rows in enumerate((slice(0, 6), slice(6, 12))):
            plain[2].use_second = replica == 1
            sum_of_squares(plain(x[rows]), y[rows]).backward()
        check_gradients(pipe, plain)
        if pipe.has_last_stage:
            assert model[2].never.weight.grad is None
            assert model[2].second.weight.grad is not None


# ── BatchNorm, random numbers, precision ───────────────────────────────────────────────────────────────────────────


def batchnorm_model(momentum: float | None) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(4):
        parts += [nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=momentum), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(6, CLASSES)).double()


def check_buffers(pipe: ps.Pipeline, plain: nn.Module) -> None:
    expected = plain.state_dict()
    for name, tensor in pipe.state_dict().items():
        if "running" in name or "tracked" in name:
            torch.testing.assert_close(tensor, expected[name], msg=lambda text, n=name: f"{n}: {text}")


def train_batchnorm(rank: int, momentum: float | None, shards: Sequence[int], schedule: str, recompute: str) -> None:
    """Equal to one process that runs the micro-batches of the first replica, then those of the second."""
    mesh = ps.Mesh(data=2, pipe=2)
    torch.manual_seed(0)
    model = batchnorm_model(momentum)
    plain = copy.deepcopy(model)
    stages = 2 if schedule == "1f1b" else 4
    options: dict[str, Any] = {"microbatches": 3, "mesh": mesh, "schedule": schedule, "recompute": recompute}
    with ps.Pipeline(ps.split(model, stages=stages), F.cross_entropy, **options) as pipe:
        for step in range(3):
            x, y = batch(step, sum(shards))
            x = x.double() + 5
            result = pipe.step(*replica_samples(mesh, shards, x, y))
            total = 0.0
            for xs, ys in zip(x.split(list(shards)), y.split(list(shards)), strict=True):
                for i, j in zip(xs.tensor_split(3), ys.tensor_split(3), strict=True):
                    if len(i):
                        loss = F.cross_entropy(plain(i), j) * len(i) / len(x)
                        loss.backward()
                        total += float(loss.detach())
            assert float(result.loss) == pytest.approx(total)
            check_gradients(pipe, plain)
            check_buffers(pipe, plain)


@pytest.mark.parametrize(
    ("momentum", "shards", "schedule", "recompute"),
    [
        (0.1, (6, 6), "1f1b", "never"),
        (None, (6, 6), "zbv", "always"),
        (0.1, (9, 6), "zbv", "always"),
        (None, (9, 6), "1f1b", "never"),
        (0.1, (6, 0), "1f1b", "never"),
        (None, (6, 0), "zbv", "always"),
    ],
)
def test_microbatch_batchnorm(
    four: Ranks, momentum: float | None, shards: tuple[int, int], schedule: str, recompute: str
) -> None:
    four.check(train_batchnorm, momentum, shards, schedule, recompute)


def train_deferred_batchnorm(rank: int, momentum: float | None, shards: Sequence[int]) -> None:
    """Statistics of the whole mini-batch; layer inputs do not depend on the normalisation of other layers."""
    mesh = ps.Mesh(data=2, pipe=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6, momentum=momentum), nn.Linear(6, CLASSES)).double()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"microbatches": 3, "mesh": mesh, "batchnorm": "deferred"}
    with ps.Pipeline(ps.split(model, stages=2), F.cross_entropy, **options) as pipe:
        for step in range(3):
            x, y = batch(step, sum(shards))
            x = x.double() + 1000
            pipe.step(*replica_samples(mesh, shards, x, y))
            plain(x)
            check_buffers(pipe, plain)


@pytest.mark.parametrize(
    ("momentum", "shards"), [(0.1, (6, 6)), (None, (9, 6)), (0.1, (9, 6)), (None, (6, 0)), (0.1, (0, 8))], ids=str
)
def test_deferred_batchnorm(four: Ranks, momentum: float | None, shards: tuple[int, int]) -> None:
    four.check(train_deferred_batchnorm, momentum, shards)


def train_dropout(rank: int) -> None:
    """With a seed, two replicas with two micro-batches use the random numbers of one pipeline with four."""
    mesh = ps.Mesh(data=2, pipe=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, CLASSES))
    plain = copy.deepcopy(model)
    x, y = batch(0, 12)
    alone = ps.Pipeline(ps.split(plain, stages=1), F.cross_entropy, microbatches=4, seed=7)
    pipe = ps.Pipeline(ps.split(model, stages=2), F.cross_entropy, microbatches=2, mesh=mesh, seed=7)
    with pipe, alone:
        for _ in range(2):
            torch.testing.assert_close(pipe.step(*replica_samples(mesh, EVEN, x, y)).loss, alone.step(x, y).loss)
            check_gradients(pipe, plain)


def test_seeded_dropout(four: Ranks) -> None:
    four.check(train_dropout)


def train_with_scaler(rank: int, shards: Sequence[int]) -> None:
    """An overflow on one replica skips the step on every rank."""
    mesh = ps.Mesh(data=2, pipe=2)
    torch.manual_seed(0)
    model = mlp()
    plain = copy.deepcopy(model)
    with ps.Pipeline(ps.split(model, stages=2), F.cross_entropy, microbatches=2, mesh=mesh) as pipe:
        scaler = ps.GradScaler(pipe, init_scale=1024.0, growth_interval=2)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(4):
            x, y = batch(step, sum(shards))
            if step == 2:
                x[0] = torch.inf
            pipe.step(*replica_samples(mesh, shards, x, y))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step != 2:
                F.cross_entropy(plain(x), y).backward()
                reference.step()
                reference.zero_grad()
            assert scaler.get_scale() == (1024.0, 2048.0, 1024.0, 1024.0)[step]
        expected = plain.state_dict()
        for name, tensor in pipe.state_dict().items():
            torch.testing.assert_close(tensor, expected[name])


@pytest.mark.parametrize("shards", [EVEN, ONE_EMPTY], ids=str)
def test_grad_scaler(four: Ranks, shards: tuple[int, int]) -> None:
    four.check(train_with_scaler, shards)


def accumulate_in_float32(rank: int) -> None:
    """Gradients of bfloat16 parameters are summed in float32 over micro-batches and replicas, and rounded once."""
    mesh = ps.Mesh(data=2, pipe=2)
    torch.manual_seed(0)
    model = mlp().bfloat16()
    plain = copy.deepcopy(model)
    x, y = batch(0, 12)
    x = x.bfloat16()
    options: dict[str, Any] = {"microbatches": 3, "mesh": mesh, "accumulate": "fp32", "reduction": "sum"}
    with ps.Pipeline(ps.split(model, stages=2), sum_of_squares, **options) as pipe:
        pipe.step(*replica_samples(mesh, EVEN, x, y))
        total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in plain.named_parameters()}
        for i, j in zip(x.split(2), y.split(2), strict=True):
            sum_of_squares(plain(i), j).backward()
            for name, parameter in plain.named_parameters():
                assert parameter.grad is not None
                total[name] += parameter.grad.float()
                parameter.grad = None
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, total[name].bfloat16(), rtol=0.008, atol=0)


def test_fp32_accumulation(four: Ranks) -> None:
    four.check(accumulate_in_float32)


# ── inputs and targets ─────────────────────────────────────────────────────────────────────────────────────────────


def train_with_inputs_on_some_ranks(rank: int, inputs: Sequence[int], targets: Sequence[int]) -> None:
    """Only the given ranks of each pipeline have inputs and targets."""
    mesh = ps.Mesh(data=2, pipe=2)
    torch.manual_seed(0)
    model = mlp()
    plain = copy.deepcopy(model)
    with ps.Pipeline(ps.split(model, stages=2), F.cross_entropy, microbatches=2, mesh=mesh) as pipe:
        for step in range(3):
            x, y = batch(step, 9)
            mine, wanted = replica_samples(mesh, UNEVEN, x, y)
            given = mine if mesh.pipe_rank in inputs else None, wanted if mesh.pipe_rank in targets else None
            result = pipe.step(*given)
            expected = F.cross_entropy(plain(x), y)
            expected.backward()
            torch.testing.assert_close(result.loss, expected.detach())
            check_gradients(pipe, plain)
            torch.testing.assert_close(pipe.evaluate(*given).loss, expected.detach())


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [((0,), (0,)), ((0,), (1,)), ((0,), (0, 1)), ((1,), (0,)), ((1,), (1,)), ((0, 1), (0,)), ((0, 1), (0, 1))],
    ids=str,
)
def test_inputs_and_targets_on_some_ranks(four: Ranks, inputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    four.check(train_with_inputs_on_some_ranks, inputs, targets)
