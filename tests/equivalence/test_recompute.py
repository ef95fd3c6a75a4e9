"""Recomputation gives the plain model's results: every schedule and mode, in threads and over processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.schedule import Schedule
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import loop, vee
from penstock.schedule.search import auto
from tests.equivalence.check import check_on_rank, check_step
from tests.equivalence.models import TRAINING
from tests.equivalence.test_skip_connections import dense_skips
from tests.equivalence.test_steps import case_with_all_layers
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow

MODES = ("except_last", "always")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_in_threads(schedule: str, mode: str) -> None:
    for count in (1, 3):
        check_step(replace(case_with_all_layers(schedule, count, 4, 10), recompute=mode))
    check_step(replace(dense_skips(schedule, 2), recompute=mode))


@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_over_two_processes(schedule: str, two_ranks: Ranks) -> None:
    two_ranks.check(check_on_rank, replace(case_with_all_layers(schedule, 2, 5, 7), recompute="except_last"))
    two_ranks.check(check_on_rank, replace(dense_skips(schedule, 2), recompute="always"))


def searched_schedule(placement: tuple[int, ...]) -> Schedule:
    """A schedule that recomputes some micro-batches of some stages, partly ahead of the backward."""
    found = auto(Costs(latency=1.0), placement, 6, cap=2.0, recompute=None, seconds=0.05, repeatable=True)
    actions = [action for order in found.schedule.orders for action in order]
    again = sum(action.kind == "R" for action in actions)
    assert 0 < again < sum(action.kind == "F" for action in actions)
    return found.schedule


@pytest.mark.parametrize("batch", [12, 13, 5])
@pytest.mark.parametrize("placement", [loop(2, 2), vee(2)], ids=["loop", "V"])
def test_recompute_chosen_by_the_search(placement: tuple[int, ...], batch: int, two_ranks: Ranks) -> None:
    case = replace(case_with_all_layers("zbv", 2, 6, batch), schedule=searched_schedule(placement), recompute="never")
    check_step(case)
    two_ranks.check(check_on_rank, case)
