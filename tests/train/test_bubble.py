"""``StepResult.bubble``: the share of a step in which ranks wait, as measured; of stages that sleep it is known."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.schedule import Costs, build, simulate
from tests.support.ranks import Ranks

UNIT = 0.02  # seconds of a forward; a backward takes two


class Asleep(torch.autograd.Function):
    """Time that passes in the forward and in the backward, as if on a device of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(UNIT)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(2 * UNIT)
        return grads[0], grads[0].sum()


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return Asleep.apply(x, self.weight)


def pipeline(stages: int, **options: Any) -> ps.Pipeline:
    plan = ps.split(nn.Sequential(*(Sleeper() for _ in range(stages))), stages=stages)
    return ps.Pipeline(plan, nn.MSELoss(), **{"microbatches": 4, **options})


def bubbles(pipe: ps.Pipeline, steps: int = 4) -> list[float]:
    """The first step is left out, in which kinds of mini-batches are inferred."""
    found = []
    for _ in range(steps + 1):
        bubble = pipe.step(torch.ones(4, 1), torch.ones(4, 1)).bubble
        assert bubble is not None
        assert 0 <= bubble <= 1
        found.append(bubble)
    return found[1:]


def expected(schedule: str, ranks: int, microbatches: int = 4) -> float:
    return simulate(build(schedule, ranks, microbatches), Costs.per_rank(v=1)).bubble


def near(found: list[float], wanted: float) -> bool:
    """A busy machine makes single steps longer: one of them has to be right."""
    return min(abs(bubble - wanted) for bubble in found) < 0.12


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "ranks"), [("gpipe", 1), ("gpipe", 2), ("1f1b", 3), ("sharded", 3)])
def test_threads(schedule: str, ranks: int) -> None:
    with pipeline(ranks, schedule=schedule, devices=["cpu"] * ranks) as pipe:
        found = bubbles(pipe)
    assert near(found, expected(schedule, ranks)), (found, expected(schedule, ranks))


def test_in_lockstep_a_thread_waits_for_those_that_take_its_outputs() -> None:
    plan = ps.split(nn.Sequential(nn.Identity(), Sleeper()), balance=[1, 1])
    with ps.Pipeline(plan, nn.MSELoss(), microbatches=8, devices=["cpu"] * 2) as pipe:
        pipe.lockstep = True
        found = [pipe.evaluate(torch.ones(8, 1)).bubble or 0.0 for _ in range(4)]
    assert near(found, 0.5), found


def sleeping_rank(rank: int, schedule: str) -> list[float]:
    with pipeline(2, schedule=schedule, microbatches=2, mesh=ps.Mesh()) as pipe:
        return bubbles(pipe)


@pytest.mark.parametrize("schedule", ["gpipe", "sharded"])
def test_processes(two: Ranks, schedule: str) -> None:
    """Each tells its own, which is the same in these schedules: what it waits for at the end of a step counts too."""
    wanted = expected(schedule, 2, 2)
    for found in two.check(sleeping_rank, schedule):
        assert near(found, wanted), (found, wanted)


def test_the_last_result_is_kept_without_its_outputs() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with ps.Pipeline(ps.split(model, stages=2), nn.MSELoss(), devices="cpu") as pipe:
        assert pipe.last is None
        result = pipe.step(torch.ones(3, 2), torch.ones(3, 2))
        assert result.outputs.shape == (3, 2)
        assert (pipe.last.loss, pipe.last.bubble, pipe.last.outputs) == (result.loss, result.bubble, None)
        assert (pipe.last.samples, pipe.last.microbatches) == (3, 1)
        last = pipe.last
        assert pipe.evaluate(torch.ones(5, 2)).bubble is not None
        assert pipe.last is last
        pipe.step(torch.ones(4, 2), torch.ones(4, 2))
        assert (pipe.step_totals.steps, pipe.step_totals.samples) == (2, 7)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_is_said_of_a_gpu() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with ps.Pipeline(ps.split(model, stages=2), nn.MSELoss(), devices="cuda:0") as pipe:
        assert pipe.step(torch.ones(3, 2), torch.ones(3, 2, device="cuda:0")).bubble is None
        assert pipe.step_totals.bubble is None
