"""The schedules of a pipeline, and merged ranks: each keeps its order, with few switches between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from penstock.schedule.provider import ScheduleProvider
from penstock.schedule.registry import SCHEDULES, build
from penstock.schedule.schedule import Action, Schedule, merge_ranks
from penstock.schedule.verify import verify

TRAINING = [name for name in SCHEDULES if name != "forward_only"]


def chain(stages: int) -> list[tuple[int, int]]:
    return [(s, s + 1) for s in range(stages - 1)]


def merged(name: str, ranks: int, m: int, groups: Sequence[int]) -> Schedule:
    schedule = build(name, ranks, m)
    return merge_ranks(schedule, chain(schedule.num_stages), groups)


def text(order: Sequence[Action]) -> str:
    return " ".join(map(str, order))


def test_gpipe_runs_its_stages_one_after_another() -> None:
    (order,) = merged("gpipe", 3, 2, [0, 0, 0]).orders
    assert text(order) == "0F0 0F1 1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1 0B0 0B1"


def test_1f1b_switches_where_it_must() -> None:
    (order,) = merged("1f1b", 2, 3, [0, 0]).orders
    assert text(order) == "0F0 0F1 1F0 1B0 1F1 1B1 0B0 0F2 0B1 1F2 1B2 0B2"


def test_two_devices() -> None:
    here, there = merged("gpipe", 4, 2, [0, 0, 1, 1]).orders
    assert text(here) == "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"
    assert text(there) == "2F0 2F1 3F0 3F1 3B0 3B1 2B0 2B1"


def test_every_schedule_stays_valid() -> None:
    for name, groups in product(TRAINING, ([0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 2], [0, 1, 2, 3])):
        before = build(name, 4, 6)
        after = merge_ranks(before, chain(before.num_stages), groups)
        verify(after, chain(before.num_stages))
        for rank, order in enumerate(before.orders):  # each keeps its own order, so its own memory
            stages = set(before.stages_of(rank))
            assert [action for action in after.orders[groups[rank]] if action.stage in stages] == list(order)


def test_a_provider_with_merged_ranks() -> None:
    provider = ScheduleProvider("1f1b", 4, chain(4), 3, recompute="always")
    merged_provider = provider.with_merged_ranks([0, 0, 0, 0])
    assert (merged_provider.ranks, merged_provider.placement) == (1, (0, 0, 0, 0))
    assert (provider.ranks, provider.placement) == (4, (0, 1, 2, 3))
    (order,) = merged_provider.training(2).orders
    assert text(order[-6:]) == "1R1 1B1 0R0 0B0 0R1 0B1"  # forwards are run again right before their backward
    assert merged_provider.training(2) is merged_provider.training(2)
    assert text(merged_provider.forward_only(2).orders[0]) == "0F0 0F1 1F0 1F1 2F0 2F1 3F0 3F1"
    assert len(merged_provider.fill_drain(2).orders) == 1
    assert len(provider.training(2).orders) == 4


def test_a_provider_of_a_fixed_schedule() -> None:
    provider = ScheduleProvider(build("gpipe", 2, 3), 2, chain(2), 3)
    (order,) = provider.with_merged_ranks([0, 0]).training(1).orders
    assert text(order) == "0F0 1F0 1B0 0B0"
