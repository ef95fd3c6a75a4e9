"""A pipelined step equals the plain model's for all models, cuts, schedules, sizes and executors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.equivalence.check import check_on_rank, check_step
from tests.equivalence.models import TRAINING, Case, stages_for
from tests.equivalence.strategies import cases
from tests.support.ranks import Ranks

ALL_LAYERS = ("relu_", "tuple_edge", "twice", "dict_edge", "scale", "convs", "frozen", "layer_norm", "lookup", "tanh")


def case_with_all_layers(schedule: str, ranks: int, microbatches: int, batch: int, loss: str = "ignore") -> Case:
    """A case with most kinds of layers, a frozen one and a shared one."""
    stages = stages_for(schedule, ranks)
    return Case(ALL_LAYERS, True, 7 * ranks, schedule, stages, microbatches, batch, loss)


SIZES = [(1, 4), (4, 8), (4, 10), (5, 3), (7, 7)]  # micro-batches, batch size: whole, even, uneven, too few samples


@pytest.mark.parametrize(("microbatches", "batch"), SIZES)
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_in_threads(schedule: str, microbatches: int, batch: int) -> None:
    for count in (1, 2, 3):
        check_step(case_with_all_layers(schedule, count, microbatches, batch))


@pytest.mark.parametrize("loss", ["mean", "sum", "ignore", "pair"])
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_loss(schedule: str, loss: str) -> None:
    check_step(case_with_all_layers(schedule, 2, 4, 9, loss))


@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_over_two_processes(schedule: str, two_ranks: Ranks) -> None:
    for microbatches, batch in [(1, 4), (4, 10), (5, 3)]:
        two_ranks.check(check_on_rank, case_with_all_layers(schedule, 2, microbatches, batch))


@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_over_four_processes(schedule: str, four_ranks: Ranks) -> None:
    for microbatches, batch in [(4, 10), (5, 3)]:
        four_ranks.check(check_on_rank, case_with_all_layers(schedule, 4, microbatches, batch, "pair"))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=cases())
def test_generated_models_in_threads(case: Case) -> None:
    check_step(case)


def test_generated_models_over_two_processes(two_ranks: Ranks) -> None:
    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(case=cases(ranks=(2,)))
    def run(case: Case) -> None:
        two_ranks.check(check_on_rank, case)

    run()


def test_generated_models_over_four_processes(four_ranks: Ranks) -> None:
    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(case=cases(ranks=(4,)))
    def run(case: Case) -> None:
        four_ranks.check(check_on_rank, case)

    run()
