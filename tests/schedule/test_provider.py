"""Ranks that take turns on one device: each in its own order, and as few changes between them as may be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.schedule.provider import ScheduleProvider, merge_ranks
from penstock.schedule.registry import SCHEDULES, build
from penstock.schedule.schedule import Action, Schedule
from penstock.schedule.verify import verify

TRAINING = [name for name in SCHEDULES if name != "forward_only"]


def chain(stages: int) -> list[tuple[int, int]]:
    return [(s, s + 1) for s in range(stages - 1)]


def joined(name: str, ranks: int, m: int, groups: Sequence[int]) -> Schedule:
    schedule = build(name, ranks, m)
    return merge_ranks(schedule, chain(schedule.num_stages), groups)


def words(order: Sequence[Action]) -> str:
    return " ".join(map(str, order))


def test_gpipe_goes_through_its_stages_one_after_the_other() -> None:
    (order,) = joined("gpipe", 3, 2, [0, 0, 0]).orders
    assert words(order) == "0F0 0F1 1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1 0B0 0B1"


def test_1f1b_changes_where_it_must() -> None:
    (order,) = joined("1f1b", 2, 3, [0, 0]).orders
    assert words(order) == "0F0 0F1 1F0 1B0 1F1 1B1 0B0 0F2 0B1 1F2 1B2 0B2"


def test_two_devices() -> None:
    here, there = joined("gpipe", 4, 2, [0, 0, 1, 1]).orders
    assert words(here) == "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"
    assert words(there) == "2F0 2F1 3F0 3F1 3B0 3B1 2B0 2B1"


@pytest.mark.parametrize("groups", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize("name", TRAINING)
def test_every_schedule_stays_one(name: str, groups: list[int]) -> None:
    before = build(name, 4, 6)
    after = merge_ranks(before, chain(before.num_stages), groups)
    verify(after, chain(before.num_stages))
    for rank, order in enumerate(before.orders):  # each has its own order, so its own memory
        mine = set(before.stages_of(rank))
        assert [action for action in after.orders[groups[rank]] if action.stage in mine] == list(order)


def test_a_source_of_them() -> None:
    source = ScheduleProvider("1f1b", 4, chain(4), 3, recompute="always")
    turns = source.with_merged_ranks([0, 0, 0, 0])
    assert (turns.ranks, turns.placement) == (1, (0, 0, 0, 0))
    assert (source.ranks, source.placement) == (4, (0, 1, 2, 3))
    (order,) = turns.training(2).orders
    assert words(order[-6:]) == "1R1 1B1 0R0 0B0 0R1 0B1"  # forwards are run again right before their backward
    assert turns.training(2) is turns.training(2)
    assert words(turns.forward_only(2).orders[0]) == "0F0 0F1 1F0 1F1 2F0 2F1 3F0 3F1"
    assert len(turns.fill_drain(2).orders) == 1
    assert len(source.training(2).orders) == 4


def test_a_source_of_a_given_schedule() -> None:
    source = ScheduleProvider(build("gpipe", 2, 3), 2, chain(2), 3)
    (order,) = source.with_merged_ranks([0, 0]).training(1).orders
    assert words(order) == "0F0 1F0 1B0 0B0"
