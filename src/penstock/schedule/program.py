"""A program: one rank's schedule after lowering, compute and communication in one order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Instruction", "Program"]


class Instruction(NamedTuple):
    """One step of a rank's program.

    ``kind`` is a kind of compute action, or one of ``RECV_F RECV_B`` (post a receive), ``SEND_F SEND_B``,
    ``SENT_F SENT_B`` (that send is over: let go of what was sent) and ``REDUCE`` (the stage's gradients are
    complete). Communication names the edge by its two ends: ``stage`` is this rank's, ``peer`` the other one.
    """

    kind: str
    stage: int
    microbatch: int = -1
    peer: int = -1

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}" + (str(self.microbatch) if self.microbatch >= 0 else "")
        return text if self.peer < 0 or abs(self.peer - self.stage) == 1 else f"{text}~{self.peer}"


@dataclass(frozen=True)
class Program:
    """What one rank does, communication included.

    ``slots[stage, microbatch]`` numbers the place where the stage keeps what it needs from ``F`` to the end
    of its backward; a stage has ``num_slots[stage]`` of them, as many as its peak in-flight count.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    slots: dict[tuple[int, int], int]
    num_slots: dict[int, int]

    def __str__(self) -> str:
        return " ".join(map(str, self.instructions))
