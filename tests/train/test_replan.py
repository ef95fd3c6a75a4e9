"""``pipe.replan()``: another order between two steps, for what stages cost now; the gradients are the same."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.schedule import Costs, simulate
from tests.support.ranks import run_ranks

STAGES, MICROBATCHES = 4, 8


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(STAGES)))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2 * MICROBATCHES, 8), torch.randn(2 * MICROBATCHES, 8)


def pipeline(**options: Any) -> ps.Pipeline:
    plan = ps.split(net(), balance=[1] * STAGES)
    return ps.Pipeline(plan, F.mse_loss, **{"microbatches": MICROBATCHES, "schedule": "1f1b", **options})


def gradients(pipe: ps.Pipeline, size: int = 2 * MICROBATCHES) -> list[Tensor]:
    x, y = batch()
    pipe.zero_grad()
    pipe.step(x[:size], y[:size])
    return [p.grad.clone() for p in pipe.parameters() if p.grad is not None]


SLOW = Costs(f=(1.0, 1.0, 1.5, 1.0), i=(1.0, 1.0, 1.5, 1.0), w=(1.0, 1.0, 1.5, 1.0), latency=0.1)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_the_order_changes_and_the_gradients_do_not(schedule: str) -> None:
    with pipeline(schedule=schedule) as pipe:
        before, kept = gradients(pipe), simulate(pipe.schedule, SLOW).peak_memory
        found = pipe.replan(SLOW)
        again = simulate(pipe.schedule, SLOW, [(s, s + 1) for s in range(STAGES - 1)])
        assert again.makespan == pytest.approx(found.after)
        assert all(now <= then + 1e-9 for now, then in zip(again.peak_memory, kept, strict=True))
        if found.changed:
            assert found.after < found.before
            assert pipe.schedule.name == "auto"
        for old, new in zip(before, gradients(pipe), strict=True):
            torch.testing.assert_close(new, old)
        for old, new in zip(gradients(pipeline(schedule=schedule), 5), gradients(pipe, 5), strict=True):
            torch.testing.assert_close(new, old)  # fewer micro-batches, too


def test_a_slow_rank_is_absorbed() -> None:
    with pipeline(schedule="1f1b") as pipe:
        found = pipe.replan(SLOW)
        assert found.changed
        best = 8 * 4.5 + 2 * 1.0 + 2 * 0.1  # the slow rank's work, once the first micro-batch has come to it
        assert found.after < 1.1 * best


def test_an_order_that_is_as_good_as_any_stays() -> None:
    with pipeline(schedule="auto") as pipe:
        before = pipe.schedule
        found = pipe.replan(Costs())
        assert not found.changed
        assert pipe.schedule is before
        assert "the order is unchanged" in str(found)


class Sleepy(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(8, 8), seconds

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            time.sleep(self.seconds)
        return self.linear(x)


def test_what_was_traced_is_what_it_is_planned_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Sleepy(0.004 if s == 2 else 0.001) for s in range(STAGES)))
    plain = copy.deepcopy(model)
    with ps.Pipeline(ps.split(model, balance=[1] * STAGES), F.mse_loss, microbatches=MICROBATCHES) as pipe:
        with pytest.raises(ps.PlanError, match="nothing was traced yet"):
            pipe.replan()
        with pipe.trace(steps=2) as trace:
            for _ in range(2):
                gradients(pipe)
        found = pipe.replan()
        assert found.before == pytest.approx(simulate(trace.schedule, trace.costs(), trace.edges).makespan)
        new = gradients(pipe)
    F.mse_loss(plain(batch()[0]), batch()[1]).backward()
    for grad, parameter in zip(new, plain.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)


def test_recomputes_stay() -> None:
    with pipeline(recompute="always") as pipe:
        before = gradients(pipe)
        pipe.replan(SLOW)
        assert sum(a.kind == "R" for order in pipe.schedule.orders for a in order) == STAGES * MICROBATCHES
        for old, new in zip(before, gradients(pipe), strict=True):
            torch.testing.assert_close(new, old)


def under_a_mesh(rank: int) -> tuple[str, bool]:
    with pipeline(mesh=ps.Mesh(pipe=STAGES)) as pipe:
        before = gradients(pipe)
        found = pipe.replan(SLOW)
        same = all(torch.allclose(a, b) for a, b in zip(before, gradients(pipe), strict=True))
        with pytest.raises(ps.PlanError, match="what replan was given"):
            pipe.replan(Costs(f=float(1 + 20 * (rank == 1))))
        return str(pipe.schedule), same and found.changed


def test_all_ranks_of_a_mesh_change_together() -> None:
    results = run_ranks(under_a_mesh, STAGES)
    assert results == [(results[0][0], True)] * STAGES


# A trace of evaluations has no backward, which was taken to cost nothing: the order of training was made for that.
def test_a_trace_without_backwards_is_nothing_to_plan_from() -> None:
    with pipeline() as pipe:
        before = pipe.schedule
        with pipe.trace(quiet=True), torch.no_grad():
            pipe(batch()[0])
        with pytest.raises(ps.PlanError, match="the last trace has no backward"):
            pipe.replan()
        assert pipe.schedule == before
