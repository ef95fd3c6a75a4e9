"""Every front end gives the plain model's outputs, gradients, running statistics and parameter names."""

from __future__ import annotations

import pytest

from tests.equivalence.check import check_on_rank, check_step
from tests.equivalence.front_end_models import FRONT_ENDS, FrontEndCase
from tests.support.ranks import Ranks


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_front_ends_in_threads(front_end: str) -> None:
    for stages, schedule, recompute in [(1, "gpipe", "never"), (4, "1f1b", "except_last"), (4, "zbv", "always")]:
        check_step(FrontEndCase(front_end, stages, schedule, 3, 8, recompute=recompute))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_front_ends_over_processes(front_end: str, two: Ranks, four: Ranks) -> None:
    two.check(check_on_rank, FrontEndCase(front_end, 4, "interleaved", 2, 7, recompute="always"))
    four.check(check_on_rank, FrontEndCase(front_end, 4, "1f1b", 4, 10, recompute="except_last"))
