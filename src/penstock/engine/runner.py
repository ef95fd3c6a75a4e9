"""The one runner: a program becomes a list of calls, made once, and a step is a walk along that list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from penstock.engine import calls as do
from penstock.engine.channel.lane import Lane
from penstock.engine.doing import Progress
from penstock.engine.message import Message
from penstock.engine.offload import returns
from penstock.engine.slot import Slot
from penstock.engine.stage import StageEngine
from penstock.schedule.action import BACKWARD, COMPUTE
from penstock.schedule.program import Instruction

__all__ = ["Ends", "Mark", "Runner", "Wiring", "compile_program"]

Call = Callable[[], None]
Take = Callable[[], Any]
Marked = tuple[Call, "Mark"]
Piece = tuple[Call, Instruction, "Mark"]


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


class Mark(NamedTuple):
    """What a tape has to know of a call: whether it is an action's work, a send, or a wait."""

    what: str = ""  # "work", "wait" (for a message), "send", "sent" (a wait until a send is over), or anything else
    engine: StageEngine | None = None  # that works
    slot: Slot | None = None  # what it works on
    peer: int = -1  # the stage at the other end, of a wait or send
    cargo: Callable[[], Any] | None = None  # what is about to be sent


_REST = Mark()


class Runner:
    """A compiled program of one rank."""

    def __init__(
        self, calls: Sequence[Call], instructions: Sequence[Instruction], marks: Sequence[Mark] | None = None
    ) -> None:
        self.calls = tuple(calls)
        self.instructions = tuple(instructions)
        self.marks = (_REST,) * len(self.calls) if marks is None else tuple(marks)
        self.progress = Progress()
        self.script: object = None  # the same calls, as the last tape runs them

    def run(self) -> None:
        progress = self.progress
        for progress.at, call in enumerate(self.named()):
            call()
        progress.at = -1

    def named(self) -> Sequence[Call]:
        """The calls; while torch's profiler is on, each is a range with the name of its action."""
        if not profiler._is_profiler_enabled:
            return self.calls
        return [
            partial(_range, str(instruction), call) if mark.what == "work" or instruction.kind not in COMPUTE else call
            for call, instruction, mark in zip(self.calls, self.instructions, self.marks, strict=True)
        ]

    def halves(self) -> tuple[Runner, Runner]:
        """What comes before the first backward, and what comes from there on."""
        kinds = [instruction.kind for instruction in self.instructions]
        at = next(i for i, kind in enumerate(kinds) if kind in ("R", "B"))
        while at and kinds[at - 1] == "RECV_B":  # what the backward waits for
            at -= 1
        parts = slice(at), slice(at, None)
        first, second = (Runner(self.calls[at], self.instructions[at], self.marks[at]) for at in parts)
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
    pieces: list[Piece] = []
    instructions = list(instructions)
    back = returns(instructions) if any(stage.offload for stage in wiring.stages.values()) else {}
    away = {pair for pairs in back.values() for pair in pairs if wiring.stages[pair[0]].offload is not None}
    weights = next((stage.weights for stage in wiring.stages.values() if stage.weights is not None), None)
    stops = {} if weights is None else weights.calls(instructions, wiring.stages)
    for at, instruction in enumerate(instructions):
        if at in stops:
            pieces.append((stops[at], instruction, _REST))
        pieces += [(call, instruction, _REST) for call in _come_back(back.get(at, ()), away, wiring)]
        pieces += [(call, instruction, _REST) for call in _go(instruction, away, wiring)]
        pieces += _wait(instruction, wiring)
        pieces += [(call, instruction, mark) for call, mark in _bind(instruction, wiring)]
        pieces += _hold(instruction, wiring)
    if len(instructions) in stops:
        pieces.append((stops[len(instructions)], instructions[-1], _REST))
    return Runner(*([piece[part] for piece in pieces] for part in range(3)))  # type: ignore[arg-type]


def _come_back(pairs: Iterable[tuple[int, int]], away: set[tuple[int, int]], wiring: Wiring) -> list[Call]:
    return [partial(do.prefetch, wiring.stages[pair[0]], pair[1]) for pair in pairs if pair in away]


def _go(instruction: Instruction, away: set[tuple[int, int]], wiring: Wiring) -> list[Call]:
    pair = instruction.stage, instruction.microbatch
    return [partial(do.send_away, wiring.slots[pair])] if instruction.kind == "F" and pair in away else []


def _wait(instruction: Instruction, wiring: Wiring) -> list[Piece]:
    """The waits for what other ranks send to an action, under the names of their receives."""
    kind, stage, k, _ = instruction
    if kind not in ("F", "B", "I"):
        return []
    lane_name, lanes = ("F", wiring.forward) if kind == "F" else ("B", wiring.backward)
    return [
        (lane.at(k).land, Instruction(f"RECV_{lane_name}", stage, k, src), Mark("wait", peer=src))
        for (src, dst), lane in sorted(lanes.items(), key=lambda pair: pair[0])
        if dst == stage and src not in wiring.stages
    ]


def _hold(instruction: Instruction, wiring: Wiring) -> list[Piece]:
    """The wait until a message is taken, where a lane asks for it."""
    kind, stage, k, peer = instruction
    taken = wiring.forward[stage, peer].at(k).taken if kind == "SEND_F" else None
    return [] if taken is None else [(taken, instruction._replace(kind="SENT_F"), Mark("sent", peer=peer))]


def _bind(instruction: Instruction, wiring: Wiring) -> list[Marked]:
    kind, stage, k, peer = instruction
    if kind in COMPUTE:
        engine, slot = wiring.stages[stage], wiring.slots[stage, k]
        work = Mark("work", engine, slot)
        if kind == "F":
            return [(_bind_forward(stage, k, wiring), work), *_hand_over(stage, k, wiring, "F")]
        if kind in BACKWARD:
            return [(_bind_backward(kind, stage, k, wiring), work), *_hand_over(stage, k, wiring, "B")]
        return [(partial(engine.recompute, k, slot) if kind == "R" else partial(engine.weight_gradient, slot), work)]
    if kind == "REDUCE":
        return [] if wiring.reduce is None else [(partial(wiring.reduce, stage), _REST)]
    what, lane_name = kind.split("_")
    if what == "SEND":
        return [_bind_send(stage, peer, k, wiring, lane_name)]
    lanes = wiring.forward if lane_name == "F" else wiring.backward
    if what == "RECV":
        call, mark = lanes[peer, stage].at(k).post, _REST
    else:
        call, mark = lanes[stage, peer].at(k).sent, Mark("sent", peer=peer)
    return [] if call is None else [(call, mark)]


def _bind_forward(stage: int, k: int, wiring: Wiring) -> Call:
    engine, slot = wiring.stages[stage], wiring.slots[stage, k]
    takes = _into(stage, k, wiring.forward)
    if not takes:
        return partial(do.enter, engine, k, slot, wiring.ends)
    return partial(do.forward, engine, k, slot, *takes) if len(takes) == 1 else partial(do.meet, engine, k, slot, takes)


def _bind_backward(kind: str, stage: int, k: int, wiring: Wiring) -> Call:
    engine, slot = wiring.stages[stage], wiring.slots[stage, k]
    if kind == "I":
        work = engine.input_gradient
    else:
        work = engine.backward if wiring.work is None else partial(wiring.work, engine)
    takes = _into(stage, k, wiring.backward)
    if not takes:
        return partial(do.turn, work, k, slot, wiring.ends)
    return partial(do.backward, work, slot, *takes) if len(takes) == 1 else partial(do.meet_back, work, slot, takes)


def _bind_send(stage: int, peer: int, k: int, wiring: Wiring, lane_name: str) -> Marked:
    """The message of one edge out of the stage, or the gradients of one edge into it."""
    lanes = wiring.forward if lane_name == "F" else wiring.backward
    peers = sorted(dst for src, dst in lanes if src == stage)
    send, slot = lanes[stage, peer].at(k).send, wiring.slots[stage, k]
    if len(peers) == 1:
        call, cargo = (do.send_output, "message") if lane_name == "F" else (do.send_grads, "grads")
        return partial(call, send, slot), Mark("send", peer=peer, cargo=partial(getattr, slot, cargo))
    at = peers.index(peer)
    part, cargo = (do.send_part, "messages") if lane_name == "F" else (do.send_row, "rows")
    return partial(part, send, slot, at), Mark("send", peer=peer, cargo=partial(do.one_of, slot, cargo, at))


def _into(stage: int, k: int, lanes: Mapping[tuple[int, int], Lane]) -> list[Take]:
    """What takes the messages of a micro-batch that come into a stage."""
    return [lanes[src, dst].at(k).take for src, dst in sorted(lanes) if dst == stage]


def _hand_over(stage: int, k: int, wiring: Wiring, lane_name: str) -> list[Marked]:
    """What follows an action without an instruction of its own: edges inside this rank, and the pipeline's ends."""
    lanes = wiring.forward if lane_name == "F" else wiring.backward
    peers = sorted(dst for src, dst in lanes if src == stage)
    if not peers:
        leave = do.leave_forward if lane_name == "F" else do.leave_backward
        return [(partial(leave, wiring.ends, k, wiring.slots[stage, k]), _REST)]
    return [_bind_send(stage, peer, k, wiring, lane_name) for peer in peers if peer in wiring.stages]


def _range(name: str, call: Call) -> None:
    with record_function(name):
        call()
