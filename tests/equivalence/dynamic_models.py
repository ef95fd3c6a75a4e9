"""Models whose messages depend on the data: in shape, number of tensors, structure and presence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from tests.equivalence.models import CLASSES, WIDTH, Case, stages_for
from tests.equivalence.skip_models import SkipCase, SkipModel


class _TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)


class SelectRows(_TwoLinears):
    """Rows that a mask of the data selects, perhaps none."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.linear(x)
        where = (x[:, 0] > 0.3).nonzero()[:, 0]
        return h, self.other(h)[where], where


class ScatterRows(_TwoLinears):
    def forward(self, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        h, kept, where = parts
        return h.index_add(0, where, torch.tanh(self.linear(kept)))


class ListOfSlices(_TwoLinears):
    """A list of slices of different lengths; the data decides how many."""

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.linear(x)
        return [h, *(row[: 1 + i % WIDTH] for i, row in enumerate(h) if x[i, 1] > 0)]


class SumSlices(_TwoLinears):
    def forward(self, parts: list[Tensor]) -> Tensor:
        h = self.linear(parts[0])
        for piece in parts[1:]:
            h = h + piece.square().sum() * 0.1
        return h


class OptionalTensor(_TwoLinears):
    """A tensor or None, and Python values computed from the data; some are equal but of different types."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        up = bool(x.sum() > 0)
        return {
            "more": self.other(x) if up else None,
            "h": self.linear(x),
            "count": int((x > 0).sum()),
            "first": x[0, 0].item(),
            "word": "up" if up else "down",
            "one": 1 if up else True if x[0, 0] > 0 else 1.0,
        }


class UseOptionalTensor(_TwoLinears):
    def forward(self, parts: dict[str, Any]) -> Tensor:
        h = self.linear(parts["h"]) * (1 + parts["count"] / 10) + parts["first"]
        h = h * {bool: 2, int: 3, float: 4}[type(parts["one"])]
        assert (parts["word"] == "up") == (parts["more"] is not None)
        return h if parts["more"] is None else h + parts["more"]


class VaryingStructure(_TwoLinears):
    """A tensor, a tuple or a dict."""

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        if x[0, 0] > 0.5:
            return h
        return (h, self.other(x)) if x[0, 0] > 0 else {"h": h, "n": len(x)}


class UseVaryingStructure(_TwoLinears):
    def forward(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return self.linear(value)
        if isinstance(value, tuple):
            return self.linear(value[0]) * value[1]
        out: Tensor = value["h"] + value["n"]
        return out


class OptionalGradient(_TwoLinears):
    """The data decides whether a tensor requires a gradient, and whether the next layer uses it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, other = self.linear(x), self.other(x)
        return h, other if x[0, 1] > 0 else other.detach(), x


class UseOptionalGradient(_TwoLinears):
    def forward(self, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        h, other, x = parts
        h = h * 2 if x[0, 0] > 0 else self.linear(x) * 3  # else ``h`` gets no gradient
        return h + other if x[0, 2] > 0 else h


class SkippedLayer(_TwoLinears):
    """A layer that is skipped for some micro-batches, and a value computed with NumPy."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + float(x.detach().cpu().numpy().max())
        return x * scale if x[0, 0] > 0 else self.linear(x) * scale


LAYER_PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "rows": (SelectRows, ScatterRows),
    "slices": (ListOfSlices, SumSlices),
    "optional": (OptionalTensor, UseOptionalTensor),
    "structure": (VaryingStructure, UseVaryingStructure),
    "gradient": (OptionalGradient, UseOptionalGradient),
    "skipped": (SkippedLayer, SkippedLayer),
}


@dataclass(frozen=True)
class DynamicShapesCase:
    """A chain with a pair of layers around every cut, beginning with the pair ``first``."""

    first: str
    schedule: str
    ranks: int
    microbatches: int
    batch: int
    recompute: str = "never"
    loss: str = "ignore"

    dynamic = True

    @property
    def stages(self) -> int:
        return stages_for(self.schedule, self.ranks)

    def build(self) -> nn.Sequential:
        torch.manual_seed(self.batch)
        names = list(LAYER_PAIRS)
        start = names.index(self.first)
        parts: list[nn.Module] = []
        for i in range(self.stages - 1):
            before, after = LAYER_PAIRS[names[(start + i) % len(names)]]
            parts += [before(), nn.Sequential(after(), nn.Tanh())]
        return nn.Sequential(*parts, nn.Linear(WIDTH, CLASSES)).double()

    def plan(self, model: nn.Module) -> ps.Plan:
        return ps.split(model, balance=[1, *[2] * (self.stages - 1)])

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.batch)
        x = torch.randn(self.batch, WIDTH, dtype=torch.float64, generator=generator)
        return x, torch.randint(CLASSES, (self.batch,), generator=generator)


@dataclass(frozen=True)
class DynamicCase(Case):
    """A case with static shapes and ``dynamic=True``."""

    dynamic = True


class DynamicSkipModel(SkipModel):
    """Values, also those of skip connections, are rows selected by a mask, with their indices."""

    def layer(self, i: int, linear: nn.Module, known: dict[int, Any]) -> Any:
        out = torch.tanh(linear(_all_rows(known[i - 1])))
        for j in self.links[i]:
            out = out + _all_rows(known[j]) * (j + 2)
        where = (out[:, i % WIDTH] > 0).nonzero()[:, 0]
        return (out[where], where, len(out)) if len(where) < len(out) else out

    def extras(self, x: Tensor) -> Any:
        return None if x[0, 0] > 0 else (x[0, 0].item(), (x[:, 1] > 0).nonzero())

    def finish(self, last: Any, extras: Any) -> Tensor:
        out = _all_rows(last)
        return out if extras is None else out * extras[0] + len(extras[1])


def _all_rows(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    rows, where, count = value
    out: Tensor = rows.new_zeros(count, rows.shape[1])
    return out.index_copy(0, where, rows)


@dataclass(frozen=True)
class DynamicSkipCase(SkipCase):
    """Skip connections with data-dependent shapes."""

    model_class = DynamicSkipModel
    dynamic = True
