"""Every front end trains as the plain model does: outputs, gradients, running statistics, names."""

from __future__ import annotations

import pytest

from tests.equivalence.check import check_step
from tests.equivalence.fronts import FRONTS, FrontCase
from tests.equivalence.ranks import Ranks


@pytest.mark.parametrize("front", FRONTS)
def test_in_threads(front: str) -> None:
    for stages, schedule, recompute in [(1, "gpipe", "never"), (4, "1f1b", "except_last"), (4, "zbv", "always")]:
        check_step(FrontCase(front, stages, schedule, 3, 8, recompute=recompute))


@pytest.mark.parametrize("front", FRONTS)
def test_over_processes(front: str, two_ranks: Ranks, four_ranks: Ranks) -> None:
    two_ranks.check(FrontCase(front, 2, "zb_h1", 3, 8))
    two_ranks.check(FrontCase(front, 4, "interleaved", 2, 7, recompute="always"))
    four_ranks.check(FrontCase(front, 4, "1f1b", 4, 10, recompute="except_last"))
