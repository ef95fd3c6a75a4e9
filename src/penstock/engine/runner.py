"""Compiles the program of a rank once to a list of calls, which each step runs in order.

0F3        wait_F ─▶ forward ─▶ send_F          waits and sends between ranks are separate calls, so that the
0B3        wait_B ─▶ backward ─▶ send_B         failure watch distinguishes a rank that waits from one that computes
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch.profiler import record_function

from penstock._torch import profiler_enabled
from penstock.engine.channel.base import Channel
from penstock.engine.failure.status import ProgramPosition
from penstock.engine.message import Grads, Message, merge_messages
from penstock.engine.offload.activations import prefetch_points
from penstock.engine.stage import Slot, StageActions, StageEngine
from penstock.schedule.lower import Instruction
from penstock.schedule.schedule import COMPUTE

Call = Callable[[], None]
Receive = Callable[[], Any]  # a message, or gradients
Send = Callable[[Any], None]
BackwardFn = Callable[[Grads, Slot], None]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(OrderedDict[K, V]):
    """Up to ``size`` values; a new one evicts the least recently used.

    Ranks that use the same keys in the same order evict the same ones.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __getitem__(self, key: K) -> V:
        self.move_to_end(key)
        return super().__getitem__(key)

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.size:
            del self[next(iter(self))]


@dataclass
class PipelineIO:
    """The inputs and outputs of the pipeline, and their gradients, per micro-batch."""

    inputs: list[Message] = field(default_factory=list)
    outputs: list[Message | None] | None = None
    seed: Callable[[int], Grads] | None = None  # gradients of the last stage's outputs
    grads: list[Grads] | None = None  # gradients of the first stage's inputs


@dataclass(frozen=True)
class Bindings:
    """The objects that instructions operate on. Channels are keyed by (sending stage, receiving stage)."""

    stages: Mapping[int, StageEngine]  # of this rank
    slots: Mapping[tuple[int, int], Slot]
    forward: Mapping[tuple[int, int], Channel]
    backward: Mapping[tuple[int, int], Channel]
    io: PipelineIO
    reduce: Callable[[int], None] | None = None
    backward_fn: Callable[[StageEngine, Grads, Slot], None] | None = None  # instead of the stages' own backward


class CallInfo(NamedTuple):
    """Description of a call for the recorder."""

    kind: str = ""  # "work" (of an action), "wait" (for a message), "send", "sent" (wait for a send), or ""
    engine: StageEngine | None = None  # of work
    slot: Slot | None = None  # of work
    peer: int = -1  # of a wait or send: the stage at the other end
    payload: Callable[[], Any] | None = None  # of a send: returns the message or the gradients


_OTHER = CallInfo()
BoundCall = tuple[Call, Instruction, CallInfo]


class Runner(ProgramPosition):
    """A compiled program of one rank."""

    def __init__(self, calls: Sequence[Call], instructions: Sequence[Instruction], infos: Sequence[CallInfo]) -> None:
        super().__init__(instructions)
        self.calls, self.infos = tuple(calls), tuple(infos)
        self.recorded_calls: object = None  # the calls that the last recorder has wrapped

    def run(self) -> None:
        for self.at, call in enumerate(self.named_calls()):  # noqa: B020
            call()
        self.at = -1

    def named_calls(self) -> Sequence[Call]:
        """The calls. While torch's profiler is active, each one is a range with the name of its action."""
        if not profiler_enabled():
            return self.calls
        return [
            record_function(str(instruction))(call) if info.kind == "work" or instruction.kind not in COMPUTE else call
            for call, instruction, info in zip(self.calls, self.instructions, self.infos, strict=True)
        ]

    def halves(self) -> tuple[Runner, Runner]:
        """Split the calls before the first backward."""
        kinds = [instruction.kind for instruction in self.instructions]
        at = next(i for i, kind in enumerate(kinds) if kind in ("R", "B"))
        while at and kinds[at - 1] == "RECV_B":  # of the first backward
            at -= 1
        first, second = (
            Runner(self.calls[part], self.instructions[part], self.infos[part]) for part in (slice(at), slice(at, None))
        )
        return first, second


# ── the calls ────────────────────────────────────────────────────────────────────────────────────────────────────


def forward_first(actions: StageActions, k: int, slot: Slot, io: PipelineIO) -> None:
    actions.forward(k, io.inputs[k], slot)


def forward(actions: StageActions, k: int, slot: Slot, receive: Receive) -> None:
    actions.forward(k, receive(), slot)


def forward_join(actions: StageActions, k: int, slot: Slot, receives: Sequence[Receive]) -> None:
    message, slot.inputs_per_edge = merge_messages([receive() for receive in receives])
    actions.forward(k, message, slot)


def begin_backward(backward_fn: BackwardFn, k: int, slot: Slot, io: PipelineIO) -> None:
    assert io.seed is not None
    backward_fn(io.seed(k), slot)


def backward(backward_fn: BackwardFn, slot: Slot, receive: Receive) -> None:
    backward_fn(receive(), slot)


def backward_join(backward_fn: BackwardFn, slot: Slot, receives: Sequence[Receive]) -> None:
    backward_fn([grad for receive in receives for grad in receive()], slot)


def send_output(send: Send, slot: Slot, edge: int) -> None:
    send(slot.messages[edge])
    slot.messages[edge] = None


def send_grads(send: Send, slot: Slot, edge: int) -> None:
    send(slot.grads[edge])
    slot.grads[edge] = ()


def store_output(io: PipelineIO, k: int, slot: Slot) -> None:
    if io.outputs is not None:
        io.outputs[k] = slot.messages[0]
    slot.messages = []


def store_input_grads(io: PipelineIO, k: int, slot: Slot) -> None:
    if io.grads is not None:
        io.grads[k] = slot.grads[0]
    slot.grads = []


# ── compilation ──────────────────────────────────────────────────────────────────────────────────────────────────


def compile_program(instructions: Iterable[Instruction], bindings: Bindings) -> Runner:
    """Bind every instruction to the objects that it operates on.

    Channels within a process need no posted receives, and their sends complete at once. An edge between two stages of
    one rank has no send instruction: its message is sent directly after the action that produces it.
    """
    calls: list[BoundCall] = []
    instructions = list(instructions)
    stages = bindings.stages
    offloads = {s: stage.offload for s, stage in stages.items() if stage.offload is not None}
    prefetches = prefetch_points(instructions) if offloads else {}
    offloaded = {pair for pairs in prefetches.values() for pair in pairs if pair[0] in offloads}
    weights = next((stage.weights for stage in stages.values() if stage.weights is not None), None)
    transfers = {} if weights is None else weights.transfer_calls(instructions, stages)
    for at, instruction in enumerate(instructions):
        kind, stage, k, _ = instruction
        if at in transfers:
            calls.append((transfers[at], instruction, _OTHER))
        for pair in prefetches.get(at, ()):
            if pair in offloaded:
                calls.append((partial(offloads[pair[0]].prefetch, pair[1]), instruction, _OTHER))
        if kind == "F" and (stage, k) in offloaded:
            calls.append((partial(setattr, bindings.slots[stage, k], "offload_next", True), instruction, _OTHER))
        if kind in COMPUTE:
            calls += _bind_action(instruction, bindings)
        elif kind == "REDUCE":
            if bindings.reduce is not None:
                calls.append((partial(bindings.reduce, stage), instruction, _OTHER))
        else:
            calls += _bind_transfer(instruction, bindings)
    if len(instructions) in transfers:
        calls.append((transfers[len(instructions)], instructions[-1], _OTHER))
    return Runner(*([call[part] for call in calls] for part in range(3)))  # type: ignore[arg-type]


def _bind_action(instruction: Instruction, bindings: Bindings) -> list[BoundCall]:
    """The waits for the inputs of an action, the action, and the sends that have no instruction.

    A wait has the name of its receive. Edges within this rank have no send instruction. At the ends of the pipeline,
    outputs and input gradients are stored instead of sent.
    """
    kind, stage, k, _ = instruction
    engine, slot, io = bindings.stages[stage], bindings.slots[stage, k], bindings.io
    work = CallInfo("work", engine, slot)
    actions = engine if slot.graph_key is None or engine.graphs is None else engine.graphs
    call: Call
    if kind in ("R", "W"):
        call = partial(actions.recompute, k, slot) if kind == "R" else partial(actions.weight_gradient, slot)
        return [(call, instruction, work)]
    direction, channels = ("F", bindings.forward) if kind == "F" else ("B", bindings.backward)
    sources = [src for src, dst in sorted(channels) if dst == stage]
    waits: list[BoundCall] = []
    for src in sources:
        if src not in bindings.stages:
            receive = Instruction(f"RECV_{direction}", stage, k, src)
            waits.append((channels[src, stage].ops(k).wait_recv, receive, CallInfo("wait", peer=src)))
    receives = [channels[src, stage].ops(k).get for src in sources]
    if kind == "F":
        if not receives:
            call = partial(forward_first, actions, k, slot, io)
        elif len(receives) == 1:
            call = partial(forward, actions, k, slot, *receives)
        else:
            call = partial(forward_join, actions, k, slot, receives)
    else:
        backward_fn = actions.input_gradient if kind == "I" else actions.backward
        if bindings.backward_fn is not None:
            backward_fn = partial(bindings.backward_fn, engine)
        if not receives:
            call = partial(begin_backward, backward_fn, k, slot, io)
        elif len(receives) == 1:
            call = partial(backward, backward_fn, slot, *receives)
        else:
            call = partial(backward_join, backward_fn, slot, receives)
    peers = sorted(dst for src, dst in channels if src == stage)
    if not peers:
        store = partial(store_output if kind == "F" else store_input_grads, io, k, slot)
        return [*waits, (call, instruction, work), (store, instruction, _OTHER)]
    sends = [_bind_send(instruction, peer, bindings, direction) for peer in peers if peer in bindings.stages]
    return [*waits, (call, instruction, work), *sends]


def _bind_send(instruction: Instruction, peer: int, bindings: Bindings, direction: str) -> BoundCall:
    """Send the message of one edge out of the stage, or the gradients of one edge into it."""
    _, stage, k, _ = instruction
    channels, send = (bindings.forward, send_output) if direction == "F" else (bindings.backward, send_grads)
    slot, edge = bindings.slots[stage, k], sorted(dst for src, dst in channels if src == stage).index(peer)
    payload: Callable[[], Any] = lambda: (slot.messages if direction == "F" else slot.grads)[edge]  # noqa: E731
    call = partial(send, channels[stage, peer].ops(k).send, slot, edge)
    return call, instruction, CallInfo("send", peer=peer, payload=payload)


def _bind_transfer(instruction: Instruction, bindings: Bindings) -> list[BoundCall]:
    """A send, a receive that is posted ahead, or the wait for a send."""
    kind, stage, k, peer = instruction
    operation, direction = kind.split("_")
    channels = bindings.forward if direction == "F" else bindings.backward
    if operation == "RECV":
        post = channels[peer, stage].ops(k).post_recv
        return [] if post is None else [(post, instruction, _OTHER)]
    ops, sent = channels[stage, peer].ops(k), CallInfo("sent", peer=peer)
    if operation == "SENT":
        return [] if ops.wait_send is None else [(ops.wait_send, instruction, sent)]
    send = _bind_send(instruction, peer, bindings, direction)
    if ops.wait_taken is None:
        return [send]
    return [send, (ops.wait_taken, instruction._replace(kind="SENT_F"), sent)]  # lockstep channel
