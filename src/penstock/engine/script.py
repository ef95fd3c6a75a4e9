"""A program as a tape runs it: the same calls, some of which write down more than the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine.devicetime import DeviceTimes
from penstock.engine.message import Message
from penstock.engine.runner import Call, Mark, Runner
from penstock.engine.saved import saved_bytes
from penstock.schedule.program import Instruction

__all__ = ["Line", "Script", "Walk"]


class Line(NamedTuple):
    """What a call is."""

    instruction: Instruction
    what: str  # see ``Mark``
    peer: int


class Script:
    """The calls of a runner, made once for a tape; ``curious`` about what its stages save, for its first walk."""

    def __init__(
        self, runner: Runner, clock: Callable[[], int], saved: dict[int, int], times: DeviceTimes, *, curious: bool
    ) -> None:
        self.clock, self.saved, self.times, self.curious = clock, saved, times, curious
        self.lines = [
            Line(instruction, mark.what, mark.peer)
            for instruction, mark in zip(runner.instructions, runner.marks, strict=True)
        ]
        self.walk: Walk | None = None  # under way
        self.calls = [
            self._call(at, call, mark) for at, (call, mark) in enumerate(zip(runner.named(), runner.marks, strict=True))
        ]

    def _call(self, at: int, call: Call, mark: Mark) -> Call:
        if mark.cargo is not None:
            return partial(self._send, at, call, mark.cargo)
        if mark.engine is not None and mark.engine.device.type == "cuda":
            call = partial(self._launch, at, call, mark.engine.device)
        if mark.engine is not None and self.curious and mark.engine.index not in self.saved:
            return partial(self._look, at, call, mark)
        return call

    def _send(self, at: int, call: Call, cargo: Callable[[], Any]) -> None:
        assert self.walk is not None
        self.walk.sizes[at] = _bytes(cargo())
        call()

    def _launch(self, at: int, call: Call, device: torch.device) -> None:
        assert self.walk is not None
        before = self.times.stamp(device)
        call()
        self.walk.events[at] = (device, before, self.times.stamp(device))
        self.walk.memory[at] = self.times.allocated(device)

    def _look(self, at: int, call: Call, mark: Mark) -> None:
        """The first of a stage's graphs is looked at, after its end."""
        assert self.walk is not None
        assert mark.engine is not None
        assert mark.slot is not None
        call()
        if mark.slot.roots and mark.engine.index not in self.saved:
            self.walk.ends[at] = self.clock()
            self.saved[mark.engine.index] = 0
            with suppress(Exception):  # tensors of kinds that nobody has thought of must not end a step
                self.saved[mark.engine.index] = saved_bytes(mark.slot, mark.engine)


class Walk:
    """One program, walked along: the clock's numbers, and what they belong to."""

    __slots__ = ("ends", "events", "lines", "memory", "seconds", "sizes", "stamps")

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self.stamps = [0] * (len(lines) + 1)  # before each call, and after the last
        self.ends: dict[int, int] = {}  # of calls that something else was done after
        self.sizes: dict[int, int] = {}  # bytes, of each send
        self.memory: dict[int, int] = {}  # bytes of tensors on the device, after an action's work
        self.events: dict[int, tuple[torch.device, Any, Any]] = {}  # before and after an action's work, on a GPU
        self.seconds: dict[int, tuple[torch.device, float, float]] = {}  # when they happened, since the run began

    def end(self, at: int) -> int:
        """When a call was over; 0 if it never was."""
        return self.ends.get(at, self.stamps[at + 1])


def _bytes(payload: Any) -> int:
    leaves = payload[0] if type(payload) is Message else payload
    total = 0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            total += leaf.nbytes
    return total
