"""The one runner: a program becomes a list of calls, made once, and a step is a walk along that list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from penstock.engine.doing import Progress
from penstock.engine.message import Message, merge
from penstock.engine.offload import returns
from penstock.engine.stage import Slot, StageEngine
from penstock.schedule.program import Instruction

__all__ = ["Ends", "HeldLane", "Lane", "PostedLane", "Runner", "Wiring", "compile_program"]

Call = Callable[[], None]


class Lane(Protocol):
    """One edge in one direction: what a stage sends along it, another one takes.

    What another rank sends lands first, and is taken then: so a rank that waits is seen to wait, and not to compute.
    """

    def send(self, microbatch: int, payload: Any) -> None: ...

    def land(self, microbatch: int) -> None: ...

    def take(self, microbatch: int) -> Any: ...


@runtime_checkable
class PostedLane(Lane, Protocol):
    """A lane between processes: receives are posted ahead, and sends are over some time later."""

    def post(self, microbatch: int) -> None: ...

    def sent(self, microbatch: int) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class HeldLane(Lane, Protocol):
    """A lane within a process whose sender waits until what it sent, or enough of that, is taken."""

    def taken(self) -> None: ...


@dataclass
class Ends:
    """Where the pipeline meets the outside: what goes in, what comes out, and their gradients."""

    inputs: list[Message] = field(default_factory=list)
    outputs: list[Message | None] | None = None
    seed: Callable[[int], Sequence[Tensor | None]] | None = None  # gradients of the last stage's outputs
    grads: list[Sequence[Tensor | None]] | None = None  # gradients of the first stage's inputs


@dataclass(frozen=True)
class Wiring:
    """What a program's instructions are bound to. Lanes go by (sending stage, receiving stage)."""

    stages: Mapping[int, StageEngine]  # of this rank
    slots: Mapping[tuple[int, int], Slot]
    forward: Mapping[tuple[int, int], Lane]
    backward: Mapping[tuple[int, int], Lane]
    ends: Ends
    reduce: Callable[[int], None] | None = None
    work: Callable[[StageEngine, Sequence[Tensor | None], Slot], None] | None = None  # None: the stage's own


class Runner:
    """A compiled program of one rank."""

    def __init__(self, calls: Sequence[Call], instructions: Sequence[Instruction]) -> None:
        self.calls = tuple(calls)
        self.instructions = tuple(instructions)
        self.progress = Progress()

    def run(self) -> None:
        progress = self.progress
        for progress.at, call in enumerate(self.calls):
            call()
        progress.at = -1

    def halves(self) -> tuple[Runner, Runner]:
        """What comes before the first backward, and what comes from there on."""
        kinds = [instruction.kind for instruction in self.instructions]
        at = next(i for i, kind in enumerate(kinds) if kind in ("R", "B"))
        while at and kinds[at - 1] == "RECV_B":  # what the backward waits for
            at -= 1
        parts = slice(at), slice(at, None)
        first, second = (Runner(self.calls[part], self.instructions[part]) for part in parts)
        return first, second

    @property
    def current(self) -> Instruction | None:
        """The instruction under way, or the one that failed."""
        return self.instructions[self.progress.at] if self.progress.at >= 0 else None


def compile_program(instructions: Iterable[Instruction], wiring: Wiring) -> Runner:
    """Bind every instruction to the objects it works on.

    Lanes within a process need no posting and no releasing. An edge between two stages of one rank has no send in
    the program: its message is handed over right after the action that made it.
    """
    calls: list[Call] = []
    done: list[Instruction] = []
    instructions = list(instructions)
    back = returns(instructions) if any(stage.offload for stage in wiring.stages.values()) else {}
    away = {pair for pairs in back.values() for pair in pairs if wiring.stages[pair[0]].offload is not None}
    weights = next((stage.weights for stage in wiring.stages.values() if stage.weights is not None), None)
    stops = {} if weights is None else weights.calls(instructions, wiring.stages)
    for at, instruction in enumerate(instructions):
        for call, of in (
            *(((stops[at], instruction),) if at in stops else ()),
            *((call, instruction) for call in _come_back(back.get(at, ()), away, wiring)),
            *((call, instruction) for call in _go(instruction, away, wiring)),
            *_wait(instruction, wiring),
            *((call, instruction) for call in _bind(instruction, wiring)),
            *_hold(instruction, wiring),
        ):
            calls.append(call)
            done.append(of)
    if len(instructions) in stops:
        calls.append(stops[len(instructions)])
        done.append(instructions[-1])
    return Runner(calls, done)


def _come_back(pairs: Iterable[tuple[int, int]], away: set[tuple[int, int]], wiring: Wiring) -> list[Call]:
    return [partial(_prefetch, wiring.stages[pair[0]], pair[1]) for pair in pairs if pair in away]


def _go(instruction: Instruction, away: set[tuple[int, int]], wiring: Wiring) -> list[Call]:
    pair = instruction.stage, instruction.microbatch
    return [partial(_send_away, wiring.slots[pair])] if instruction.kind == "F" and pair in away else []


def _wait(instruction: Instruction, wiring: Wiring) -> list[tuple[Call, Instruction]]:
    """The waits for what other ranks send to an action, under the names of their receives."""
    kind, stage, k, _ = instruction
    if kind not in ("F", "B", "I"):
        return []
    lane_name, lanes = ("F", wiring.forward) if kind == "F" else ("B", wiring.backward)
    return [
        (partial(lane.land, k), Instruction(f"RECV_{lane_name}", stage, k, src))
        for (src, dst), lane in sorted(lanes.items(), key=lambda pair: pair[0])
        if dst == stage and src not in wiring.stages
    ]


def _hold(instruction: Instruction, wiring: Wiring) -> list[tuple[Call, Instruction]]:
    """The wait until a message is taken, where a lane asks for it."""
    lane = wiring.forward[instruction.stage, instruction.peer] if instruction.kind == "SEND_F" else None
    return [(lane.taken, instruction._replace(kind="SENT_F"))] if isinstance(lane, HeldLane) else []


def _bind(instruction: Instruction, wiring: Wiring) -> list[Call]:
    kind, stage, k, peer = instruction
    if kind == "F":
        return [_bind_forward(stage, k, wiring), *_hand_over(stage, k, wiring, "F")]
    if kind in ("B", "I"):
        return [_bind_backward(kind, stage, k, wiring), *_hand_over(stage, k, wiring, "B")]
    if kind == "R":
        return [partial(wiring.stages[stage].recompute, k, wiring.slots[stage, k])]
    if kind == "W":
        return [partial(wiring.stages[stage].weight_gradient, wiring.slots[stage, k])]
    if kind == "REDUCE":
        return [] if wiring.reduce is None else [partial(wiring.reduce, stage)]
    what, lane_name = kind.split("_")
    if what == "SEND":
        return [_bind_send(stage, peer, k, wiring, lane_name)]
    lanes = wiring.forward if lane_name == "F" else wiring.backward
    lane = lanes[(peer, stage) if what == "RECV" else (stage, peer)]
    if not isinstance(lane, PostedLane):
        return []
    return [partial(lane.post if what == "RECV" else lane.sent, k)]


def _bind_forward(stage: int, k: int, wiring: Wiring) -> Call:
    engine, slot = wiring.stages[stage], wiring.slots[stage, k]
    lanes = _into(stage, wiring.forward)
    if not lanes:
        return partial(_enter, engine, k, slot, wiring.ends)
    return partial(_forward, engine, k, slot, *lanes) if len(lanes) == 1 else partial(_meet, engine, k, slot, lanes)


def _bind_backward(kind: str, stage: int, k: int, wiring: Wiring) -> Call:
    engine, slot = wiring.stages[stage], wiring.slots[stage, k]
    if kind == "I":
        work = engine.input_gradient
    else:
        work = engine.backward if wiring.work is None else partial(wiring.work, engine)
    lanes = _into(stage, wiring.backward)
    if not lanes:
        return partial(_turn, work, k, slot, wiring.ends)
    return partial(_backward, work, k, slot, *lanes) if len(lanes) == 1 else partial(_meet_back, work, k, slot, lanes)


def _bind_send(stage: int, peer: int, k: int, wiring: Wiring, lane_name: str) -> Call:
    """The message of one edge out of the stage, or the gradients of one edge into it."""
    lanes = wiring.forward if lane_name == "F" else wiring.backward
    peers = sorted(dst for src, dst in lanes if src == stage)
    lane, slot = lanes[stage, peer], wiring.slots[stage, k]
    if len(peers) == 1:
        return partial(_send_output if lane_name == "F" else _send_grads, lane, k, slot)
    return partial(_send_part if lane_name == "F" else _send_row, lane, k, slot, peers.index(peer))


def _into(stage: int, lanes: Mapping[tuple[int, int], Lane]) -> list[Lane]:
    return [lanes[src, dst] for src, dst in sorted(lanes) if dst == stage]


def _hand_over(stage: int, k: int, wiring: Wiring, lane_name: str) -> list[Call]:
    """What follows an action without an instruction of its own: edges inside this rank, and the pipeline's ends."""
    lanes = wiring.forward if lane_name == "F" else wiring.backward
    peers = sorted(dst for src, dst in lanes if src == stage)
    if not peers:
        leave = _leave_forward if lane_name == "F" else _leave_backward
        return [partial(leave, wiring.ends, k, wiring.slots[stage, k])]
    return [_bind_send(stage, peer, k, wiring, lane_name) for peer in peers if peer in wiring.stages]


# What the calls of a compiled program do.


def _prefetch(engine: StageEngine, k: int) -> None:
    assert engine.offload is not None
    engine.offload.prefetch(k)


def _send_away(slot: Slot) -> None:
    slot.away, slot.bare = True, False


def _enter(engine: StageEngine, k: int, slot: Slot, ends: Ends) -> None:
    engine.forward(k, ends.inputs[k], slot)


def _forward(engine: StageEngine, k: int, slot: Slot, lane: Lane) -> None:
    engine.forward(k, lane.take(k), slot)


def _meet(engine: StageEngine, k: int, slot: Slot, lanes: Sequence[Lane]) -> None:
    message, slot.shares = merge([lane.take(k) for lane in lanes])
    engine.forward(k, message, slot)


def _turn(work: Callable[..., None], k: int, slot: Slot, ends: Ends) -> None:
    assert ends.seed is not None
    work(ends.seed(k), slot)


def _backward(work: Callable[..., None], k: int, slot: Slot, lane: Lane) -> None:
    work(lane.take(k), slot)


def _meet_back(work: Callable[..., None], k: int, slot: Slot, lanes: Sequence[Lane]) -> None:
    work([grad for lane in lanes for grad in lane.take(k)], slot)


def _send_output(lane: Lane, k: int, slot: Slot) -> None:
    lane.send(k, slot.message)
    slot.message = None


def _send_grads(lane: Lane, k: int, slot: Slot) -> None:
    lane.send(k, slot.grads)
    slot.grads = ()


def _send_part(lane: Lane, k: int, slot: Slot, part: int) -> None:
    lane.send(k, slot.messages[part])
    slot.messages[part] = None


def _send_row(lane: Lane, k: int, slot: Slot, part: int) -> None:
    lane.send(k, slot.rows[part])
    slot.rows[part] = slot.grads = ()


def _leave_forward(ends: Ends, k: int, slot: Slot) -> None:
    if ends.outputs is not None:
        ends.outputs[k] = slot.message
    slot.message = None


def _leave_backward(ends: Ends, k: int, slot: Slot) -> None:
    if ends.grads is not None:
        ends.grads[k] = slot.grads
    slot.grads = ()
