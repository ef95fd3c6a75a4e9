"""One clock for all ranks: how far each one's is off the first one's.

    rank 1   ask ●───────────────● answered       the answer was given in the middle of the way there and back, or
                  ╲             ╱                 at most half of it away from that: the shortest of several counts
    rank 0         ●────────────
                     the clock

The pipelines of a mesh ask their first ranks; these ask the first rank of the first replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.engine.channel.control import TRACE, Control
from penstock.engine.process import ProcessCrew

__all__ = ["Aligned", "Offset", "align"]

ROUNDS = 24


class Offset(NamedTuple):
    """What is to be added to a clock, and how wrong that may be: in nanoseconds."""

    value: float = 0.0
    error: float = 0.0

    def __add__(self, other: object) -> Offset:
        if not isinstance(other, Offset):
            return NotImplemented
        return Offset(self.value + other.value, self.error + other.error)


class Aligned:
    """A clock that is set twice, and drifts evenly in between."""

    def __init__(self, at: int, offset: Offset) -> None:
        self.begin = self.end = (at, offset)

    def again(self, at: int, offset: Offset) -> None:
        self.end = (at, offset)

    def __call__(self, at: int) -> float:
        """Seconds on the first rank's clock."""
        (first, before), (last, after) = self.begin, self.end
        share = (at - first) / (last - first) if last > first else 0.0
        return round((at + before.value + share * (after.value - before.value)) / 1e9, 9)

    @property
    def error(self) -> float:
        """Seconds by which it may be off."""
        return max(self.begin[1].error, self.end[1].error) / 1e9


def align(crew: ProcessCrew, clock: Callable[[], int]) -> Offset:
    """This rank's offset from the first rank of the mesh. All ranks call it."""
    pipe = crew.control
    data, tensor = (None if twins is None else twins.control for twins in (crew.replicas, crew.twins))
    with pipe.within(TRACE):
        return _from_first(pipe, data, tensor, clock)


def _from_first(pipe: Control, data: Control | None, tensor: Control | None, clock: Callable[[], int]) -> Offset:
    offset = _ask(pipe, clock)
    if data is not None:
        offset += pipe.gather(_ask(data, clock))[0]
    if tensor is not None:
        first = pipe.gather(_ask(tensor, clock))[0]
        offset += first if data is None else data.gather(first)[0]
    return offset


def _ask(control: Control, clock: Callable[[], int]) -> Offset:
    """The offset from the first rank of a group, which answers all others one after the other."""
    best = Offset(0.0, float("inf"))
    if control.group.rank() == 0:
        for rank in range(1, len(control.ranks)):
            for _ in range(ROUNDS):
                control.take_row(rank, 1)
                control.send_row(rank, [float(clock())])
        control.settle()
        return Offset()
    for _ in range(ROUNDS):
        asked = clock()
        control.send_row(0, [0.0])
        (there,) = control.take_row(0, 1)
        answered = clock()
        half = (answered - asked) / 2
        if half < best.error:
            best = Offset(there - asked - half, half)
    control.settle()
    return best
