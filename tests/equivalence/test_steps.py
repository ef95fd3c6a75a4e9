"""A pipelined step equals the plain model's for all models, cuts, schedules, sizes and executors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.equivalence.check import check_in_threads, check_on_rank, check_step
from tests.equivalence.models import TRAINING, Case, stages_for
from tests.equivalence.strategies import cases
from tests.support.ranks import Ranks

ALL_LAYERS = ("relu_", "tuple_edge", "twice", "dict_edge", "scale", "convs", "frozen", "layer_norm", "lookup", "tanh")


def case_with_all_layers(schedule: str, ranks: int, microbatches: int, batch: int, loss: str = "ignore") -> Case:
    """A case with most kinds of layers, a frozen one and a shared one."""
    stages = stages_for(schedule, ranks)
    return Case(ALL_LAYERS, True, 7 * ranks, schedule, stages, microbatches, batch, loss)


SIZES = [(1, 4), (4, 8), (4, 10), (5, 3), (7, 7)]  # micro-batches, batch size: whole, even, uneven, too few samples


@pytest.mark.parametrize("number", range(len(TRAINING)), ids=TRAINING)
def test_every_schedule_in_threads(number: int) -> None:
    """All pairs of schedule, size and number of ranks."""
    for size, (microbatches, batch) in enumerate(SIZES):
        check_in_threads(case_with_all_layers(TRAINING[number], 1 + (number + size) % 3, microbatches, batch))


@pytest.mark.parametrize("number", range(len(TRAINING)), ids=TRAINING)
def test_every_loss(number: int) -> None:
    """``ignore`` is the loss of the other tests."""
    for loss in (("mean", "sum")[number % 2], "pair"):
        check_in_threads(case_with_all_layers(TRAINING[number], 2, 4, 9, loss))


@pytest.mark.parametrize("number", range(len(TRAINING)), ids=TRAINING)
def test_every_schedule_over_two_processes(number: int, two: Ranks) -> None:
    for microbatches, batch in [(4, 10), ((1, 4), (5, 3))[number % 2]]:
        two.check(check_on_rank, case_with_all_layers(TRAINING[number], 2, microbatches, batch))


@pytest.mark.parametrize("number", range(len(TRAINING)), ids=TRAINING)
def test_every_schedule_over_four_processes(number: int, four: Ranks) -> None:
    microbatches, batch = ((5, 3), (4, 10))[number % 2]
    four.check(check_on_rank, case_with_all_layers(TRAINING[number], 4, microbatches, batch, "pair"))


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True)
@given(case=cases())
def test_generated_models_in_threads(case: Case) -> None:
    check_step(case)


def test_generated_models_over_two_processes(two: Ranks) -> None:
    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(case=cases(ranks=(2,)))
    def run(case: Case) -> None:
        two.check(check_on_rank, case)

    run()


def test_generated_models_over_four_processes(four: Ranks) -> None:
    @settings(max_examples=10, deadline=None, derandomize=True)
    @given(case=cases(ranks=(4,)))
    def run(case: Case) -> None:
        four.check(check_on_rank, case)

    run()
