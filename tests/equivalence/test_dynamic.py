"""With ``dynamic=True``, shapes and structure of messages may depend on the data.

In threads the option changes nothing, because shapes need not be known beforehand.
"""

from __future__ import annotations

from dataclasses import astuple

import pytest

from tests.equivalence.check import check_in_threads, check_on_rank
from tests.equivalence.dynamic_models import LAYER_PAIRS, DynamicCase, DynamicShapesCase, DynamicSkipCase
from tests.equivalence.models import TRAINING, stages_for
from tests.equivalence.test_steps import case_with_all_layers
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow

SCHEDULES = ("1f1b", "zb_h1", "interleaved", "zbv", "gpipe")
MODES = ("never", "always")


def dynamic_skips(
    schedule: str, ranks: int, microbatches: int, batch: int, recompute: str = "never"
) -> DynamicSkipCase:
    """Two layers per stage; every layer uses all earlier ones, so that many edges share a channel."""
    stages = stages_for(schedule, ranks)
    links = tuple(tuple(range(i)) for i in range(2 * stages))
    return DynamicSkipCase(links, 1, (2,) * stages, schedule, microbatches, batch, recompute=recompute)


def first_pairs(schedule: str, ranks: int) -> list[str]:
    """First pairs of chains that together contain each pair once: a chain has a pair at every cut."""
    return list(LAYER_PAIRS)[:: stages_for(schedule, ranks) - 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dynamic_shapes_in_threads(schedule: str) -> None:
    shift = SCHEDULES.index(schedule)
    for number, first in enumerate(first_pairs(schedule, 2)):
        check_in_threads(DynamicShapesCase(first, schedule, 2, 4, 11, MODES[(number + shift) % 2]))
    check_in_threads(dynamic_skips(schedule, 2, 4, 10, MODES[shift % 2]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dynamic_shapes_over_two_processes(schedule: str, two: Ranks) -> None:
    """A chain that is recomputed for one schedule is not for the next."""
    for number, first in enumerate(first_pairs(schedule, 2), SCHEDULES.index(schedule)):
        two.check(check_on_rank, DynamicShapesCase(first, schedule, 2, 5, 13, MODES[(number + 1) % 2]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dynamic_shapes_over_four_processes(schedule: str, four: Ranks) -> None:
    for first in first_pairs(schedule, 4):
        four.check(check_on_rank, DynamicShapesCase(first, schedule, 4, 7, 20))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_headers_longer_than_a_row(schedule: str, two: Ranks) -> None:
    two.check(check_on_rank, DynamicShapesCase("slices", schedule, 2, 2, 160))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dynamic_skip_connections(schedule: str, two: Ranks, four: Ranks) -> None:
    two.check(check_on_rank, dynamic_skips(schedule, 2, 4, 10))
    if schedule in ("1f1b", "zbv"):
        four.check(check_on_rank, dynamic_skips(schedule, 4, 6, 13, "always"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_few_microbatches_or_samples(schedule: str, two: Ranks) -> None:
    two.check(check_on_rank, DynamicShapesCase("rows", schedule, 2, 1, 6))
    two.check(check_on_rank, DynamicShapesCase("optional", schedule, 2, 6, 4))


@pytest.mark.parametrize("schedule", TRAINING)
def test_dynamic_mode_with_static_shapes(schedule: str, two: Ranks) -> None:
    two.check(check_on_rank, DynamicCase(*astuple(case_with_all_layers(schedule, 2, 4, 10))))
