"""Kinds of mini-batch, inferred when they first come: what makes one, and that all ranks forget the same ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from tests.support.models import assert_same, batch, gradients, plain_step
from tests.support.ranks import Ranks
from tests.train.test_distributed_failures import failing_step


def pipeline(model: nn.Sequential, **options: Any) -> ps.Pipeline:
    options = {"microbatches": 4, "mesh": ps.Mesh(), **options}
    return ps.Pipeline(ps.split(model, stages=dist.get_world_size()), F.mse_loss, **options)


def assert_plain(pipe: ps.Pipeline, model: nn.Module, x: Tensor) -> None:
    expected = plain_step(model, x, x, F.mse_loss)
    pipe.zero_grad()
    assert_same(pipe.step(x, x).loss, expected.loss)
    own = gradients(pipe.named_parameters())
    assert_same(own, {name: expected.gradients[name] for name in own})


def few_remembered(rank: int, dynamic: bool) -> list[Any]:
    """Kinds that recur while they are cached, and after eviction; the first step of each uses the quiet endpoints."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.engine.step_protocol.MAX_KINDS", 3)
        patch.setattr("penstock.engine.connections.MAX_KINDS", 3)
        patch.setattr("penstock.engine.distributed.uses_nccl", lambda device: True)
        with pipeline(model, dynamic=dynamic) as pipe:
            for samples in (4, 5, 6, 4, 7, 4, 5, 8, 9, 10, 4, 4, 10):
                assert_plain(pipe, model, batch(samples))
                protocol, programs = pipe._executor.protocol, pipe._executor.programs
                assert len(protocol.numbers) in (0, len(protocol.headers))
                found.append((list(protocol.headers), list(programs._loaded)))
    return found


@pytest.mark.parametrize("dynamic", [False, True])
def test_ranks_cache_the_same_few_kinds(three: Ranks, dynamic: bool) -> None:
    first, *others = three.check(few_remembered, dynamic)
    assert all(other == first for other in others)
    assert [len(heard) for heard, _ in first] == [1, 2, *[3] * 11]
    assert max(len(loaded) for _, loaded in first) == (1 if dynamic else 3)
    assert first[3][0] == [1, 2, 0]  # 4 samples came again
    assert first[6][0] == [3, 0, 4]  # 5 had been forgotten


class Ones(nn.Module):
    """Makes a tensor of the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.ones(4)


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def default_dtype(rank: int) -> None:
    model, x = nn.Sequential(Ones(), Narrow()), batch()
    with pipeline(model) as pipe:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            try:
                assert_plain(pipe, model, x)
            finally:
                torch.set_default_dtype(torch.float32)


def test_the_default_dtype_is_part_of_a_kind(two: Ranks) -> None:
    two.check(default_dtype)


def default_device(rank: int, dynamic: bool) -> None:
    """Control messages of the ranks are on the host, whatever the default device."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), batch()
    expected = plain_step(model, x, x, F.mse_loss)
    with pipeline(model, dynamic=dynamic) as pipe:
        for _ in range(2):
            with torch.device("meta"):
                result = pipe.step(x, x)
            assert_same(result.loss, expected.loss)
        with torch.inference_mode():
            pipe(x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_default_device_does_not_affect_messages(two: Ranks, dynamic: bool) -> None:
    two.check(default_device, dynamic)


class Real(nn.Module):
    """A plain value that is equal, but not the same, on real tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return x, True if type(x) is Tensor else 1


class First(nn.Module):
    def forward(self, parts: Any) -> Tensor:
        out: Tensor = parts[0]
        return out


class Sides(nn.Module):
    """Two outputs; of a copy on fake tensors the first wants a gradient, of the real one the second."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x)
        return (h.detach(), h) if type(x) is Tensor else (h, h.detach())


class Sum(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        return parts[0] + parts[1]


def other_than_inferred(rank: int, case: str) -> str:
    layers = {"value": [Real(), First()], "wants": [Sides(), Sum()]}[case]
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), layers[0]), nn.Sequential(layers[1], nn.Linear(4, 4)))
    return failing_step(pipeline(model)).text


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("value", "gave (float32[2, 4], True), but (float32[2, 4], 1) was inferred"),
        ("wants", "gradients wanted for leaves [1], but [0] was inferred"),
    ],
)
def test_output_of_another_kind_raises(two: Ranks, case: str, says: str) -> None:
    for text in two.check(other_than_inferred, case, timeout=15):
        assert says in text
        assert "dynamic=True" in text
