"""What crosses an edge may depend on the data: with ``dynamic=True`` the step is still the plain model's.

Under a mesh nothing of it can be known beforehand. In threads nothing need be, and the option changes nothing.
"""

from __future__ import annotations

from dataclasses import astuple

import pytest

from tests.equivalence.check import check_step
from tests.equivalence.models import TRAINING, stages_for
from tests.equivalence.ragged import PAIRS, DynamicCase, RaggedCase, RaggedWebCase
from tests.equivalence.ranks import Ranks
from tests.equivalence.test_steps import everything

SCHEDULES = ("1f1b", "zb_h1", "interleaved", "zbv", "gpipe")
MODES = ("never", "always")


def web(schedule: str, ranks: int, microbatches: int, batch: int, recompute: str = "never") -> RaggedWebCase:
    """Two layers a stage, and every layer uses every other one before it: many edges share a channel."""
    stages = stages_for(schedule, ranks)
    links = tuple(tuple(range(i)) for i in range(2 * stages))
    return RaggedWebCase(links, 1, (2,) * stages, schedule, microbatches, batch, recompute=recompute)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_threads(schedule: str, mode: str) -> None:
    for first in PAIRS:
        check_step(RaggedCase(first, schedule, 2, 4, 11, mode))
    check_step(web(schedule, 2, 4, 10, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_over_two_processes(schedule: str, mode: str, two_ranks: Ranks) -> None:
    for first in PAIRS:
        two_ranks.check(RaggedCase(first, schedule, 2, 5, 13, mode))
    two_ranks.check(RaggedCase("pieces", schedule, 2, 2, 160, mode))  # headers that are longer than a row


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_over_four_processes(schedule: str, mode: str, four_ranks: Ranks) -> None:
    for first in ("rows", "either"):
        four_ranks.check(RaggedCase(first, schedule, 4, 7, 20, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_that_skip_stages(schedule: str, mode: str, two_ranks: Ranks, four_ranks: Ranks) -> None:
    two_ranks.check(web(schedule, 2, 4, 10, mode))
    four_ranks.check(web(schedule, 4, 6, 13, mode))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_few_micro_batches_and_few_samples(schedule: str, two_ranks: Ranks) -> None:
    two_ranks.check(RaggedCase("rows", schedule, 2, 1, 6))
    two_ranks.check(RaggedCase("sometimes", schedule, 2, 6, 4))


@pytest.mark.parametrize("schedule", TRAINING)
def test_what_could_be_inferred_is_the_same_when_it_is_not(schedule: str, two_ranks: Ranks) -> None:
    two_ranks.check(DynamicCase(*astuple(everything(schedule, 2, 4, 10))))
