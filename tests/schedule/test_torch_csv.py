"""The CSV that torch.distributed.pipelining reads and writes."""

from __future__ import annotations

import csv
import io

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _Action

from penstock.errors import ScheduleError
from penstock.schedule.registry import build
from penstock.schedule.schedule import Action, Schedule
from penstock.schedule.text import from_csv, to_csv
from tests.schedule.interpreter import run
from tests.schedule.samples import schedules
from tests.schedule.test_generators import check_complete


def torch_csv(name: str, p: int, m: int, v: int, with_comms: bool = False) -> str:
    """The CSV of a schedule of torch."""
    out = io.StringIO()
    for row in get_schedule_ops(name, p, m, v, with_comms=with_comms):
        csv.writer(out).writerow("" if action is None else str(action) for action in row)
    return out.getvalue()


def test_a_row_for_each_rank() -> None:
    assert to_csv(build("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_round_trip() -> None:
    for schedule in schedules():
        assert from_csv(to_csv(schedule), schedule.name) == schedule


def test_torch_reads_our_cells() -> None:
    for schedule in schedules([(3, 4)]):
        for row, order in zip(csv.reader(io.StringIO(to_csv(schedule))), schedule.orders, strict=True):
            assert [str(_Action.from_str(cell)) for cell in row] == [str(action) for action in order]


# torch's own 1F1B is not among them: the order that torch 2.13 shows for it starts with F1 on the last rank.
@pytest.mark.parametrize(
    ("name", "v"),
    [
        ("GPipe", 1),
        ("Interleaved1F1B", 2),
        ("Interleaved1F1B", 3),
        ("LoopedBFS", 2),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ],
)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
def test_schedules_of_torch_load(name: str, v: int, p: int, m: int) -> None:
    schedule = from_csv(torch_csv(name, p, m, v), name)
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (p, p * v, m)
    run(schedule)
    if name != "LoopedBFS":  # whose backwards go from the last micro-batch to the first
        check_complete(schedule)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_communication_of_torch_is_ignored(name: str) -> None:
    assert from_csv(torch_csv(name, 2, 4, 2, with_comms=True)) == from_csv(torch_csv(name, 2, 4, 2))


@pytest.mark.parametrize(("theirs", "ours"), [("GPipe", "gpipe"), ("DualPipeV", "dualpipev")])
def test_the_same_order_as_torch(theirs: str, ours: str) -> None:
    for p, m in ((2, 4), (3, 7), (4, 8)):
        schedule = build(ours, p, m)
        assert from_csv(torch_csv(theirs, p, m, schedule.num_stages // p), ours) == schedule


def test_kinds_of_cells() -> None:
    schedule = from_csv("0UNSHARD,0F0,,0SEND_F0, 0B0 ,0REDUCE_GRAD,0RESHARD\n,1RECV_F0,(1F0;1B0)OVERLAP_F_B,\n\n")
    assert schedule.orders == (
        (Action(0, "F", 0), Action(0, "B", 0)),
        (Action(1, "F", 0), Action(1, "B", 0)),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no action in this schedule"),
        ("0F0,0B0\n1F0,,1Q0\n", "row 2, column 3: '1Q0' is not an action"),
        ("0F0,0ALLGATHER\n", "row 1, column 2: '0ALLGATHER' is not an action"),
        ("0F0,(0F1;0B)OVERLAP_F_B\n", "row 1, column 2: '0B' is not an action"),
        ("0F0,0B0\n0F1,0B1\n", "row 2, column 1: 0F1 puts stage 0 on rank 1, but it is on rank 0 already"),
        ("0F0,0B0\n2F0,2B0\n", "row 2, column 1: there is a stage 2, but no stage 1 anywhere"),
        ("0F1,0B1\n", "row 1, column 1: there is a micro-batch 1, but no micro-batch 0 anywhere"),
    ],
)
def test_errors_name_the_location(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        from_csv(text)
    assert message in str(error.value)


def test_torch_has_no_recompute() -> None:
    schedule = Schedule.of("r", (0,), [map(Action.parse, ["0F0", "0R0", "0B0"])], 1)
    with pytest.raises(ScheduleError, match=r"schedule 'r' has recompute actions \(R\)"):
        to_csv(schedule)
