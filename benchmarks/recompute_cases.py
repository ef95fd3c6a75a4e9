"""The models of ``recompute``, and their training loops: plain, with Penstock, with torchgpipe."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps

__all__ = ["RANKS", "Case", "Step", "Variant", "cases", "variants"]

RANKS = 4
MODES = ("never", "except_last", "always")
Step = Callable[[], float]


def convs(before: int, after: int) -> nn.Sequential:
    pairs = [(before, after), (after, after)]
    return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())))


def unet(skips: Any, channels: int, depth: int) -> nn.Sequential:
    """A U-Net with ``skips.stash`` and ``skips.pop``, which are the same in penstock and torchgpipe."""

    class Down(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.convs = convs(before, after)

        def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
            x = self.convs(x)
            yield skips.stash("skip", x)
            return F.max_pool2d(x, 2)

    class Up(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.up, self.convs = nn.ConvTranspose2d(before, after, 2, stride=2), convs(2 * after, after)

        def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
            skip = yield skips.pop("skip")
            return self.convs(torch.cat([self.up(x), skip], dim=1))

    down, up = skips.skippable(stash=["skip"])(Down), skips.skippable(pop=["skip"])(Up)
    levels = [(channels * 2**i, skips.Namespace()) for i in range(depth)]
    return nn.Sequential(
        *(down(1 if i == 0 else c // 2, c).isolate(level) for i, (c, level) in enumerate(levels)),
        convs(channels * 2 ** (depth - 1), channels * 2**depth),
        *(up(2 * c, c).isolate(level) for c, level in reversed(levels)),
        nn.Conv2d(channels, 1, 1),
    )


def transformer(skips: Any, layers: int, dim: int) -> nn.Sequential:
    blocks = [nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(dim, 16))


@dataclass(frozen=True)
class Case:
    """A model, the balance of its stages, and its mini-batch."""

    name: str
    make: Callable[[Any], nn.Sequential]
    balance: tuple[int, ...]
    sample: tuple[int, ...]
    target: tuple[int, ...]
    microbatches: int
    size: int  # samples per micro-batch
    device: torch.device

    def model(self, skips: Any = ps) -> tuple[nn.Sequential, list[Sequence[nn.Module]]]:
        """The model, and the layers of each stage."""
        torch.manual_seed(0)
        model = self.make(skips).to(self.device)
        ends = [sum(self.balance[: i + 1]) for i in range(RANKS)]
        return model, [list(model)[end - count : end] for end, count in zip(ends, self.balance, strict=True)]

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        shapes = ((self.microbatches * self.size, *shape) for shape in (self.sample, self.target))
        x, y = (torch.randn(shape, generator=generator).to(self.device) for shape in shapes)
        return x, y


def cases(quick: bool, device: torch.device) -> list[Case]:
    each, side = (1, 32) if quick else (4, 64)  # transformer layers per stage, pixels
    m, deep = 8, partial(transformer, layers=RANKS * each, dim=128)
    return [
        Case("U-Net", partial(unet, channels=8, depth=3), (1, 2, 2, 3), (1, side, side), (1, side, side), m, 2, device),
        Case("transformer", deep, (each, each, each, each + 1), (64, 128), (64, 16), m, 2, device),
    ]


# ── variants ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Variant:
    name: str
    step: Step
    stages: Sequence[Sequence[nn.Module]]
    schedule: str
    mode: str = "never"


def plain(case: Case, accumulate: bool) -> Variant:
    model, stages = case.model()
    x, y = case.data()

    def step() -> float:
        number = case.microbatches if accumulate else 1
        total = 0.0
        for part, target in zip(x.chunk(number), y.chunk(number), strict=True):
            loss = F.mse_loss(model(part), target) / number
            loss.backward()
            total += float(loss.detach())
        return total

    name = "plain, micro-batch by micro-batch" if accumulate else "plain, whole mini-batch"
    return Variant(name, step, stages, "accumulate" if accumulate else "whole")


def ours(case: Case, schedule: str, mode: str, stack: ExitStack) -> Variant:
    model, stages = case.model()
    x, y = case.data()
    plan = ps.split(model, balance=list(case.balance))
    options: dict[str, Any] = {"microbatches": case.microbatches, "schedule": schedule, "outputs": None}
    pipe = ps.Pipeline(plan, F.mse_loss, recompute=mode, devices=[str(case.device)] * RANKS, **options)
    stack.callback(pipe.close)
    return Variant(f"ours {schedule}, {mode}", lambda: float(pipe.step(x, y).loss), stages, schedule, mode)


def torchgpipe(case: Case, mode: str) -> Variant:
    library, skips = importlib.import_module("torchgpipe"), importlib.import_module("torchgpipe.skip")
    model, stages = case.model(skips)
    x, y = case.data()
    options = {"balance": list(case.balance), "devices": [case.device] * RANKS, "chunks": case.microbatches}
    pipe = library.GPipe(model, **options, checkpoint=mode)

    def step() -> float:
        loss = F.mse_loss(pipe(x), y)
        loss.backward()
        return float(loss.detach())

    return Variant(f"torchgpipe, {mode}", step, stages, "torchgpipe", mode)


def variants(case: Case, stack: ExitStack) -> tuple[list[Variant], dict[str, str]]:
    """All variants that can run here, and the reasons why the others cannot."""
    found = [plain(case, accumulate=False), plain(case, accumulate=True)]
    found += [ours(case, schedule, mode, stack) for schedule in ("gpipe", "1f1b") for mode in MODES]
    missing = {}
    for mode in MODES:
        try:
            variant = torchgpipe(case, mode)
            variant.step()
            found.append(variant)
        except ImportError as error:
            absent = isinstance(error, ModuleNotFoundError) and error.name == "torchgpipe"
            missing[f"torchgpipe, {mode}"] = "not installed" if absent else repr(error)
        except Exception as error:  # does not support this torch
            missing[f"torchgpipe, {mode}"] = repr(error)
    return found, missing
