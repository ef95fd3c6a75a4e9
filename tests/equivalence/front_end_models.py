"""One network, written for each front end of ``ps.split``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from tests.equivalence.models import CLASSES, WIDTH


class Norm(nn.Module):
    """A residual layer with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Parts(nn.Module):
    """Eight layers and a head; the head also uses the input and the output of the stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Norm() for _ in range(8))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.points = [ps.CutPoint() for _ in range(8)]


class Marked(Parts):
    def forward(self, x: Tensor) -> Tensor:
        early = h = torch.relu(self.stem(x))
        for point, layer in zip(self.points, self.layers, strict=True):
            h = layer(point(h))
        return self.head(h * self.scale + early + x)


class Bare(Parts):
    """The same without cut points."""

    def __init__(self) -> None:
        super().__init__()
        del self.points

    def forward(self, x: Tensor) -> Tensor:
        early = h = torch.relu(self.stem(x))
        for layer in self.layers:
            h = layer(h)
        return self.head(h * self.scale + early + x)


class Blocked(Bare):
    def forward(self, x: Tensor) -> Tensor:
        with ps.Block("B0"):
            early = h = torch.relu(self.stem(x))
        for i, layer in enumerate(self.layers):
            with ps.Block(f"B{i}"):
                h = layer(h)
        return self.head(h * self.scale + early + x)


@ps.skippable(stash=["early"])
class Stem(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        h = torch.relu(super().forward(x))
        yield ps.stash("early", h)
        return h


@ps.skippable(pop=["early"])
class Head(nn.Linear):
    def forward(self, h: Tensor) -> Any:
        early = yield ps.pop("early")
        return super().forward(h + early)


def sequential() -> nn.Sequential:
    return nn.Sequential(Stem(WIDTH, WIDTH), *(Norm() for _ in range(8)), Head(WIDTH, CLASSES))


FRONT_ENDS = ("marks", "blocks", "cuts", "automatic", "block list", "skips", "flatten", "lazy")


@dataclass(frozen=True)
class FrontEndCase:
    """One front end, one schedule, one mini-batch. BatchNorm uses statistics of micro-batches, as in the plain loop."""

    front_end: str
    stages: int
    schedule: str
    microbatches: int
    batch: int
    loss: str = "mean"
    recompute: str = "never"

    def build(self) -> nn.Module:
        torch.manual_seed(3)
        if self.front_end in ("skips", "lazy", "flatten"):
            return sequential().double()
        kinds = {"marks": Marked, "blocks": Blocked}
        return kinds.get(self.front_end, Bare)().double()

    def plan(self, model: nn.Module) -> ps.Plan:
        if self.front_end == "blocks":
            size = 8 // self.stages
            names = [f"B{i}" for i in range(8)]
            return ps.split(model, stages=[names[i * size : i * size + size] for i in range(self.stages)])
        if self.front_end == "cuts" and self.stages > 1:
            places = [8 * i // self.stages for i in range(1, self.stages)]
            return ps.split(model, cuts=[f"layers.{place}" for place in places])
        if self.front_end == "block list":
            return ps.split(model, blocks="layers", stages=self.stages)
        if self.front_end == "flatten":
            parts = dict(model.named_children())
            flat = ps.flatten(model, [*parts])
            return ps.split(flat, stages=self.stages)
        if self.front_end == "lazy":
            assert isinstance(model, nn.Sequential)
            lazy = nn.Sequential(*(ps.Lazy(lambda layer=layer: layer) for layer in model))  # type: ignore[misc]
            return ps.split(lazy, balance="uniform", stages=self.stages)
        return ps.split(model, stages=self.stages)

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.batch)
        x = torch.randn(self.batch, WIDTH, dtype=torch.float64, generator=generator)
        return x, torch.randint(CLASSES, (self.batch,), generator=generator)
