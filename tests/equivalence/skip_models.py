"""Models with skip connections between stages, of tensors and other values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from penstock.split import Edge
from penstock.split.plan import Groups, LayerChain, build_plan

WIDTH = 6


class SkipModel(nn.Module):
    """Layer ``i`` adds the outputs of the layers ``links[i]``, all below ``i``, to its own.

    The first stage also computes an integer tensor, a None and a float for the last layer.
    """

    def __init__(self, links: tuple[tuple[int, ...], ...], frozen: int = -1) -> None:
        super().__init__()
        self.links = links
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in links)
        if frozen >= 0:
            self.layers[frozen].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        known: dict[int, Any] = {-1: x}
        for i in range(len(self.links)):
            known[i] = self.layer(i, self.layers[i], known)
        return self.finish(known[len(self.links) - 1], self.extras(x))

    def layer(self, i: int, linear: nn.Module, known: dict[int, Any]) -> Any:
        out = torch.tanh(linear(known[i - 1]))
        for j in self.links[i]:
            out = out + known[j] * (j + 2)
        return out

    def extras(self, x: Tensor) -> Any:
        return (x[:, 0] > 0).long(), None, 0.5

    def finish(self, last: Any, extras: Any) -> Tensor:
        ids, nothing, number = extras
        assert nothing is None
        out: Tensor = last * (ids.unsqueeze(1) + number)
        return out


class SkipChain(LayerChain):
    """May be cut between any two layers; an edge connects each pair of stages that share a value."""

    def __init__(self, model: SkipModel) -> None:
        self.model = model
        self.layers = tuple(f"layers.{i}" for i in range(len(model.links)))
        self.recipe = {"front": "skips"}

    def members(self, layer: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.get_submodule(layer).named_parameters(layer)

    def edges(self, groups: Groups) -> tuple[Edge, ...]:
        found = {}
        for (src, dst), values in edge_values(self.model, groups).items():
            found[src, dst] = Edge(src, dst, tuple(str(value) for value in values))
        return tuple(found[key] for key in sorted(found))

    def stage(self, groups: Groups, index: int) -> nn.Module:
        assert isinstance(self.model, SkipModel)
        return SkipStage(self.model, groups, index)


def edge_values(model: SkipModel, groups: Groups) -> dict[tuple[int, int], list[int]]:
    """Per edge: the layers whose outputs it carries; -2 stands for the extras."""
    stage_of = {-1: 0, -2: 0}
    for s, layers in enumerate(groups):
        stage_of.update({int(layer.split(".")[1]): s for layer in layers})
    last = len(groups) - 1
    values: dict[tuple[int, int], list[int]] = {(s, s + 1): [] for s in range(last)}
    needs = [(i, j) for i, links in enumerate(model.links) for j in (i - 1, *links)]
    for i, j in needs:
        if stage_of[j] != stage_of[i] and j not in values.setdefault((stage_of[j], stage_of[i]), []):
            values[stage_of[j], stage_of[i]].append(j)
    if last:
        values.setdefault((0, last), []).append(-2)
    return values


class SkipStage(nn.Module):
    def __init__(self, model: SkipModel, groups: Groups, index: int) -> None:
        super().__init__()
        object.__setattr__(self, "_web", model)
        self._values = edge_values(model, groups)
        self._mine = [int(layer.split(".")[1]) for layer in groups[index]]
        self._index, self._last = index, len(groups) - 1
        self.layers = nn.Module()
        for i in self._mine:
            self.layers.add_module(str(i), model.layers[i])

    def forward(self, *arriving: Any) -> Any:
        sources = sorted(edge for edge in self._values if edge[1] == self._index)
        targets = sorted(edge for edge in self._values if edge[0] == self._index)
        known: dict[int, Any] = {}
        for edge, value in zip(sources, arriving, strict=bool(sources)):
            known.update(zip(self._values[edge], value, strict=True))
        if self._index == 0:
            known[-1] = arriving[0]["x"]
            known[-2] = self._web.extras(known[-1])
        for i in self._mine:
            known[i] = self._web.layer(i, self.layers.get_submodule(str(i)), known)
        if self._index == self._last:
            return self._web.finish(known[self._mine[-1]], known[-2])
        leaving = tuple(tuple(known[j] for j in self._values[edge]) for edge in targets)
        return leaving if len(leaving) > 1 else leaving[0]


@dataclass(frozen=True)
class SkipCase:
    """One model, one cut, one schedule, one mini-batch."""

    links: tuple[tuple[int, ...], ...]
    frozen: int
    balance: tuple[int, ...]
    schedule: str
    microbatches: int
    batch: int
    loss: str = "mean"
    recompute: str = "never"

    model_class = SkipModel

    def build(self) -> SkipModel:
        torch.manual_seed(len(self.links))
        return self.model_class(self.links, self.frozen).double()

    def plan(self, model: nn.Module) -> ps.Plan:
        assert isinstance(model, SkipModel)
        chain = SkipChain(model)
        ends = [sum(self.balance[: i + 1]) for i in range(len(self.balance))]
        return build_plan(chain, [chain.layers[end - size : end] for size, end in zip(self.balance, ends, strict=True)])

    @property
    def stages(self) -> int:
        return len(self.balance)

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.batch)
        x = torch.randn(self.batch, WIDTH, dtype=torch.float64, generator=generator)
        return x, torch.randint(WIDTH, (self.batch,), generator=generator)
