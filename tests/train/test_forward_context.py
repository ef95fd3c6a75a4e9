"""Inside a layer: which micro-batch is this?"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.engine.forward_context import MicroBatch
from tests.support.models import assert_same, batch, gradients, mlp, plain_step


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(
            (ps.current_microbatch(), ps.hooks.is_checkpointing(), ps.is_recomputing(), x.detach().clone())
        )
        return x


def test_all_layers_of_a_microbatch_see_the_same_one() -> None:
    first, last = Asks(), Asks()
    model = nn.Sequential(first, *mlp(), last)
    x = batch(10)
    with ps.Pipeline(ps.split(model, stages=3), F.mse_loss, microbatches=4, devices="cpu") as pipe:
        pipe.step(x, x)
        ours, theirs = ({id(m): part for m, _, _, part in layer.found} for layer in (first, last))
        assert list(ours) == list(theirs)
        assert len(ours) == 4
        assert torch.equal(torch.cat([part for _, _, _, part in first.found]), x)
        assert not any(flag for layer in (first, last) for _, *flags, _ in layer.found for flag in flags)


def test_it_is_a_key_and_goes_away_with_the_step() -> None:
    kept: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()

    class Stash(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept[ps.current_microbatch()] = x
            return x

    class Pop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + kept.pop(ps.current_microbatch()).detach()

    class Leave(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept[ps.current_microbatch()] = x
            return x

    x = batch(8)
    with ps.Pipeline(ps.split(nn.Sequential(Stash(), *mlp(), Pop(), Leave()), stages=2), devices="cpu") as pipe:
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), pipe(x))
        gc.collect()
        assert not kept


def test_it_is_a_key_and_not_a_number_which_it_has() -> None:
    one, other = MicroBatch(3), MicroBatch(3)
    assert one == one
    assert one != other
    assert one != None  # noqa: E711
    assert {one: 1, other: 2, 3: 3}[one] == 1
    assert (one.index, int(one), "abcd"[one]) == (3, 3, "d")
    for compare in (lambda: one == 3, lambda: one != 3, lambda: [3].index(one)):  # type: ignore[arg-type]
        with pytest.raises(ps.PlanError, match=r"compare current_microbatch\(\).index with 3"):
            compare()


@pytest.mark.parametrize("fails", [False, True])
def test_outside_of_a_pipeline_there_is_none(fails: bool) -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if fails:
                raise ValueError("broken")
            return x

    assert ps.current_microbatch() is None
    with ps.Pipeline(ps.split(nn.Sequential(nn.Linear(4, 4), Breaks()), stages=2), F.mse_loss, devices="cpu") as pipe:
        if fails:
            with pytest.raises(ValueError, match="broken"):
                pipe.step(batch(), batch())
        else:
            pipe.step(batch(), batch())
    assert ps.current_microbatch() is None
    assert not ps.hooks.is_checkpointing()
    assert not ps.is_recomputing()


class Around(nn.Module):
    """Keeps what its layer makes for a later layer, by micro-batch, or takes it."""

    def __init__(self, kept: dict[Any, Tensor], takes: bool) -> None:
        super().__init__()
        self.layer, self.kept, self.takes = nn.Linear(4, 4), kept, takes

    def forward(self, x: Tensor) -> Tensor:
        if self.takes:
            return self.layer(x) * self.kept.pop(ps.current_microbatch())
        y = torch.tanh(self.layer(x))
        self.kept[ps.current_microbatch()] = y
        return 2 * y


@pytest.mark.parametrize("balance", [[5], [2, 3], [2, 2, 1], [1, 1, 1, 1, 1], [1, 4]])
def test_what_layers_pass_around_the_pipeline_by_microbatch_has_its_gradient(balance: list[int]) -> None:
    """The graph of one stage goes on into that of another, which a plain backward of each stage would not see."""
    torch.manual_seed(0)
    kept: dict[Any, Tensor] = {}
    model = nn.Sequential(nn.Linear(4, 4), Around(kept, False), nn.Linear(4, 4), Around(kept, True), nn.Linear(4, 4))
    x, plain = batch(10).requires_grad_(), batch(10).requires_grad_()
    expected = plain_step(model, plain, batch(10, seed=5), F.mse_loss)
    with ps.Pipeline(ps.split(model, balance=balance), microbatches=4, devices="cpu") as pipe:
        loss = F.mse_loss(pipe(x), batch(10, seed=5))
        loss.backward(retain_graph=True)
        assert_same(gradients(model), expected.gradients)
        assert_same(x.grad, plain.grad)
        pipe.zero_grad()
        loss.backward()
        assert_same(gradients(model), expected.gradients)
    assert not kept
