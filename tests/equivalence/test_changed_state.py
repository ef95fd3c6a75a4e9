"""State that a forward changes: a recompute finds it as the first run did, and leaves the plain model's behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps

WIDTH, BATCH, MICROBATCHES = 4, 8, 4


def check(layer: Callable[[], nn.Module], schedule: str = "1f1b", recompute: str = "always") -> None:
    """Two steps equal a loop over the micro-batches: loss, gradients, parameters and buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(), nn.Linear(WIDTH, WIDTH), layer())
    plain = copy.deepcopy(model)
    pipe = ps.Pipeline(
        ps.split(model, balance=[2, 2]), F.mse_loss, microbatches=MICROBATCHES, schedule=schedule, recompute=recompute
    )
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for step in range(2):
        x, y = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        result = pipe.step(x, y)
        total = torch.zeros(())
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            loss = F.mse_loss(plain(part), target) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        torch.testing.assert_close(result.loss, total)
        for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, msg=lambda text, name=name: f"gradient of {name}: {text}")
        for (name, value), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(value, other, msg=lambda text, name=name: f"{name}: {text}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(model, plain, strict=True):
        state = [{k: v for k, v in vars(one).items() if isinstance(v, (int, list))} for one in (mine, other)]
        assert state[0] == state[1]


class Codebook(nn.Module):
    """Nearest of some vectors, which are running means and not trained; as in a VQ-VAE."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH)
        self.table.weight.requires_grad_(False)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.table.weight).argmin(-1)
        found = self.table(nearest)
        with torch.no_grad():
            means = self.table.weight.lerp(x.mean(0), 0.2)
            if self.way == "in place":
                self.table.weight.copy_(means)
            elif self.way == "data":
                self.table.weight.data.copy_(means)
            elif self.way == "other memory":
                self.table.weight.data = means
            else:
                self.table.weight = nn.Parameter(means, requires_grad=False)
        return x + found.detach() * x.sigmoid()


class Shrinking(nn.Module):
    """A trained weight that a forward changes before it uses it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "data":
            self.weight.data.mul_(0.8)
        else:
            with torch.no_grad():
                self.weight.mul_(0.8)
        return F.linear(x, self.weight).tanh()


class Renormed(nn.Module):
    """torch's own: an embedding whose forward shortens its vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.detach().abs().sum(-1).long() % 3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(
    "layer",
    [
        *(lambda way=way: Codebook(way) for way in ("in place", "data", "other memory", "another parameter")),
        *(lambda way=way: Shrinking(way) for way in ("in place", "data")),
        Renormed,
    ],
)
def test_parameters_that_a_forward_changes(layer: Callable[[], nn.Module], schedule: str) -> None:
    """A recompute changed a codebook once more, and used values of later micro-batches."""
    check(layer, schedule)


def test_a_parameter_that_begins_to_change_is_an_error_once() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))
            self.register_buffer("now", torch.tensor(False))

        def forward(self, x: Tensor) -> Tensor:
            if self.now:
                with torch.no_grad():
                    self.weight.mul_(0.9)
            return x * self.weight.clone()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Late(), nn.Linear(WIDTH, WIDTH))
    pipe = ps.Pipeline(ps.split(model, balance=[1, 2]), F.mse_loss, microbatches=2, recompute="always")
    x, y = torch.randn(2, BATCH, WIDTH)
    pipe.step(x, y)
    late: Any = model[1]
    late.now.fill_(True)
    with pytest.raises(ps.PlanError, match=r"changed 1\.weight \(16 bytes\).*run the step again"):
        pipe.step(x, y)
    pipe.step(x, y)
