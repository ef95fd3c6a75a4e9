"""TorchDistPackage's ``forward_backward`` when a rank fails, is killed, or is called differently from others."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.compat.torchdistpackage import forward_backward
from tests.compat.torchdistpackage_support import line, own_inputs
from tests.support.models import batch
from tests.support.ranks import RankExited, Ranks, run_ranks


class Broken(Exception):
    pass


def fails(rank: int, where: int, kind: str) -> None:
    at = line(3)
    layer, count, backs = nn.Linear(4, 4), [0], [0]

    def fwd_fn(value: Any) -> Any:
        count[0] += 1
        if kind == "forward" and at == where and count[0] == 3:
            raise Broken("this stage") from KeyError("a detail")
        output = layer(value)
        return output.sum() if at == 2 else output

    def bwd_fn(output: Any, grad: Any) -> None:
        backs[0] += 1
        if at == where and ((kind == "backward") or (kind == "last backward" and backs[0] == 4)):
            raise Broken("this stage")
        torch.autograd.backward(output, grad)

    inputs = [batch(8)] if at == 0 else []

    def calls() -> None:
        for _ in range(2 if kind == "last backward" else 1):  # others may have been through with the first one
            forward_backward(None, fwd_fn, bwd_fn, inputs, 4)

    before = time.monotonic()
    if at == where:
        with pytest.raises(Broken, match="this stage"):
            forward_backward(None, fwd_fn, bwd_fn, inputs, 4)
    else:
        with pytest.raises(ps.PipelineError, match=rf"rank {where}(.|\n)*Broken: this stage") as raised:
            calls()
        assert raised.value.rank == where
    assert time.monotonic() - before < 30
    layer.zero_grad()
    kind = "none"
    forward_backward(None, fwd_fn, bwd_fn, inputs, 4)
    assert layer.weight.grad is not None


@pytest.mark.parametrize(
    ("where", "kind"),
    [(0, "forward"), (1, "forward"), (2, "backward"), (1, "backward"), (0, "last backward")],
)
def test_a_failure_reaches_all_ranks_and_the_next_call_works(three: Ranks, where: int, kind: str) -> None:
    three.check(fails, where, kind)


def is_killed(rank: int) -> None:
    at = line(3)

    def fwd_fn(value: Any) -> Any:
        if at == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    forward_backward(None, fwd_fn, None, [batch(8)] if at == 0 else [], 4, forward_only=True)


def test_a_rank_that_is_killed_is_named() -> None:
    first, second, third = run_ranks(is_killed, 3)
    assert isinstance(second, RankExited)
    for error in (first, third):
        assert isinstance(error, ps.PipelineError)
        assert error.rank == 1


def differs(rank: int) -> None:
    at = line(3)

    def run(own: Any, m: int = 4) -> Any:
        return forward_backward(None, lambda v: v[0] if isinstance(v, list) else v, None, own, m, forward_only=True)

    cases = [
        (own_inputs(batch(8), batch(6)), 4, r"rank 0: 4 micro-batches of \[8\] samples(.*); rank 2: 4 .* of \[6\]"),
        (own_inputs(batch(8), batch(3)), 4, r"rank 0: 4 micro-batches of \[8\] samples(.*); rank 2: 4 .* of \[3\]"),
        (own_inputs(batch(8), batch(8)), 4 + at, r"rank 0: 4 (.*); rank 1: 5 (.*); rank 2: 6 micro-batches"),
        (own_inputs(batch(0), batch(8)), 4, r"rank 0: 4 micro-batches of \[0\] samples"),
        (own_inputs((batch(2), batch(3)), batch(8)), 4, r"rank 0: 4 micro-batches of \[2, 3\] samples"),
        (own_inputs(batch(8), batch(8)), 0, r"rank 0: 0 micro-batches"),
    ]
    for own, m, message in cases:
        with pytest.raises(ps.PlanError, match=message):
            run(own, m)
        assert run(own_inputs(batch(8), batch(8))).shape == (2, 4)  # nothing has begun, and nothing has ended
    loss = [lambda v: v, lambda v: v, lambda v: {"loss": v.sum()}][at]
    with pytest.raises(ps.PipelineError, match="gave a dict where the loss, one number in a tensor, was expected"):
        forward_backward(None, loss, None, [batch(8)] if at == 0 else [], 4)


def test_ranks_that_are_called_differently_learn_of_it(three: Ranks) -> None:
    three.check(differs)
