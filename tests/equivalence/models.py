"""Models described by plain data, so that a case can be shrunk, printed and pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from penstock.schedule import SCHEDULES

WIDTH = 6
CLASSES = 3

TRAINING = [*(name for name in SCHEDULES if name != "forward_only"), "auto"]


class Fork(nn.Module):
    """A tensor becomes a tuple that starts with an integer tensor: the first value on the edge has no gradient."""

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        return torch.arange(WIDTH, device=x.device).expand(len(x), -1), x, None, 2.5


class Gather(nn.Module):
    def forward(self, parts: tuple[Any, ...]) -> Tensor:
        ids, x, nothing, number = parts
        assert nothing is None
        return x.gather(1, ids) * number


class Pack(nn.Module):
    """A dict with a nested list; one of its tensors is not used."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"a": x, "more": [x * 2, x.detach()], "unused": x + 1}


class Unpack(nn.Module):
    def forward(self, packed: dict[str, Any]) -> Tensor:
        double, same = packed["more"]
        return packed["a"] * same + double


class Scale(nn.Module):
    """A parameter whose gradient cannot be deferred to W."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Twice(nn.Module):
    """A module called twice, and a parameter used by two ops."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(torch.tanh(self.inner(x)))
        return y + x @ self.inner.weight


class Convs(nn.Module):
    """Convolutions over the features of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.norm = nn.GroupNorm(1, 2)
        self.back = nn.ConvTranspose1d(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.back(self.norm(self.conv(x.unsqueeze(1))))
        return y.squeeze(1)


class Lookup(nn.Module):
    """An embedding whose indices are computed from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x[:, 0] * 10).long().remainder(5))


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


LAYERS = {
    "linear": lambda: [nn.Linear(WIDTH, WIDTH)],
    "no_bias": lambda: [nn.Linear(WIDTH, WIDTH, bias=False)],
    "frozen": lambda: [_frozen(nn.Linear(WIDTH, WIDTH))],
    "relu_": lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)],
    "tanh": lambda: [nn.Tanh()],
    "dropout_off": lambda: [nn.Dropout(0.0)],
    "layer_norm": lambda: [nn.LayerNorm(WIDTH)],
    "rms_norm": lambda: [nn.RMSNorm(WIDTH)],
    "scale": lambda: [Scale()],
    "twice": lambda: [Twice()],
    "convs": lambda: [Convs()],
    "lookup": lambda: [Lookup()],
    "tuple_edge": lambda: [Fork(), Gather()],
    "dict_edge": lambda: [Pack(), Unpack()],
    "identity": lambda: [nn.Identity()],
}


@dataclass(frozen=True)
class Case:
    """One model, one cut, one schedule, one mini-batch."""

    layers: tuple[str, ...]
    repeat_first: bool  # use the first linear again near the end
    cuts: int  # random seed of the balance
    schedule: str
    stages: int
    microbatches: int
    batch: int
    loss: str  # "mean", "sum", "ignore" or "pair"
    recompute: str = "never"
    weights: bool = False  # offload weights to the host

    def build(self) -> nn.Sequential:
        torch.manual_seed(len(self.layers) * 1000 + self.cuts)
        parts: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
        for name in self.layers:
            parts.extend(LAYERS[name]())
        if self.repeat_first:
            parts.append(parts[0])
        parts.append(nn.Linear(WIDTH, CLASSES))
        parts.extend(nn.Identity() for _ in range(self.stages - len(parts)))
        return nn.Sequential(*parts).double()

    def balance(self, layers: int) -> list[int]:
        """A random division of the layers into stages, none empty."""
        sizes = [1] * self.stages
        generator = torch.Generator().manual_seed(self.cuts)
        for _ in range(layers - self.stages):
            sizes[int(torch.randint(self.stages, (1,), generator=generator))] += 1
        return sizes

    def plan(self, model: nn.Module) -> ps.Plan:
        assert isinstance(model, nn.Sequential)
        return ps.split(model, balance=self.balance(len(model)))

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.batch)
        x = torch.randn(self.batch, WIDTH, dtype=torch.float64, generator=generator)
        y = torch.randint(CLASSES, (self.batch,), generator=generator)
        if self.loss in ("ignore", "pair"):
            y[::3] = -100
            y[-1] = 0
        return x, y


def stages_for(schedule: str, ranks: int) -> int:
    """The number of stages of the schedule on so many ranks; two per rank where the schedule allows any number."""
    return ranks * stages_per_rank(schedule)


def stages_per_rank(schedule: str) -> int:
    kind = SCHEDULES.get(schedule)
    return (kind.stages_per_rank if kind is not None else None) or 2
