"""``verify`` accepts exactly the schedules that can run, and explains why it rejects others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.registry import build
from penstock.schedule.schedule import Action, Schedule
from penstock.schedule.verify import verify
from tests.schedule.samples import VARIANTS, placed, schedules, staircase

pytestmark = pytest.mark.slow


def can_run(schedule: Schedule) -> bool:
    """An independent check: run any possible action until all are done or none is possible."""
    done: set[tuple[int, str, int]] = set()
    left = [list(order) for order in schedule.orders]

    def possible(stage: int, kind: str, k: int) -> bool:
        passed = {b for s, b, j in done if (s, j) == (stage, k)}
        if kind == "F":
            return not passed and (stage == 0 or (stage - 1, "F", k) in done)
        if kind == "W":
            return "I" in passed and not passed & {"B", "W"}
        if "F" not in passed or passed & {"B", "I", "W"}:
            return False
        if kind == "R":
            return "R" not in passed
        return stage == schedule.num_stages - 1 or bool({(stage + 1, b, k) for b in "BI"} & done)

    moved = True
    while moved:
        moved = False
        for order in left:
            while order and possible(*order[0]):
                done.add(tuple(order.pop(0)))
                moved = True
    if any(left):
        return False
    for stage in range(schedule.num_stages):
        for k in range(schedule.num_microbatches):
            kinds = {b for s, b, j in done if (s, j) == (stage, k)} - {"R"}
            if kinds not in ([{"F", "B"}, {"F", "I", "W"}] if schedule.trains else [{"F"}]):
                return False
    return True


def accepts(schedule: Schedule) -> bool:
    try:
        verify(schedule)
    except ScheduleError:
        return False
    return True


def with_order(schedule: Schedule, rank: int, order: list[Action]) -> Schedule:
    orders = list(schedule.orders)
    orders[rank] = tuple(order)
    return replace(schedule, orders=tuple(orders))


def places(schedule: Schedule) -> Iterator[tuple[int, int]]:
    return ((rank, i) for rank, order in enumerate(schedule.orders) for i in range(len(order)))


# Valid schedules ---------------------------------------------------------------------------------------------


def test_every_generated_schedule_is_valid() -> None:
    for schedule in schedules(product(range(1, 6), (1, 2, 3, 5, 8, 11))):
        report = verify(schedule)
        assert can_run(schedule)
        assert len(report.peak_in_flight) == schedule.num_ranks


def test_memory_report() -> None:
    report = verify(
        staircase(
            "F0 F1 .  I0 F2 I1 W0 W1 .  B2",
            ".  F0 B0 F1 B1 .  .  F2 B2 . ",
        )
    )
    assert report.peak_in_flight == (3, 1)
    assert report.peak_activations == (3.0, 1.0)
    assert report.peak_deferred == (2, 0)


def test_activations_are_shares_of_a_rank() -> None:
    report = verify(build("gpipe", 2, 3))
    assert report.peak_in_flight == (3, 3)
    two_stages = placed((0, 0), "0F0 1F0 1B0 0B0")
    assert verify(two_stages).peak_in_flight == (2,)
    assert verify(two_stages).peak_activations == (1.0,)


def test_forward_only_keeps_nothing() -> None:
    assert verify(build("forward_only", 3, 4)).peak_in_flight == (0, 0, 0)


def test_recompute_comes_between_forward_and_backward() -> None:
    verify(staircase("F0 R0 B0"))
    verify(staircase("F0 R0 I0 W0"))
    verify(staircase("F0 F1 R0 B0 B1"))


def test_skip_edges_are_dependencies() -> None:
    """Stages 0 and 2 on one rank: without the edge 0->2 nothing keeps 2 from running first."""
    schedule = placed((0, 1, 0), "2F0 0F0", "1F0")
    verify(schedule, edges=[(0, 1)])
    with pytest.raises(ScheduleError, match="rank 0 waits at 2F0 for 0F0 of rank 0 itself, later in its order"):
        verify(schedule, edges=[(0, 1), (0, 2)])


# Mutations --------------------------------------------------------------------------------------------------


def test_a_missing_action_is_rejected() -> None:
    for schedule in schedules():
        for rank, i in places(schedule):
            order = list(schedule.orders[rank])
            del order[i]
            mutant = with_order(schedule, rank, order)
            if mutant.trains == schedule.trains:  # F0 B0 without B0 is a good schedule that only runs forward
                assert not accepts(mutant)


def test_a_repeated_action_is_rejected() -> None:
    for schedule in schedules():
        for rank, i in places(schedule):
            order = list(schedule.orders[rank])
            for at in {i, i + 1, len(order)}:
                assert not accepts(with_order(schedule, rank, [*order[:at], order[i], *order[at:]]))


def test_swapped_neighbours_are_rejected_exactly_if_they_cannot_run() -> None:
    for schedule in schedules():
        for rank, i in places(schedule):
            order = list(schedule.orders[rank])
            if i:
                order[i - 1], order[i] = order[i], order[i - 1]
                mutant = with_order(schedule, rank, order)
                assert accepts(mutant) == can_run(mutant), mutant.orders


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_mutants_are_rejected_exactly_if_they_cannot_run(data: st.DataObject) -> None:
    name, v = data.draw(st.sampled_from(VARIANTS))
    schedule = build(name, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)), v)
    for _ in range(data.draw(st.integers(1, 3))):
        rank = data.draw(st.integers(0, schedule.num_ranks - 1))
        order = list(schedule.orders[rank])
        if not order:
            continue
        place = st.integers(0, len(order) - 1)
        what = data.draw(st.sampled_from(["move", "swap", "kind"]))
        i, j = data.draw(place), data.draw(place)
        if what == "move":
            order.insert(j, order.pop(i))
        elif what == "swap":
            order[i], order[j] = order[j], order[i]
        else:
            order[i] = order[i]._replace(kind=data.draw(st.sampled_from("FRBIW")))
        schedule = with_order(schedule, rank, order)
    assert accepts(schedule) == can_run(schedule)


# Error messages -------------------------------------------------------------------------------------


def fault(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        verify(schedule)
    return str(caught.value)


def test_deadlock_names_the_cycle() -> None:
    """Rank 0 waits for a gradient before it sends the micro-batch that rank 1 needs before computing that gradient."""
    text = fault(
        staircase(
            "F0 B0 F1 B1",
            "F0 F1 B0 B1",
        )
    )
    assert text == "\n".join(
        [
            "schedule 'drawn': deadlock: rank 0 waits at 0B0 for 1B0 of rank 1, which waits at 1F1 for 0F1 of rank 0",
            "",
            "          0    1    2    3",
            "rank 0:  0F0 [0B0] 0F1  0B1  <-- here: waits for 1B0",
            "rank 1:  1F0 [1F1] 1B0  1B1  <-- here: waits for 0F1",
        ]
    )


def test_deadlock_aligns_the_marked_cells() -> None:
    """A cycle over three ranks, each at another position; the rank outside it is drawn without a mark."""
    text = fault(
        staircase(
            "F0 F1 F2 F3 B0 B1 B2 B3",
            "F0 F1 B0 F2 F3 B1 B2 B3",
            "F0 B0 F1 B1 F2 F3 B2 B3",
            "F0 F1 F2 B0 F3 B1 B2 B3",
        )
    )
    assert text.startswith(
        "schedule 'drawn': deadlock: rank 2 waits at 2B0 for 3B0 of rank 3, which waits at 3F1 for 2F1 of rank 2\n"
    )
    rows = text.splitlines()[3:]
    assert [row.partition(" <-- here")[2].strip() for row in rows] == [
        "",
        "",
        ": waits for 3B0",
        ": waits for 2F1",
    ]


def test_deadlock_of_three() -> None:
    """Stages 0 and 3 on rank 0, which wants the end of one micro-batch before it starts the next ones."""
    text = fault(
        placed(
            (0, 1, 2, 0),
            "0F0 3F0 3B0 3F1 0F1 3B1 0B0 0B1",
            "1F0 1F1 1B0 1B1",
            "2F0 2F1 2B0 2B1",
        )
    )
    assert text.startswith(
        "schedule 'drawn': deadlock: rank 0 waits at 3F1 for 2F1 of rank 2, "
        "which waits at 2F1 for 1F1 of rank 1, which waits at 1F1 for 0F1 of rank 0\n"
    )
    assert "rank 0:  0F0  3F0  3B0 [3F1] 0F1" in text
    assert "[2F1] 2B0  2B1" in text
    assert "<-- here (position 3): waits for 2F1" in text
    assert "<-- here (position 1): waits for 0F1" in text


def test_missing_action() -> None:
    text = fault(staircase("F0 F1 B0 B1", "F0 B0 F1"))
    assert "1B1 of rank 1 is missing: 1F1 is present, but not its backward (B, or I and W)" in text
    assert "rank 1:  1F0  1B0 [1F1]      <-- here: 1B1 does not follow" in text
    assert "0W0 of rank 0 is missing: 0I0 is present, but not its weight gradient" in fault(staircase("F0 I0"))
    text = fault(staircase("F0 F1 B0 B1", "F0 B0"))
    assert "1F1 of rank 1 is missing: stage 1 has no action on micro-batch 1" in text
    assert "[-]" in text


def test_wrong_order_within_a_stage() -> None:
    text = fault(staircase("F0 B0", "B0 F0"))
    assert "1B0 of rank 1 (position 0) needs 1F0 before it, which is at position 1" in text
    assert "rank 1: [1B0] 1F0  <-- here" in text
    assert "needs 0F0 before it, which is missing" in fault(staircase("B0"))
    assert "0W0 of rank 0 (position 1) needs 0I0 before it" in fault(staircase("F0 W0 I0"))
    assert "0R0 of rank 0 (position 2) is too late" in fault(staircase("F0 B0 R0"))
    assert "0R0 of rank 0 (position 0) needs 0F0 before it" in fault(staircase("R0 F0 B0"))


def test_repeated_action() -> None:
    text = fault(staircase("F0 F1 B0 F0 B1"))
    assert "0F0 of rank 0 (position 3) occurs a second time: the first is at position 0" in text
    assert "[0F0]" in text
    assert "0R0 of rank 0 (position 2) occurs a second time" in fault(staircase("F0 R0 R0 B0"))
    assert "a stage runs B, or I and W, on a micro-batch, never both" in fault(staircase("F0 B0 W0"))
    assert "0B0 of rank 0 (position 2) repeats backward work" in fault(staircase("F0 I0 B0"))


def test_misplaced_action() -> None:
    good = staircase("F0 B0", "F0 B0")
    swapped = replace(good, placement=(1, 0))
    assert "0F0 of rank 0 (position 0) is not possible: stage 0 is on rank 1" in fault(swapped)
    assert "there is no stage 5: there are 2 (0..1)" in fault(with_order(good, 1, [Action(5, "F", 0)]))
    assert "there is no stage -1" in fault(with_order(good, 1, [Action(-1, "F", 0)]))
    assert "there is no micro-batch 3: there are 1 (0..0)" in fault(with_order(good, 1, [Action(1, "F", 3)]))
    assert "there is no micro-batch -1" in fault(with_order(good, 1, [Action(1, "F", -1)]))
    text = fault(with_order(good, 1, [Action(1, "X", 0)]))
    assert "1X0 of rank 1 (position 0) is of an unknown kind: expected one of F, R, B, I, W" in text


def test_ranks_and_stages_that_do_not_match() -> None:
    good = staircase("F0 B0", "F0 B0")
    assert "stage 1 is placed on rank 2, but there are 2 ranks (0..1)" in fault(replace(good, placement=(0, 2)))
    assert "rank 1 holds no stage" in fault(replace(good, placement=(0, 0)))
    assert "there are 0 ranks" in fault(Schedule.of("x", (), (), 1))
    assert "there are 0 stages" in fault(Schedule.of("x", (), ((),), 1))
    assert "there are 0 micro-batches" in fault(Schedule.of("x", (0,), ((),), 0))


@pytest.mark.parametrize("edge", [(0, 2), (1, 0), (0, 0), (-1, 1)])
def test_edges_go_to_later_stages(edge: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match=f"edge {edge[0]}->{edge[1]} is not possible"):
        verify(staircase("F0 B0", "F0 B0"), edges=[edge])


def test_a_long_schedule_is_shown_only_around_the_fault() -> None:
    good = build("1f1b", 4, 100)
    order = list(good.orders[2])
    del order[100]
    text = fault(with_order(good, 2, order))
    assert len(text.splitlines()) == 2 + 1 + 4
    assert max(map(len, text.splitlines())) < 110


def test_huge_number_of_microbatches() -> None:
    text = fault(replace(staircase("F0 F1 B0 B1"), num_microbatches=10**30))
    assert "0F2 of rank 0 is missing: stage 0 has no action on micro-batch 2" in text
