"""Models with cut points that compute their own loss, and a training loop as programs for Varuna have it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.compat.varuna import CutPoint, Varuna

WIDTH = 6


class Tower(nn.Module):
    """Blocks with a cut point after each, in a list or, as in Varuna's document, in a plain one; then the loss."""

    def __init__(self, cuts: int = 7, plain_list: bool = False, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(cuts))
        points = [CutPoint() for _ in range(cuts)]
        self.cutpoints = points if plain_list else nn.ModuleList(points)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        for block, point in zip(self.blocks, self.cutpoints, strict=True):
            x = point(torch.tanh(block(x)))
        if mask is not None:
            x = x * mask
        return F.cross_entropy(self.head(x), labels)


class Words(nn.Module):
    """A language model with its word embedding in two parameters, and its position embedding too."""

    def __init__(self, cuts: int = 7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, WIDTH)
        self.position = nn.Parameter(torch.randn(4, WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(cuts))
        self.cutpoints = nn.ModuleList(CutPoint() for _ in range(cuts))
        self.late_position = nn.Parameter(self.position.detach().clone())
        self.lm_head_weight = nn.Parameter(self.embedding.weight.detach().clone())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position
        for i, (block, point) in enumerate(zip(self.blocks, self.cutpoints, strict=True)):
            if i == 4:
                x = x + self.late_position
            x = point(torch.tanh(block(x)))
        return F.cross_entropy(F.linear(x, self.lm_head_weight).flatten(0, 1), ids.roll(1, 1).flatten())


TIES = [("embedding.weight", "lm_head_weight"), ("position", "late_position")]


def tied(model: Words) -> Words:
    """The same model as one device has it: with one parameter in the place of each pair."""
    model.lm_head_weight, model.late_position = model.embedding.weight, model.position
    return model


def data(samples: int = 10, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, WIDTH, generator=generator),
        "labels": torch.randint(3, (samples,), generator=generator),
    }


def tokens(samples: int = 6, seed: int = 1) -> dict[str, Tensor]:
    return {"ids": torch.randint(11, (samples, 4), generator=torch.Generator().manual_seed(seed))}


def share(batch: dict[str, Any], part: int, parts: int) -> dict[str, Any]:
    """One replica's samples."""
    return {name: value.tensor_split(parts)[part] if value.shape[0] > 1 else value for name, value in batch.items()}


@contextmanager
def wrapped(
    model: nn.Module, stages: Any, batch_size: int = 10, chunk_size: int = 3, **options: Any
) -> Iterator[Varuna]:
    """The model on this rank; if the case fails here, the other ranks learn of it."""
    inputs = tokens() if isinstance(model, Words) else data()
    made = Varuna(model, stages, inputs, batch_size, chunk_size, device="cpu", **options)
    with made.pipeline:
        yield made


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def plain_run(model: nn.Module, batches: Sequence[dict[str, Tensor]], clip: float | None = None) -> tuple[Any, ...]:
    """Losses and norms of plain training, and the parameters after it."""
    model = copy.deepcopy(model)
    optimizer = adam(model)
    losses, norms = [], []
    for batch in batches:
        loss = model(**batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: value.clone() for name, value in model.state_dict().items()}
