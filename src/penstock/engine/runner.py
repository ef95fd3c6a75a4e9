"""The one runner: a program becomes a list of calls, made once, and a step is a walk along that list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from penstock.engine.stage import Message, Slot, StageEngine
from penstock.schedule.program import Instruction

__all__ = ["Ends", "Lane", "PostedLane", "Progress", "Runner", "Wiring", "compile_program"]

Call = Callable[[], None]


class Lane(Protocol):
    """One edge in one direction: what a stage sends along it, another one takes."""

    def send(self, microbatch: int, payload: Any) -> None: ...

    def take(self, microbatch: int) -> Any: ...


@runtime_checkable
class PostedLane(Lane, Protocol):
    """A lane between processes: receives are posted ahead, and sends are over some time later."""

    def post(self, microbatch: int) -> None: ...

    def sent(self, microbatch: int) -> None: ...

    def close(self) -> None: ...


@dataclass
class Progress:
    """Where a rank is in its program; read by others to say what it is doing."""

    at: int = -1


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
    work: Callable[[StageEngine, Sequence[Tensor | None], Slot], None] = StageEngine.backward


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
    for instruction in instructions:
        for call in _bind(instruction, wiring):
            calls.append(call)
            done.append(instruction)
    return Runner(calls, done)


def _bind(instruction: Instruction, wiring: Wiring) -> list[Call]:
    kind, stage, k, peer = instruction
    if kind == "F":
        return [_bind_forward(stage, k, wiring), *_hand_over(stage, k, wiring, wiring.forward, _send_output)]
    if kind in ("B", "I"):
        return [_bind_backward(kind, stage, k, wiring), *_hand_over(stage, k, wiring, wiring.backward, _send_grads)]
    if kind == "W":
        return [partial(wiring.stages[stage].weight_gradient, wiring.slots[stage, k])]
    if kind == "REDUCE":
        return [] if wiring.reduce is None else [partial(wiring.reduce, stage)]
    what, lane_name = kind.split("_")
    lanes = wiring.forward if lane_name == "F" else wiring.backward
    lane = lanes[(peer, stage) if what == "RECV" else (stage, peer)]
    if what == "SEND":
        return [partial(_send_output if lane_name == "F" else _send_grads, lane, k, wiring.slots[stage, k])]
    if not isinstance(lane, PostedLane):
        return []
    return [partial(lane.post if what == "RECV" else lane.sent, k)]


def _bind_forward(stage: int, k: int, wiring: Wiring) -> Call:
    engine, slot = wiring.stages[stage], wiring.slots[stage, k]
    lane = _into(stage, wiring.forward)
    return partial(_enter, engine, k, slot, wiring.ends) if lane is None else partial(_forward, engine, k, slot, lane)


def _bind_backward(kind: str, stage: int, k: int, wiring: Wiring) -> Call:
    engine, slot = wiring.stages[stage], wiring.slots[stage, k]
    work = partial(wiring.work, engine) if kind == "B" else engine.input_gradient
    lane = _into(stage, wiring.backward)
    return partial(_turn, work, k, slot, wiring.ends) if lane is None else partial(_backward, work, k, slot, lane)


def _into(stage: int, lanes: Mapping[tuple[int, int], Lane]) -> Lane | None:
    return next((lane for (_, dst), lane in lanes.items() if dst == stage), None)


def _hand_over(
    stage: int, k: int, wiring: Wiring, lanes: Mapping[tuple[int, int], Lane], send: Callable[[Lane, int, Slot], None]
) -> list[Call]:
    """What follows an action without an instruction of its own: edges inside this rank, and the pipeline's ends."""
    slot = wiring.slots[stage, k]
    outgoing = [(dst, lane) for (src, dst), lane in lanes.items() if src == stage]
    if not outgoing:
        leave = _leave_forward if send is _send_output else _leave_backward
        return [partial(leave, wiring.ends, k, slot)]
    return [partial(send, lane, k, slot) for dst, lane in outgoing if dst in wiring.stages]


# What the calls of a compiled program do.


def _enter(engine: StageEngine, k: int, slot: Slot, ends: Ends) -> None:
    engine.forward(k, ends.inputs[k], slot)


def _forward(engine: StageEngine, k: int, slot: Slot, lane: Lane) -> None:
    engine.forward(k, lane.take(k), slot)


def _turn(work: Callable[..., None], k: int, slot: Slot, ends: Ends) -> None:
    assert ends.seed is not None
    work(ends.seed(k), slot)


def _backward(work: Callable[..., None], k: int, slot: Slot, lane: Lane) -> None:
    work(lane.take(k), slot)


def _send_output(lane: Lane, k: int, slot: Slot) -> None:
    lane.send(k, slot.message)
    slot.message = None


def _send_grads(lane: Lane, k: int, slot: Slot) -> None:
    lane.send(k, slot.grads)
    slot.grads = ()


def _leave_forward(ends: Ends, k: int, slot: Slot) -> None:
    if ends.outputs is not None:
        ends.outputs[k] = slot.message
    slot.message = None


def _leave_backward(ends: Ends, k: int, slot: Slot) -> None:
    if ends.grads is not None:
        ends.grads[k] = slot.grads
    slot.grads = ()
