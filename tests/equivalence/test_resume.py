"""A run that is stopped, saved and resumed elsewhere has the losses of the run that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow

STEPS = 2  # of each leg


class Net(nn.Module):
    """Embedding and head are tied, one layer is frozen, and there is a buffer that counts."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(8))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.layers[2][0].weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def model(dropout: float) -> Net:
    torch.manual_seed(0)
    return Net(dropout)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 20, (8,), generator=generator), torch.randint(0, 20, (8,), generator=generator)


def optimizer_of(named: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Two parameter groups, one of which every rank has, and a schedule of learning rates."""
    parameters = [(name, p) for name, p in named if p.requires_grad]
    layers = [p for name, p in parameters if "layers" in name]
    others = [p for name, p in parameters if "layers" not in name] or [torch.zeros(0, requires_grad=True)]
    groups = [{"params": layers, "weight_decay": 0.1}, {"params": others, "lr": 3e-2}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


def pipeline_leg(
    folder: Path,
    start: int,
    dropout: float,
    stages: int,
    microbatches: int,
    mesh: ps.Mesh | None = None,
    **options: Any,
) -> list[float]:
    """Two steps of a pipeline, from the checkpoint of the step before, and a checkpoint of the step after."""
    plan = ps.split(model(dropout), blocks="layers", stages=stages, sample=batch(0)[0], balance="parameters")
    with ps.Pipeline(plan, F.cross_entropy, microbatches=microbatches, seed=7, mesh=mesh, **options) as pipe:
        optimizer, scheduler = optimizer_of(pipe.named_parameters())
        checkpoints = ps.Checkpoints(folder, every=STEPS, keep=2)
        assert checkpoints.load(pipe, optimizer, lr_scheduler=scheduler) == start
        losses = []
        for step in range(start, start + STEPS):
            share = [part.chunk(mesh.data)[mesh.data_rank] if mesh else part for part in batch(step)]
            losses.append(float(pipe.step(*share).loss))
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            checkpoints.save(step + 1, pipe, optimizer, lr_scheduler=scheduler, asynchronous=stages % 2 == 1)
        checkpoints.wait()
    return losses


def plain_leg(folder: Path | None, start: int, steps: int) -> list[float]:
    """The same steps of the plain model, from a checkpoint and with one after them where there is a folder."""
    net = model(0.0)
    optimizer, scheduler = optimizer_of(net.named_parameters())
    checkpoints = None if folder is None else ps.Checkpoints(folder)
    if checkpoints is not None:
        assert checkpoints.load(net, optimizer, lr_scheduler=scheduler) == start
    losses = []
    for step in range(start, start + steps):
        tokens, targets = batch(step)
        loss = F.cross_entropy(net(tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    if checkpoints is not None:
        checkpoints.save(start + steps, net, optimizer, lr_scheduler=scheduler)
    return losses


def on_rank(rank: int, sizes: dict[str, int], *args: Any, **options: Any) -> list[float]:
    return pipeline_leg(*args, mesh=ps.Mesh(**sizes), **options)


def on_rank_interleaved(rank: int, sizes: dict[str, int], *args: Any) -> list[float]:
    return on_rank(rank, sizes, *args, schedule="interleaved")


def test_a_run_moves_between_stages_replicas_threads_processes_and_the_plain_model(
    tmp_path: Path, two: Ranks, four: Ranks
) -> None:
    legs = [
        lambda at: pipeline_leg(tmp_path, at, 0.0, 1, 2),
        lambda at: four.check(on_rank, {"pipe": 4}, tmp_path, at, 0.0, 4, 2)[0],
        lambda at: two.check(on_rank_interleaved, {"pipe": 2}, tmp_path, at, 0.0, 8, 2)[1],
        lambda at: plain_leg(tmp_path, at, STEPS),
        lambda at: pipeline_leg(tmp_path, at, 0.0, 3, 4, schedule="zb_h1"),
        lambda at: four.check(on_rank, {"data": 2, "pipe": 2}, tmp_path, at, 0.0, 2, 2)[3],
        lambda at: pipeline_leg(tmp_path, at, 0.0, 4, 2, schedule="zbv", devices=["cpu"] * 2),
    ]
    losses = [loss for number, leg in enumerate(legs) for loss in leg(number * STEPS)]
    expected = plain_leg(None, 0, len(legs) * STEPS)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    assert [path.name for path in ps.Checkpoints(tmp_path).paths()] == ["step-00000014", "step-00000012"]


def test_seeded_dropout_goes_on_after_a_move(tmp_path: Path, two: Ranks) -> None:
    legs = [
        lambda folder, at: pipeline_leg(folder, at, 0.3, 2, 2),
        lambda folder, at: two.check(on_rank, {"pipe": 2}, folder, at, 0.3, 2, 2)[0],
        lambda folder, at: two.check(on_rank, {"data": 2, "pipe": 1}, folder, at, 0.3, 1, 1)[0],
    ]
    losses = [loss for number, leg in enumerate(legs) for loss in leg(tmp_path / "moved", number * STEPS)]
    stayed = [loss for number in range(len(legs)) for loss in legs[0](tmp_path / "stayed", number * STEPS)]
    torch.testing.assert_close(losses, stayed, rtol=1e-5, atol=0)


def test_a_resumed_run_is_bit_equal_where_the_arithmetic_is_the_same(tmp_path: Path) -> None:
    """In one stage: threads of several stages add the gradients of a tied parameter in no fixed order."""
    losses = [loss for number in range(3) for loss in pipeline_leg(tmp_path / "a", number * STEPS, 0.3, 1, 4)]
    plan = ps.split(model(0.3), blocks="layers", stages=1, sample=batch(0)[0], balance="parameters")
    with ps.Pipeline(plan, F.cross_entropy, microbatches=4, seed=7) as pipe:
        optimizer, scheduler = optimizer_of(pipe.named_parameters())
        for step in range(3 * STEPS):
            assert float(pipe.step(*batch(step)).loss) == losses[step]
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
