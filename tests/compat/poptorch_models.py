"""Small models with blocks, in double precision, and what a plain loop makes of a PopTorch call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock.compat.poptorch as poptorch

WIDTH = 4


@pytest.fixture(autouse=True)
def plainly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On the CPU, unless a test is for a GPU; and in one thread: on so few samples others are no help."""
    if "cuda" not in request.keywords:
        monkeypatch.setattr("penstock.compat.poptorch.executor.device_of_ipu", lambda ipu: torch.device("cpu"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """Four blocks by scopes; the loss is computed where there are labels."""

    def __init__(self, ipus: Sequence[int | None] = (None,) * 4) -> None:
        super().__init__()
        self.ipus = ipus
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.double()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        for number, layer in enumerate(self.layers):
            with poptorch.Block(f"B{number + 1}", self.ipus[number]):
                x = torch.tanh(layer(x))
                if number == 1:
                    x = self.norm(x)
        if labels is None:
            return x
        with poptorch.Block("B4"):
            return x, F.cross_entropy(x, labels)


class Plain(nn.Module):
    """No blocks, and a forward that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        x = self.last(torch.tanh(self.first(x if x.sum() > 0 else -x)))
        return x if labels is None else (x, F.cross_entropy(x, labels))


def made(model: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return model()


def data(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, WIDTH, dtype=torch.float64, generator=generator)
    return x, torch.randint(WIDTH, (samples,), generator=generator)


STAGES = poptorch.PipelinedExecution("B1", "B2", "B3", "B4")


def options(strategy: Any = None, *, accumulation: int = 1, iterations: int = 1, replicas: int = 1) -> poptorch.Options:
    made = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    made.Training.gradientAccumulation(accumulation)
    return made if strategy is None else made.setExecutionStrategy(strategy)


def plain_call(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    *,
    iterations: int = 1,
    accumulation: int = 1,
    mean: bool = True,
) -> list[tuple[Tensor, Tensor]]:
    """A PopTorch call in plain torch; the outputs of all micro-batches."""
    outputs = []
    parts = iterations * accumulation
    pairs = list(zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True))
    for iteration in range(iterations):
        optimizer.zero_grad()
        for x, labels in pairs[iteration * accumulation : (iteration + 1) * accumulation]:
            output, loss = model(x, labels)
            (loss / accumulation if mean else loss).backward()
            outputs.append((output.detach(), loss.detach()))
        optimizer.step()
    return outputs


def assert_same_state(ours: nn.Module, plain: nn.Module) -> None:
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())


def twins(model: Callable[[], nn.Module] = Net) -> tuple[nn.Module, nn.Module]:
    ours = made(model)
    return ours, copy.deepcopy(ours)
