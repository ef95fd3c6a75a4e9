"""Arguments of PopTorch models: positional and keyword arguments together, ``*args``, absent and 0-dim tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock.compat.poptorch as poptorch
from tests.compat.poptorch_models import WIDTH, data, options
from tests.compat.poptorch_models import plainly as plainly

STAGES = poptorch.PipelinedExecution("A", "B")


class Variadic(nn.Module):
    """``*args`` and a keyword; with a mini-batch of labels it returns a loss as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, *args: Tensor, flag: Tensor) -> Any:
        return self.result(len(args) * self.first(sum(args)), flag)

    def result(self, x: Tensor, flag: Tensor) -> Any:
        x = self.last(torch.tanh(x))
        return x, (x - flag).square().mean()


class VariadicBlocks(Variadic):
    def forward(self, *args: Tensor, flag: Tensor) -> Any:
        with poptorch.Block("A"):
            x = len(args) * self.first(sum(args))
        with poptorch.Block("B"):
            return self.result(x, flag)


class Keywords(Variadic):
    """A call by names alone would succeed, with ``args`` among the keywords."""

    def forward(self, *args: Tensor, **others: Tensor) -> Any:
        return self.result((1 + len(args)) * self.first(sum(args, torch.ones(()))), others["flag"])


class PositionalOnly(Variadic):
    def forward(self, x: Tensor, /, *args: Tensor, flag: Tensor) -> Any:
        return self.result(self.first(x - sum(args)), flag)


@pytest.mark.parametrize("kind", [Variadic, VariadicBlocks, Keywords, PositionalOnly])
@pytest.mark.parametrize("count", [1, 4])
def test_positional_arguments_stay_positional(kind: type[Variadic], count: int) -> None:
    ours = kind()
    plain = copy.deepcopy(ours)
    strategy = STAGES if kind is VariadicBlocks else None
    x, _ = data(12)
    args = [x + i for i in range(count)]
    expected = plain(*args, flag=x)
    inference = poptorch.inferenceModel(ours, options(strategy, iterations=3))
    torch.testing.assert_close(inference(*args, flag=x)[0], expected[0].detach())
    inference.destroy()
    training = poptorch.trainingModel(
        ours, options(strategy, accumulation=3), poptorch.optim.SGD(ours.parameters(), lr=0.1)
    )
    training(*args, flag=x)
    training.copyWeightsToHost()
    expected[1].backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())


class Optional(nn.Module):
    """A scale and a shift that may be absent, in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        with poptorch.Block("A"):
            x = torch.tanh(self.first(x))
        with poptorch.Block("B"):
            x = self.last(x if scale is None else x * scale)
            return x if shift is None else x + shift


def test_absent_and_0_dim_tensors() -> None:
    model = Optional()
    ours = poptorch.inferenceModel(model, options(STAGES, iterations=3))
    x, _ = data(12)
    two = torch.tensor(2.0, dtype=torch.float64)
    for args, kwargs in (((x, None, x), {}), ((x, two), {}), ((x,), {"scale": None, "shift": two}), ((x, x, None), {})):
        torch.testing.assert_close(ours(*args, **kwargs), model(*args, **kwargs).detach())


class Scalar(nn.Module):
    """Takes one number and returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).square()


def test_0_dim_tensors_alone_are_one_sample() -> None:
    model = Scalar()
    assert poptorch.inferenceModel(model)(torch.tensor(2.0)) == 36
    poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.125))(torch.tensor(2.0))
    assert model.weight.item() == 0
    with pytest.raises(AssertionError, match=r"the batch dimension \(1\) must be a multiple of .* = 2"):
        poptorch.inferenceModel(model, options(iterations=2))(torch.tensor(2.0))
    with pytest.raises(poptorch.Error, match="there are none"):
        poptorch.inferenceModel(model)(2.0)


class NestedLosses(Variadic):
    def forward(self, x: Tensor) -> Any:
        with poptorch.Block("A"):
            x = self.first(x)
        with poptorch.Block("B"):
            x = self.last(torch.tanh(x))
            parts = poptorch.identity_loss(x.square(), "mean"), poptorch.identity_loss(x.abs(), "mean")
            return *parts, poptorch.identity_loss(poptorch.identity_loss(parts[0] + parts[1], "none"), "none")


def test_of_nested_losses_the_outermost_is_trained_by() -> None:
    ours = NestedLosses()
    plain = copy.deepcopy(ours)
    x, _ = data(6)
    optimizer = poptorch.optim.SGD(ours.parameters(), lr=0.1)
    outputs = poptorch.trainingModel(ours, options(STAGES, accumulation=3), optimizer)(x)
    torch.testing.assert_close(outputs[0] + outputs[1], outputs[2])
    plain(x)[2].backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())


class IndependentLosses(Variadic):
    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return poptorch.identity_loss(x.square(), "mean"), poptorch.identity_loss(x.abs(), "mean")


def test_independent_losses_are_refused() -> None:
    with pytest.raises(poptorch.Error, match="Multiple independent losses found in graph: 2 outputs"):
        poptorch.trainingModel(IndependentLosses())(data(4)[0])
