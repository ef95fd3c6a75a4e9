"""torchgpipe's balancing, in both orders of arguments."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.compat.torchgpipe.balance import balance_by_size, balance_by_time, balance_cost, blockpartition
from penstock.compat.torchgpipe.balance.profile import layerwise_sandbox
from penstock.compat.torchgpipe_balancing import balance_by_time as old_balance_by_time
from tests.support.models import assert_same, snapshot


class Delay(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x


def delays() -> nn.Sequential:
    return nn.Sequential(*(Delay(0.005 * i) for i in (1, 2, 3, 4, 5, 6)))


class Fn(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Any) -> Any:
        return self.fn(x)


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_both_argument_orders() -> None:
    model, x = delays(), torch.rand(1)
    assert old_balance_by_time is balance_by_time
    assert balance_by_time(2, model, x, timeout=0.0, device="cpu") == [4, 2]
    assert balance_by_time(model, x, partitions=2, timeout=0.0) == [4, 2]
    assert balance_by_time(2, module=model, sample=x, timeout=0.0) == [4, 2]
    assert balance_by_time(model, x, timeout=0.0) == [6]


def test_balance_by_size_on_the_cpu() -> None:
    """torchgpipe: size profiler supports only CUDA device."""

    def layer(n: int) -> nn.Module:
        return Fn(lambda x: torch.cat([x] * n).exp().sum(0, keepdim=True))

    wide, x = nn.Sequential(*(layer(n) for n in (1, 2, 3, 4, 5, 6))), torch.rand(1, 1000, requires_grad=True)
    assert balance_by_size(2, wide, x) == [4, 2]
    assert balance_by_size(wide, x, partitions=2) == [4, 2]


def test_param_scale_and_chunks() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), Fn(torch.exp), Fn(torch.exp), Fn(torch.exp))
    x = torch.rand(64, 64, requires_grad=True)
    assert balance_by_size(2, model, x, param_scale=0.1) == [2, 2]
    assert balance_by_size(2, model, x, param_scale=50.0) == [1, 3]
    assert balance_by_size(2, model, x, chunks=64) == [1, 3]


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda m, x: balance_by_time(3, m, x), ValueError, r"sequence is shorter than intended partitions \(2 < 3\)"),
        (lambda m, x: balance_by_time(0, m, x), ValueError, r"partitions must be a positive integer \(0 < 1\)"),
        (lambda m, x: balance_by_time(2, m), TypeError, "got .'int', 'Sequential'.$"),
        (lambda m, x: balance_by_size(m, partitions=2), TypeError, "got .'Sequential', 'partitions=…'.$"),
        (lambda m, x: balance_by_time(2, m, x, 3), TypeError, r"takes \(partitions, module, sample\), or \(module"),
        (lambda m, x: balance_by_time(2, m, x, samples=3), TypeError, "'Tensor', 'samples=…'.$"),
        (lambda m, x: balance_by_time(2, m, x, module=m), TypeError, "'Tensor', 'module=…'.$"),
    ],
)
def test_wrong_arguments(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), torch.rand(1, 1))


def test_existing_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model(torch.rand(1, 1)).backward()
    with pytest.raises(ValueError, match="some parameter already has gradient"):
        balance_by_time(1, model, torch.rand(1, 1), device="cpu")


# ── what is measured ─────────────────────────────────────────────────────────────────────────────────────────────


def test_layers_are_measured_in_training_mode_and_left_as_they_were() -> None:
    def check(x: Tensor) -> Tensor:
        assert layer.training
        return x

    layer = Fn(check)
    model = nn.Sequential(nn.BatchNorm1d(3), layer, nn.Dropout(0.5)).eval()
    model[2].train()
    before = copy.deepcopy(snapshot(model))
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    balance_by_time(2, model, torch.rand(4, 3, generator=torch.Generator()), timeout=0.0, device="cpu")
    assert_same(torch.rand(1), expected)
    assert_same(snapshot(model), before)


def test_samples_may_be_tuples() -> None:
    model = nn.Sequential(Fn(lambda x: (x, x.detach())), Fn(lambda ab: ab[0] + ab[1]))
    assert balance_by_time(2, model, torch.rand(1, requires_grad=True), timeout=0.0, device="cpu") == [1, 1]
    pair = nn.Sequential(Fn(lambda ab: ab[0] + ab[1]))
    assert balance_by_time(1, pair, (torch.rand(1), torch.rand(1)), timeout=0.0, device="cpu") == [1]
    alone = nn.Sequential(Fn(lambda a: a[0] + 1))
    assert balance_by_size(1, alone, (torch.rand(3, 4),), device="cpu") == [1]
    alone = nn.Sequential(Fn(lambda a: (len(a) == 1 or 1 / 0) and a[0]))
    assert balance_by_time(1, alone, (torch.rand(3, 4),), timeout=0.0, device="cpu") == [1]


def test_a_layer_that_changes_the_shape_finds_its_own_input_each_time() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(128, 10))
    assert sum(balance_by_time(2, model, torch.rand(10, 3, 8, 8), timeout=0.1, device="cpu")) == 3


def test_the_sandbox_has_copies_in_training_mode() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    copies = list(layerwise_sandbox(model, torch.device("cpu")))
    assert all(layer.training for layer in copies)
    assert not any(layer.training for layer in model)
    assert all(mine is not theirs for mine, theirs in zip(copies, model, strict=True))


# ── partitions of costs ──────────────────────────────────────────────────────────────────────────────────────────


def test_partitions_of_costs() -> None:
    assert blockpartition.solve([1, 2, 3, 4, 5, 6], partitions=2) == [[1, 2, 3, 4], [5, 6]]
    assert blockpartition.solve([0, 0], partitions=2) == [[0], [0]]
    assert balance_cost([1, 1, 4, 1, 1], 3) == [2, 1, 2]
    for sequence, partitions in (([42], 0), ([42], -1), ([], 1), ([42], 2)):
        with pytest.raises(ValueError):
            blockpartition.solve(sequence, partitions=partitions)
