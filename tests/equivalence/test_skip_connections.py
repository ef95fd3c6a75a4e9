"""Skip connections between stages, and the sums of their gradients."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.equivalence.check import check_in_threads, check_on_rank, check_step
from tests.equivalence.models import TRAINING, stages_for
from tests.equivalence.skip_models import SkipCase
from tests.equivalence.strategies import skip_cases
from tests.support.ranks import Ranks


def dense_skips(schedule: str, ranks: int, microbatches: int = 4, batch: int = 10) -> SkipCase:
    """Two layers per stage; every layer uses all earlier ones."""
    stages = stages_for(schedule, ranks)
    links = tuple(tuple(range(i)) for i in range(2 * stages))
    return SkipCase(links, 1, (2,) * stages, schedule, microbatches, batch)


@pytest.mark.parametrize("number", range(len(TRAINING)), ids=TRAINING)
def test_skip_connections_in_threads(number: int) -> None:
    for count in (1 + number % 2, 3):
        check_in_threads(dense_skips(TRAINING[number], count))


# test_recompute runs skip connections of every schedule over two processes.
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h2", "interleaved", "dualpipev", "auto"])
def test_skip_connections_over_processes(schedule: str, four: Ranks) -> None:
    four.check(check_on_rank, dense_skips(schedule, 4, 5, 13))


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=skip_cases())
def test_generated_skip_connections_in_threads(case: SkipCase) -> None:
    check_step(case)


def test_generated_skip_connections_over_two_processes(two: Ranks) -> None:
    @settings(max_examples=14, deadline=None, derandomize=True)
    @given(case=skip_cases(ranks=(2,)))
    def run(case: SkipCase) -> None:
        two.check(check_on_rank, case)

    run()
