"""Chains of waiting ranks, hang reports, rank status and heartbeats.

rank 0   in 0F1
rank 1   waits for rank 0          "rank 2 waits for 2RECV_F1 from rank 1, which waits for 1RECV_F1 from rank 0,
rank 2   waits for rank 1            which has been in 0F1 for 31 s"
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from penstock.engine.failure.status import (
    LOSS,
    NEXT_BATCH,
    HangDetector,
    HangLimits,
    Heartbeat,
    RankStatus,
    Snapshot,
    WaitChain,
    wait_chain,
)
from penstock.engine.runner import CallInfo, Runner
from penstock.schedule.lower import Instruction

WORKS = Snapshot("works", "in 0F1", place=(0, 1, "0F1"), age=31.2)


def waits(*ranks: int, what: str = "for the loss from") -> Snapshot:
    return Snapshot("waits", what, ranks)


def chain_of(snapshots: dict[int, Snapshot], start: int) -> WaitChain:
    return wait_chain(start, snapshots[start], snapshots.get)


# ── the chain ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_rank_waits_for_one_that_works() -> None:
    snapshots = {1: replace(WORKS, what="in 1F1"), 2: waits(1, what="for 3RECV_F1 from")}
    text, end, found = chain_of(snapshots, 2)
    assert text == "rank 2 waits for 3RECV_F1 from rank 1, which has been in 1F1 for 31 s"
    assert (end, found) == (1, snapshots[1])


def test_a_chain_is_followed_to_its_end() -> None:
    snapshots = {0: WORKS, 1: waits(0, what="for 1RECV_F1 from"), 2: waits(1, what="until 2SEND_B0 is received by")}
    assert chain_of(snapshots, 2)[0] == (
        "rank 2 waits until 2SEND_B0 is received by rank 1, which waits for 1RECV_F1 from rank 0, "
        "which has been in 0F1 for 31 s"
    )


def test_a_cycle_is_named() -> None:
    snapshots = {0: waits(2), 1: waits(0), 2: waits(1)}
    assert chain_of(snapshots, 2)[0] == (
        "rank 2 waits for the loss from rank 1, which waits for the loss from rank 0, "
        "which waits for the loss from rank 2: they wait for each other"
    )


def test_a_cycle_further_on_is_named() -> None:
    snapshots = {0: waits(1), 1: waits(0), 2: waits(1)}
    assert chain_of(snapshots, 2)[0].endswith("which waits for the loss from rank 1: they wait for each other")


def test_of_several_ranks_the_one_that_does_not_wait_is_named() -> None:
    snapshots = {0: waits(1, 2, 3), 1: waits(0, 2, 3), 2: replace(WORKS, what="in 2B0"), 3: waits(0, 1, 2)}
    text, end, _ = chain_of(snapshots, 0)
    assert text == "rank 0 waits for the loss from ranks 1, 2, 3, of which rank 2 has been in 2B0 for 31 s"
    assert end == 2


def test_of_several_waiting_ranks_one_that_waits_for_others_is_followed() -> None:
    snapshots = {0: waits(1, 2), 1: waits(0, 2), 2: waits(5), 5: WORKS}
    text, end, _ = chain_of(snapshots, 0)
    assert text == (
        "rank 0 waits for the loss from ranks 1, 2, of which rank 2 waits for the loss from rank 5, "
        "which has been in 0F1 for 31 s"
    )
    assert end == 5


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        (None, "has sent no status yet"),
        (Snapshot("idle", "a step", age=31), "is not in a step: its last one ended 31 s ago"),
        (Snapshot("idle", age=31), "is not in a step: it has run none since it built its pipeline 31 s ago"),
        (replace(WORKS, line="train.py:12, in forward"), "has been in 0F1 for 31 s (at train.py:12, in forward)"),
        (replace(WORKS, silent=8.0), "has sent no heartbeat for 8 s (is its process stopped?) and was last in 0F1"),
        (
            replace(waits(3), silent=8.0),
            "has sent no heartbeat for 8 s (is its process stopped?) and last waited for the loss from rank 3",
        ),
    ],
)
def test_status_of_the_last_rank(snapshot: Snapshot | None, expected: str) -> None:
    text, end, found = wait_chain(1, waits(0), lambda rank: snapshot)
    assert text == f"rank 1 waits for the loss from rank 0, which {expected}"
    assert (end, found) == (0, snapshot)


# ── reports ────────────────────────────────────────────────────────────────────────────────────────────────────


def reports(detector: HangDetector, ages: list[float], caplog: pytest.LogCaptureFixture) -> list[float]:
    """The ages at which a report was logged."""
    found = []
    for age in ages:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "penstock"):
            assert detector.check(replace(waits(0), age=age), age, lambda: ("rank 1 waits", 0, WORKS)) is None
        if caplog.messages:
            found.append(age)
    return found


def test_reports_after_the_limit_and_then_at_double_the_age(caplog: pytest.LogCaptureFixture) -> None:
    detector = HangDetector(RankStatus(), HangLimits(10.0, None))
    detector.update(0.0)
    ages = [float(age) for age in range(100)]
    assert reports(detector, ages, caplog) == [10, 20, 40, 80]
    assert reports(detector, ages, caplog) == []
    detector.status.enter_call()
    detector.update(100.0)  # the rank has moved
    assert reports(detector, [100.0], caplog) == [100]


def test_without_a_limit_nothing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert reports(HangDetector(RankStatus(), HangLimits(None, None)), [1.0, 1e6], caplog) == []


def test_a_rank_that_works_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    detector = HangDetector(RankStatus(), HangLimits(10.0, 20.0))
    with caplog.at_level(logging.WARNING, "penstock"):
        for snapshot in (WORKS, Snapshot("idle", "a step")):
            assert detector.check(replace(snapshot, age=1e6), 1e6, lambda: ("", 0, None)) is None
    assert not caplog.messages


def test_a_timeout_is_a_cause_that_names_the_last_rank_of_the_chain() -> None:
    detector = HangDetector(RankStatus(), HangLimits(None, 30.0))
    found = replace(WORKS, stack="the stack")
    assert detector.check(replace(waits(0), age=29.0), 29.0, lambda: ("rank 1 waits", 0, found)) is None
    cause = detector.check(replace(waits(0), age=30.5), 30.5, lambda: ("rank 1 waits", 0, found))
    assert cause is not None
    error = cause.error()
    assert (error.rank, error.stage, error.microbatch, error.action) == (0, 0, 1, "0F1")
    assert "action 0F1: timed out: rank 1 waits: longer than timeout=30 s" in str(error)
    assert "On rank 0:\nthe stack" in str(error)


# ── rank status ─────────────────────────────────────────────────────────────────────────────────────────────────


def runner_at(instruction: Instruction) -> Runner:
    runner = Runner([lambda: None], [instruction], [CallInfo()])
    runner.at = 0
    return runner


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        (Instruction("F", 1, 3), "has been in 1F3 for 0 s"),
        (Instruction("RECV_F", 1, 3, 0), "waits for 1RECV_F3 from rank 10"),
        (Instruction("RECV_B", 1, 3, 2), "waits for 1RECV_B3 from rank 12"),
        (Instruction("SENT_F", 1, 3, 2), "waits until 1SEND_F3 is received by rank 12"),
        (Instruction("SEND_F", 1, 3, 2), "has been in 1SEND_F3 for 0 s"),
    ],
)
def test_status_in_a_program(instruction: Instruction, expected: str) -> None:
    status = RankStatus()
    status.stage_ranks = [10, 11, 12]
    status.enter_call()
    status.runner = runner_at(instruction)
    assert str(status.snapshot()[1]) == expected


def test_status_in_the_phases_of_a_call() -> None:
    status = RankStatus()
    assert str(status.snapshot()[1]) == "has been building its pipeline for 0 s"
    status.phase = NEXT_BATCH
    assert str(status.snapshot()[1]).startswith("is not in a step: it has run none")
    status.enter_call()
    status.phase = NEXT_BATCH
    assert str(status.snapshot()[1]) == "has been preparing a mini-batch for 0 s"
    with status.waiting([4]):
        assert str(status.snapshot()[1]) == "waits for the next mini-batch from rank 4"
    status.phase = LOSS
    with status.waiting([4, 6]):
        assert str(status.snapshot()[1]) == "waits for the loss from ranks 4, 6"
    status.call_depth = 0
    assert str(status.snapshot()[1]).startswith("is not in a step: its last one ended")


def test_the_same_instruction_of_another_step_is_another_key() -> None:
    status = RankStatus()
    status.runner = runner_at(Instruction("F", 0, 0))
    keys = []
    for _ in range(2):
        status.enter_call()
        keys += [status.snapshot()[0], status.snapshot()[0]]
        status.call_depth = 0
    assert keys[0] == keys[1]
    assert keys[2] == keys[3] != keys[0]


def test_two_waits_have_two_keys() -> None:
    status = RankStatus()
    keys = []
    for _ in range(2):
        with status.waiting([1]):
            keys.append(status.snapshot()[0])
    assert keys[0] != keys[1]


def test_line_of_python_is_outside_of_libraries() -> None:
    """A wait for an event is in the standard library; the line is the one that called it."""
    inside, leave = threading.Event(), threading.Event()
    status = RankStatus()

    def hang() -> None:
        status.thread = threading.get_ident()
        inside.set()
        leave.wait(10)

    thread = threading.Thread(target=hang)
    thread.start()
    inside.wait(10)
    try:
        end = time.monotonic() + 10
        while "wait" not in status.python_stack()[1] and time.monotonic() < end:
            time.sleep(0.01)
        at, stack = status.python_stack()
        assert at.startswith("test_hang_detector.py:")
        assert at.endswith(", in hang")
        assert "leave.wait(10)" in stack
    finally:
        leave.set()
        thread.join()


# ── heartbeats ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def heartbeats() -> Callable[[int], Heartbeat]:
    store: Any = dist.HashStore()
    limits = HangLimits(8.0, None)
    return lambda rank: Heartbeat(store, rank, limits)


def test_a_snapshot_is_read_as_it_was_sent(heartbeats: Callable[[int], Heartbeat]) -> None:
    sender, reader = heartbeats(0), heartbeats(1)
    assert reader.read(0, 0.0) is None
    sender.send(replace(WORKS, ranks=(3, 4)), 0.0)
    snapshot = reader.read(0, 0.0)
    assert snapshot is not None
    assert snapshot == replace(WORKS, ranks=(3, 4), beat=1)


def test_the_stack_is_known_once_a_rank_has_not_moved_for_long() -> None:
    detector = HangDetector(RankStatus(), HangLimits(8.0, None))
    for now, wanted in ((0.0, False), (3.0, False), (5.0, True)):
        snapshot = detector.update(now)
        assert snapshot.age == now
        assert bool(snapshot.line) == bool(snapshot.stack) == wanted


def test_a_rank_without_new_heartbeats_is_silent(heartbeats: Callable[[int], Heartbeat]) -> None:
    sender, reader = heartbeats(0), heartbeats(1)
    silences = []
    for now in range(12):
        if now < 5:
            sender.send(WORKS, float(now))
        snapshot = reader.read(0, float(now))
        assert snapshot is not None
        silences.append(snapshot.silent)
    assert silences == [0] * 9 + [5, 6, 7]  # last heartbeat at 4
