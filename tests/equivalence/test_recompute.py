"""Forwards that run twice give what they give once: every schedule, every mode, both transports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.equivalence.check import check_step
from tests.equivalence.models import TRAINING
from tests.equivalence.ranks import Ranks
from tests.equivalence.test_steps import everything
from tests.equivalence.test_webs import dense

MODES = ("except_last", "always")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_in_threads(schedule: str, mode: str) -> None:
    for count in (1, 3):
        check_step(replace(everything(schedule, count, 4, 10), recompute=mode))
    check_step(replace(dense(schedule, 2), recompute=mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_over_two_processes(schedule: str, mode: str, two_ranks: Ranks) -> None:
    two_ranks.check(replace(everything(schedule, 2, 5, 7), recompute=mode))
    two_ranks.check(replace(dense(schedule, 2), recompute=mode))
