"""When weights come and go: before which instruction, and after which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from penstock.engine.offload.weights import ParamsKey, Transfer, prefetch_plan
from penstock.schedule.lower import Instruction, lower
from penstock.schedule.provider import merge_ranks
from penstock.schedule.registry import build

ALONE = {stage: [(stage,)] for stage in range(8)}


def program(text: str) -> list[Instruction]:
    return [Instruction(word[1:-1], int(word[0]), int(word[-1])) for word in text.split()]


def name(part: Transfer) -> str:
    return "".join(map(str, part.cargo)) + "g" * part.grads


def told(instructions: Sequence[Instruction], cargo_of: Mapping[int, Sequence[ParamsKey]] = ALONE) -> list[str]:
    """Each stop in words: what goes (-), what starts to come (+), and the instruction it stands before."""
    lines = []
    for stop in prefetch_plan(instructions, cargo_of):
        moves = [f"-{name(part)}" for part in stop.go] + [f"+{name(part)}" for part in stop.come]
        lines.append(" ".join([*moves, str(instructions[stop.at]) if stop.at < len(instructions) else "end"]))
    return lines


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("", []),
        ("0F0 0F1", ["+0 0F0", "-0 end"]),
        ("0F0 0F1 1F0 1F1 2F0", ["+0 +1 0F0", "-0 +2 1F0", "-1 2F0", "-2 end"]),
        # Gradients come with the first backward, and go after the last one of the visit.
        ("0F0 0B0", ["+0 +0g 0F0", "-0 -0g end"]),
        ("0F0 1F0 1B0 0B0", ["+0 +1 +1g 0F0", "+0g 1F0", "-1 -1g 0B0", "-0 -0g end"]),
        ("0F0 0I0 1F0 0W0", ["+0 +0g +1 0F0", "1F0", "-1 0W0", "-0 -0g end"]),
        ("0R0 0B0", ["+0 +0g 0R0", "-0 -0g end"]),
        # Of three in turn, one is away.
        (
            "0F0 1F0 2F0 0F1 1F1 2F1",
            ["+0 +1 0F0", "-0 +2 1F0", "-1 +0 2F0", "-2 +1 0F1", "-0 +2 1F1", "-1 2F1", "-2 end"],
        ),
        # Two in turn are both there, and nothing moves.
        ("0F0 1F0 0F1 1F1", ["+0 +1 0F0", "1F0", "0F1", "-0 1F1", "-1 end"]),
    ],
)
def test_what_comes_and_goes(order: str, expected: list[str]) -> None:
    assert told(program(order)) == expected


def test_what_two_stages_use_stays_while_either_needs_it() -> None:
    cargo_of = {0: [(0,), (0, 2)], 1: [(1,)], 2: [(0, 2)], 3: [(3,)]}
    assert told(program("0F0 1F0 2F0 3F0"), cargo_of) == ["+0 +02 +1 0F0", "-0 1F0", "-1 +3 2F0", "-02 3F0", "-3 end"]


def test_stages_without_weights_are_no_visits() -> None:
    cargo_of = {0: [(0,)], 1: [], 2: [(2,)]}
    assert told(program("0F0 1F0 0F1 1F1 2F0"), cargo_of) == ["+0 +2 0F0", "-0 2F0", "-2 end"]
    assert told(program("1F0 1B0"), cargo_of) == []
    assert told(program("7F0"), cargo_of) == []


def test_communication_does_not_count() -> None:
    order = [Instruction("RECV_F", 0, 0, 3), Instruction("F", 0, 0), Instruction("SEND_F", 0, 0, 1)]
    order += [Instruction("F", 1, 0), Instruction("SEND_F", 1, 0, 2), Instruction("REDUCE", 1)]
    assert [stop.at for stop in prefetch_plan(order, ALONE)] == [1, 3, 6]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "sharded"])
def test_of_eight_stages_two_are_there(schedule: str) -> None:
    before = build(schedule, 8, 16)
    edges = [(s, s + 1) for s in range(before.num_stages - 1)]
    (lowered,) = lower(merge_ranks(before, edges, [0] * 8), edges)
    here: set[Transfer] = set()
    brought = 0
    begun = {
        stop.at: stop for stop in prefetch_plan(lowered.instructions, {s: [(s,)] for s in range(before.num_stages)})
    }
    in_use: tuple[Transfer, ...] = ()
    for at, instruction in enumerate([*lowered.instructions, None]):
        if at in begun:
            stop = begun[at]
            assert here.issuperset(stop.go)
            here -= set(stop.go)
            assert here.isdisjoint(stop.come)
            here |= set(stop.come)
            in_use = stop.use
            assert here.issuperset(in_use)
            assert sum(not part.grads for part in here) <= 2
            assert sum(part.grads for part in here) <= 2
            brought += sum(not part.grads for part in stop.come)
        if instruction is not None and instruction.kind in "FRBIW":
            assert Transfer((instruction.stage,)) in in_use
            assert instruction.kind in "FR" or Transfer((instruction.stage,), True) in in_use
    assert not here
    if schedule == "gpipe":
        assert brought == 8 + 6  # once for all forwards, once for all backwards; the last two do not leave in between
