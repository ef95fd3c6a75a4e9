"""The one runner: a program becomes a list of calls, made once, and a step is a walk along that list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.profiler import record_function

from penstock._torch import profiler_enabled
from penstock.engine.channel.base import Channel
from penstock.engine.failure.status import Progress
from penstock.engine.message import Message, merge_messages
from penstock.engine.offload.activations import prefetch_points
from penstock.engine.stage import Slot, StageEngine
from penstock.schedule.lower import Instruction
from penstock.schedule.schedule import BACKWARD, COMPUTE

__all__ = [
    "Bindings",
    "CallInfo",
    "PipelineIO",
    "Runner",
    "backward",
    "backward_join",
    "begin_backward",
    "compile_program",
    "forward",
    "forward_first",
    "forward_join",
    "offload_next_forward",
    "payload_of_edge",
    "prefetch_activations",
    "send_grads",
    "send_grads_of_edge",
    "send_output",
    "send_output_of_edge",
    "store_input_grads",
    "store_output",
]


# What the calls of a compiled program do.

ReceiveFn = Callable[[], Any]  # of a message, or of gradients, that have come
Send = Callable[[Any], None]
BackwardFn = Callable[[Sequence[Tensor | None], Slot], None]  # a backward


def prefetch_activations(engine: StageEngine, k: int) -> None:
    assert engine.offload is not None
    engine.offload.prefetch(k)


def offload_next_forward(slot: Slot) -> None:
    slot.away, slot.bare = True, False


def forward_first(engine: StageEngine, k: int, slot: Slot, ends: PipelineIO) -> None:
    engine.forward(k, ends.inputs[k], slot)


def forward(engine: StageEngine, k: int, slot: Slot, take: ReceiveFn) -> None:
    engine.forward(k, take(), slot)


def forward_join(engine: StageEngine, k: int, slot: Slot, takes: Sequence[ReceiveFn]) -> None:
    message, slot.shares = merge_messages([take() for take in takes])
    engine.forward(k, message, slot)


def begin_backward(work: BackwardFn, k: int, slot: Slot, ends: PipelineIO) -> None:
    assert ends.seed is not None
    work(ends.seed(k), slot)


def backward(work: BackwardFn, slot: Slot, take: ReceiveFn) -> None:
    work(take(), slot)


def backward_join(work: BackwardFn, slot: Slot, takes: Sequence[ReceiveFn]) -> None:
    work([grad for take in takes for grad in take()], slot)


def send_output(send: Send, slot: Slot) -> None:
    send(slot.message)
    slot.message = None


def send_grads(send: Send, slot: Slot) -> None:
    send(slot.grads)
    slot.grads = ()


def send_output_of_edge(send: Send, slot: Slot, part: int) -> None:
    send(slot.messages[part])
    slot.messages[part] = None


def send_grads_of_edge(send: Send, slot: Slot, part: int) -> None:
    send(slot.rows[part])
    slot.rows[part] = slot.grads = ()


def store_output(ends: PipelineIO, k: int, slot: Slot) -> None:
    if ends.outputs is not None:
        ends.outputs[k] = slot.message
    slot.message = None


def store_input_grads(ends: PipelineIO, k: int, slot: Slot) -> None:
    if ends.grads is not None:
        ends.grads[k] = slot.grads
    slot.grads = ()


def payload_of_edge(slot: Slot, what: str, part: int) -> Any:
    """What goes along one of several edges: of the slot's messages, or of its rows of gradients."""
    return getattr(slot, what)[part]


Call = Callable[[], None]
Receive = Callable[[], Any]
BoundCall = tuple[Call, "CallInfo"]
ProgramCall = tuple[Call, Instruction, "CallInfo"]


@dataclass
class PipelineIO:
    """Where the pipeline meets the outside: what goes in, what comes out, and their gradients."""

    inputs: list[Message] = field(default_factory=list)
    outputs: list[Message | None] | None = None
    seed: Callable[[int], Sequence[Tensor | None]] | None = None  # gradients of the last stage's outputs
    grads: list[Sequence[Tensor | None]] | None = None  # gradients of the first stage's inputs


@dataclass(frozen=True)
class Bindings:
    """What a program's instructions are bound to. Lanes go by (sending stage, receiving stage)."""

    stages: Mapping[int, StageEngine]  # of this rank
    slots: Mapping[tuple[int, int], Slot]
    forward: Mapping[tuple[int, int], Channel]
    backward: Mapping[tuple[int, int], Channel]
    ends: PipelineIO
    reduce: Callable[[int], None] | None = None
    work: Callable[[StageEngine, Sequence[Tensor | None], Slot], None] | None = None  # None: the stage's own


class CallInfo(NamedTuple):
    """What a tape has to know of a call: whether it is an action's work, a send, or a wait."""

    what: str = ""  # "work", "wait" (for a message), "send", "sent" (a wait until a send is over), or anything else
    engine: StageEngine | None = None  # that works
    slot: Slot | None = None  # what it works on
    peer: int = -1  # the stage at the other end, of a wait or send
    cargo: Callable[[], Any] | None = None  # what is about to be sent


_OTHER = CallInfo()


class Runner:
    """A compiled program of one rank."""

    def __init__(
        self, calls: Sequence[Call], instructions: Sequence[Instruction], marks: Sequence[CallInfo] | None = None
    ) -> None:
        self.calls = tuple(calls)
        self.instructions = tuple(instructions)
        self.marks = (_OTHER,) * len(self.calls) if marks is None else tuple(marks)
        self.progress = Progress()
        self.script: object = None  # the same calls, as the last tape runs them

    def run(self) -> None:
        progress = self.progress
        for progress.at, call in enumerate(self.named()):
            call()
        progress.at = -1

    def named(self) -> Sequence[Call]:
        """The calls; while torch's profiler is on, each is a range with the name of its action."""
        if not profiler_enabled():
            return self.calls
        return [
            partial(_profiled, str(instruction), call)
            if mark.what == "work" or instruction.kind not in COMPUTE
            else call
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


def compile_program(instructions: Iterable[Instruction], wiring: Bindings) -> Runner:
    """Bind every instruction to the objects it works on.

    Lanes within a process need no posting and no releasing. An edge between two stages of one rank has no send in
    the program: its message is handed over right after the action that made it.
    """
    pieces: list[ProgramCall] = []
    instructions = list(instructions)
    back = prefetch_points(instructions) if any(stage.offload for stage in wiring.stages.values()) else {}
    away = {pair for pairs in back.values() for pair in pairs if wiring.stages[pair[0]].offload is not None}
    weights = next((stage.weights for stage in wiring.stages.values() if stage.weights is not None), None)
    stops = {} if weights is None else weights.transfer_calls(instructions, wiring.stages)
    for at, instruction in enumerate(instructions):
        if at in stops:
            pieces.append((stops[at], instruction, _OTHER))
        pieces += [(call, instruction, _OTHER) for call in _prefetch_calls(back.get(at, ()), away, wiring)]
        pieces += [(call, instruction, _OTHER) for call in _offload_calls(instruction, away, wiring)]
        pieces += _wait_calls(instruction, wiring)
        pieces += [(call, instruction, mark) for call, mark in _bind(instruction, wiring)]
        pieces += _sent_calls(instruction, wiring)
    if len(instructions) in stops:
        pieces.append((stops[len(instructions)], instructions[-1], _OTHER))
    return Runner(*([piece[part] for piece in pieces] for part in range(3)))  # type: ignore[arg-type]


def _prefetch_calls(pairs: Iterable[tuple[int, int]], away: set[tuple[int, int]], wiring: Bindings) -> list[Call]:
    return [partial(prefetch_activations, wiring.stages[pair[0]], pair[1]) for pair in pairs if pair in away]


def _offload_calls(instruction: Instruction, away: set[tuple[int, int]], wiring: Bindings) -> list[Call]:
    pair = instruction.stage, instruction.microbatch
    return [partial(offload_next_forward, wiring.slots[pair])] if instruction.kind == "F" and pair in away else []


def _wait_calls(instruction: Instruction, wiring: Bindings) -> list[ProgramCall]:
    """The waits for what other ranks send to an action, under the names of their receives."""
    kind, stage, k, _ = instruction
    if kind not in ("F", "B", "I"):
        return []
    direction, channels = ("F", wiring.forward) if kind == "F" else ("B", wiring.backward)
    return [
        (channel.ops(k).wait_recv, Instruction(f"RECV_{direction}", stage, k, src), CallInfo("wait", peer=src))
        for (src, dst), channel in sorted(channels.items(), key=lambda pair: pair[0])
        if dst == stage and src not in wiring.stages
    ]


def _sent_calls(instruction: Instruction, wiring: Bindings) -> list[ProgramCall]:
    """The wait until a message is taken, where a channel asks for it."""
    kind, stage, k, peer = instruction
    taken = wiring.forward[stage, peer].ops(k).wait_taken if kind == "SEND_F" else None
    return [] if taken is None else [(taken, instruction._replace(kind="SENT_F"), CallInfo("sent", peer=peer))]


def _bind(instruction: Instruction, wiring: Bindings) -> list[BoundCall]:
    kind, stage, k, peer = instruction
    if kind in COMPUTE:
        engine, slot = wiring.stages[stage], wiring.slots[stage, k]
        work = CallInfo("work", engine, slot)
        if kind == "F":
            return [(_bind_forward(stage, k, wiring), work), *_local_sends(stage, k, wiring, "F")]
        if kind in BACKWARD:
            return [(_bind_backward(kind, stage, k, wiring), work), *_local_sends(stage, k, wiring, "B")]
        return [(partial(engine.recompute, k, slot) if kind == "R" else partial(engine.weight_gradient, slot), work)]
    if kind == "REDUCE":
        return [] if wiring.reduce is None else [(partial(wiring.reduce, stage), _OTHER)]
    what, direction = kind.split("_")
    if what == "SEND":
        return [_bind_send(stage, peer, k, wiring, direction)]
    channels = wiring.forward if direction == "F" else wiring.backward
    if what == "RECV":
        call, mark = channels[peer, stage].ops(k).post_recv, _OTHER
    else:
        call, mark = channels[stage, peer].ops(k).wait_send, CallInfo("sent", peer=peer)
    return [] if call is None else [(call, mark)]


def _bind_forward(stage: int, k: int, wiring: Bindings) -> Call:
    engine, slot = wiring.stages[stage], wiring.slots[stage, k]
    takes = _receives(stage, k, wiring.forward)
    if not takes:
        return partial(forward_first, engine, k, slot, wiring.ends)
    return (
        partial(forward, engine, k, slot, *takes) if len(takes) == 1 else partial(forward_join, engine, k, slot, takes)
    )


def _bind_backward(kind: str, stage: int, k: int, wiring: Bindings) -> Call:
    engine, slot = wiring.stages[stage], wiring.slots[stage, k]
    if kind == "I":
        work = engine.input_gradient
    else:
        work = engine.backward if wiring.work is None else partial(wiring.work, engine)
    takes = _receives(stage, k, wiring.backward)
    if not takes:
        return partial(begin_backward, work, k, slot, wiring.ends)
    return partial(backward, work, slot, *takes) if len(takes) == 1 else partial(backward_join, work, slot, takes)


def _bind_send(stage: int, peer: int, k: int, wiring: Bindings, direction: str) -> BoundCall:
    """The message of one edge out of the stage, or the gradients of one edge into it."""
    channels = wiring.forward if direction == "F" else wiring.backward
    peers = sorted(dst for src, dst in channels if src == stage)
    send, slot = channels[stage, peer].ops(k).send, wiring.slots[stage, k]
    if len(peers) == 1:
        call, cargo = (send_output, "message") if direction == "F" else (send_grads, "grads")
        return partial(call, send, slot), CallInfo("send", peer=peer, cargo=partial(getattr, slot, cargo))
    at = peers.index(peer)
    part, cargo = (send_output_of_edge, "messages") if direction == "F" else (send_grads_of_edge, "rows")
    return partial(part, send, slot, at), CallInfo("send", peer=peer, cargo=partial(payload_of_edge, slot, cargo, at))


def _receives(stage: int, k: int, channels: Mapping[tuple[int, int], Channel]) -> list[Receive]:
    """What takes the messages of a micro-batch that come into a stage."""
    return [channels[src, dst].ops(k).get for src, dst in sorted(channels) if dst == stage]


def _local_sends(stage: int, k: int, wiring: Bindings, direction: str) -> list[BoundCall]:
    """What follows an action without an instruction of its own: edges inside this rank, and the pipeline's ends."""
    channels = wiring.forward if direction == "F" else wiring.backward
    peers = sorted(dst for src, dst in channels if src == stage)
    if not peers:
        leave = store_output if direction == "F" else store_input_grads
        return [(partial(leave, wiring.ends, k, wiring.slots[stage, k]), _OTHER)]
    return [_bind_send(stage, peer, k, wiring, direction) for peer in peers if peer in wiring.stages]


def _profiled(name: str, call: Call) -> None:
    with record_function(name):
        call()
