"""The text form: reads as it is written, and says where it is wrong."""

from __future__ import annotations

import inspect

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.registry import build
from penstock.schedule.schedule import Action, Schedule
from penstock.schedule.text import from_text, to_text
from tests.schedule.samples import schedules


def test_a_line_for_each_rank() -> None:
    text = """
        # name: 1f1b
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    assert to_text(build("1f1b", 2, 3)) == inspect.cleandoc(text) + "\n"
    assert str(build("1f1b", 2, 3)) == to_text(build("1f1b", 2, 3))


def test_round_trip() -> None:
    for schedule in schedules():
        assert from_text(to_text(schedule)) == schedule


def test_round_trip_of_a_custom_schedule() -> None:
    """Any placement, a rank without work, recompute, a name with spaces."""
    rows = ["0F0 2F0 2B0 0B0", "", "1F0 1R0 1B0"]
    orders = [[Action.parse(cell) for cell in row.split()] for row in rows]
    schedule = Schedule.of("my own, 2nd", (0, 2, 0), orders, 1)
    assert to_text(schedule).splitlines()[2] == "-"
    assert from_text(to_text(schedule)) == schedule


def test_comments_and_blank_lines() -> None:
    schedule = from_text("""

        # two ranks, one micro-batch
        0F0   0B0   # the first
        1F0\t1B0
    """)
    assert schedule.name == "custom"
    assert schedule.placement == (0, 1)
    assert schedule.orders[0] == (Action(0, "F", 0), Action(0, "B", 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no action in this schedule"),
        ("# name: nothing\n\n", "there is no action in this schedule"),
        ("0F0 0X0", "line 1, column 5: '0X0' is not an action: expected stage, kind (F, R, B, I, W)"),
        ("# name: x\n0F0 0B0\n1F0 F1", "line 3, column 5: 'F1' is not an action"),
        ("0F0, 0B0", "line 1, column 1: '0F0,' is not an action"),
        (
            "0F0 0B0\n1F0 0F1",
            "line 2, column 5: 0F1 puts stage 0 on rank 1, but it is on rank 0 already (line 1, column 1)",
        ),
        ("0F0 0B0\n2F0 2B0", "line 2, column 1: there is a stage 2, but no stage 1 anywhere"),
        ("1F0 1B0", "line 1, column 1: there is a stage 1, but no stage 0 anywhere"),
        ("0F0 0F3 0B0 0B3", "line 1, column 5: there is a micro-batch 3, but no micro-batch 1 anywhere"),
    ],
)
def test_errors_name_the_location(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        from_text(text)
    assert message in str(error.value)
