"""The prefetch plan: before which instructions weights and gradients are prefetched and evicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from penstock.engine.offload.weights import ParamsKey, ParamTransfer, prefetch_plan
from penstock.schedule.lower import Instruction, lower
from penstock.schedule.registry import build
from penstock.schedule.schedule import merge_ranks

ALONE = {stage: [(stage,)] for stage in range(8)}


def program(text: str) -> list[Instruction]:
    return [Instruction(word[1:-1], int(word[0]), int(word[-1])) for word in text.split()]


def name(transfer: ParamTransfer) -> str:
    return "".join(map(str, transfer.params)) + "g" * transfer.grads


def describe(instructions: Sequence[Instruction], params_of: Mapping[int, Sequence[ParamsKey]] = ALONE) -> list[str]:
    """Each step as text: evicted (-), prefetched (+), and the instruction it comes before."""
    lines = []
    for step in prefetch_plan(instructions, params_of):
        moves = [f"-{name(t)}" for t in step.evict] + [f"+{name(t)}" for t in step.prefetch]
        lines.append(" ".join([*moves, str(instructions[step.at]) if step.at < len(instructions) else "end"]))
    return lines


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("", []),
        ("0F0 0F1", ["+0 0F0", "-0 end"]),
        ("0F0 0F1 1F0 1F1 2F0", ["+0 +1 0F0", "-0 +2 1F0", "-1 2F0", "-2 end"]),
        # Gradients are prefetched with the first backward, and evicted after the span.
        ("0F0 0B0", ["+0 +0g 0F0", "-0 -0g end"]),
        ("0F0 1F0 1B0 0B0", ["+0 +1 +1g 0F0", "+0g 1F0", "-1 -1g 0B0", "-0 -0g end"]),
        ("0F0 0I0 1F0 0W0", ["+0 +0g +1 0F0", "1F0", "-1 0W0", "-0 -0g end"]),
        ("0R0 0B0", ["+0 +0g 0R0", "-0 -0g end"]),
        # Three in turn: one is on the host.
        (
            "0F0 1F0 2F0 0F1 1F1 2F1",
            ["+0 +1 0F0", "-0 +2 1F0", "-1 +0 2F0", "-2 +1 0F1", "-0 +2 1F1", "-1 2F1", "-2 end"],
        ),
        # Two in turn: both stay on the device.
        ("0F0 1F0 0F1 1F1", ["+0 +1 0F0", "1F0", "0F1", "-0 1F1", "-1 end"]),
    ],
)
def test_prefetched_and_evicted(order: str, expected: list[str]) -> None:
    assert describe(program(order)) == expected


def test_params_of_two_stages_stay_while_either_needs_them() -> None:
    params_of = {0: [(0,), (0, 2)], 1: [(1,)], 2: [(0, 2)], 3: [(3,)]}
    assert describe(program("0F0 1F0 2F0 3F0"), params_of) == [
        "+0 +02 +1 0F0",
        "-0 1F0",
        "-1 +3 2F0",
        "-02 3F0",
        "-3 end",
    ]


def test_stages_without_weights_have_no_step() -> None:
    params_of = {0: [(0,)], 1: [], 2: [(2,)]}
    assert describe(program("0F0 1F0 0F1 1F1 2F0"), params_of) == ["+0 +2 0F0", "-0 2F0", "-2 end"]
    assert describe(program("1F0 1B0"), params_of) == []
    assert describe(program("7F0"), params_of) == []


def test_communication_does_not_count() -> None:
    order = [Instruction("RECV_F", 0, 0, 3), Instruction("F", 0, 0), Instruction("SEND_F", 0, 0, 1)]
    order += [Instruction("F", 1, 0), Instruction("SEND_F", 1, 0, 2), Instruction("REDUCE", 1)]
    assert [step.at for step in prefetch_plan(order, ALONE)] == [1, 3, 6]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "sharded"])
def test_at_most_two_of_eight_stages_are_present(schedule: str) -> None:
    before = build(schedule, 8, 16)
    edges = [(s, s + 1) for s in range(before.num_stages - 1)]
    (lowered,) = lower(merge_ranks(before, edges, [0] * 8), edges)
    present: set[ParamTransfer] = set()
    num_prefetched = 0
    begun = {
        step.at: step for step in prefetch_plan(lowered.instructions, {s: [(s,)] for s in range(before.num_stages)})
    }
    in_use: tuple[ParamTransfer, ...] = ()
    for at, instruction in enumerate([*lowered.instructions, None]):
        if at in begun:
            step = begun[at]
            assert present.issuperset(step.evict)
            present -= set(step.evict)
            assert present.isdisjoint(step.prefetch)
            present |= set(step.prefetch)
            in_use = step.use
            assert present.issuperset(in_use)
            assert sum(not t.grads for t in present) <= 2
            assert sum(t.grads for t in present) <= 2
            num_prefetched += sum(not t.grads for t in step.prefetch)
        if instruction is not None and instruction.kind in "FRBIW":
            assert ParamTransfer((instruction.stage,)) in in_use
            assert instruction.kind in "FR" or ParamTransfer((instruction.stage,), True) in in_use
    assert not present
    if schedule == "gpipe":
        assert (
            num_prefetched == 8 + 6
        )  # once for all forwards, once for all backwards; the last two do not leave in between
