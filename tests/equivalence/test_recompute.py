"""Recomputation gives the plain model's results: every schedule and mode, in threads and over processes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.schedule import Schedule
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import loop, vee
from penstock.schedule.search import auto
from tests.equivalence.check import check_in_threads, check_on_rank, check_step
from tests.equivalence.models import TRAINING
from tests.equivalence.test_skip_connections import dense_skips
from tests.equivalence.test_steps import case_with_all_layers
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow

MODES = ("except_last", "always")


@pytest.mark.parametrize("number", range(len(TRAINING)), ids=TRAINING)
def test_every_schedule_in_threads(number: int) -> None:
    schedule, one, other = TRAINING[number], MODES[number % 2], MODES[1 - number % 2]
    check_in_threads(replace(case_with_all_layers(schedule, 1, 4, 10), recompute=one))
    check_in_threads(replace(case_with_all_layers(schedule, 3, 4, 10), recompute=other))
    check_in_threads(replace(dense_skips(schedule, 2), recompute=one))


@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_over_two_processes(schedule: str, two: Ranks) -> None:
    two.check(check_on_rank, replace(case_with_all_layers(schedule, 2, 5, 7), recompute="except_last"))
    two.check(check_on_rank, replace(dense_skips(schedule, 2), recompute="always"))


def searched_schedule(placement: tuple[int, ...]) -> Schedule:
    """A schedule that recomputes some micro-batches of some stages, partly ahead of the backward."""
    found = auto(Costs(latency=1.0), placement, 6, cap=2.0, recompute=None, seconds=0.05, repeatable=True)
    actions = [action for order in found.schedule.orders for action in order]
    again = sum(action.kind == "R" for action in actions)
    assert 0 < again < sum(action.kind == "F" for action in actions)
    return found.schedule


@pytest.mark.parametrize(("placement", "batch"), [(loop(2, 2), 13), (vee(2), 12), (vee(2), 5)], ids=str)
def test_recompute_chosen_by_the_search(placement: tuple[int, ...], batch: int, two: Ranks) -> None:
    case = replace(case_with_all_layers("zbv", 2, 6, batch), schedule=searched_schedule(placement), recompute="never")
    check_step(case)
    two.check(check_on_rank, case)


class SparseBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mixing", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.mixing, self.linear(x).T).T


def test_a_sparse_buffer() -> None:
    """torch.equal has no kernel for sparse tensors: whether one was changed is told by its version."""
    torch.manual_seed(0)
    model = nn.Sequential(SparseBuffer(), nn.Linear(4, 4))
    plain, x = copy.deepcopy(model), torch.randn(4, 4)
    loss = plain(x).square().mean()
    loss.backward()
    plan = ps.split(model, balance=[1, 1])
    with ps.Pipeline(plan, lambda out: out.square().mean(), microbatches=2, recompute="always") as pipe:
        torch.testing.assert_close(pipe.step(x).loss, loss.detach())
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
