"""Slots: what a stage keeps of a micro-batch, and how many of them a program needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.engine.message import Message
from penstock.engine.replay import Replay
from penstock.engine.weightgrad import WeightGradQueue
from penstock.schedule.program import Program

if TYPE_CHECKING:
    from penstock.engine.stage import StageEngine

__all__ = ["Slot", "make_slots"]


class Slot:
    """What a stage keeps for one micro-batch in flight."""

    __slots__ = ("away", "bare", "grads", "inputs", "message", "messages", "queue", "replay", "roots", "rows", "shares")

    def __init__(self, queue: WeightGradQueue | None = None, replay: Replay | None = None) -> None:
        self.inputs: Sequence[Tensor] = ()
        self.roots: Sequence[GradientEdge] = ()
        self.message: Message | None = None
        self.grads: Sequence[Tensor | None] = ()
        # Where several edges leave the stage, a message for each; where several enter it, how many of the inputs came
        # over each, and their gradients.
        self.messages: list[Message | None] = []
        self.shares: Sequence[int] = ()
        self.rows: list[Sequence[Tensor | None]] = []
        self.queue = queue  # there when the backward is split into I and W
        self.replay = replay  # there when the forward is to be run again
        self.away = False  # what the next forward saves goes to the host
        self.bare = queue is None and replay is None  # nothing need be done around a forward, for all the slot knows

    def clear(self) -> None:
        self.inputs = self.roots = self.grads = self.shares = ()
        self.message = None
        self.messages, self.rows = [], []
        if self.queue is not None:
            self.queue.clear()
        if self.replay is not None:
            self.replay.clear()


def make_slots(program: Program, stages: Mapping[int, StageEngine]) -> dict[tuple[int, int], Slot]:
    """The slots of a program's (stage, micro-batch) pairs: as few as its numbering says, shared one after the other."""
    split = {(i.stage, i.microbatch) for i in program.instructions if i.kind == "W"}
    twice = {(i.stage, i.microbatch) for i in program.instructions if i.kind == "R"}
    made: dict[tuple[int, int, bool, bool], Slot] = {}
    slots = {}
    for (stage, k), number in program.slots.items():
        key = (stage, number, (stage, k) in split, (stage, k) in twice)
        if key not in made:
            queue = stages[stage].new_queue() if key[2] else None
            made[key] = Slot(queue, Replay() if key[3] else None)
        slots[stage, k] = made[key]
    return slots
