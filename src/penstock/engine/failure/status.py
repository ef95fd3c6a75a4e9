"""What a rank is doing, for the others to read.

The main thread only sets attributes as it goes, and the runner its position in the program: nothing here reads a clock.
The watch's thread looks at them from time to time; what looks the same twice has not moved in between.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from penstock.schedule.lower import Instruction

__all__ = [
    "BUILD",
    "EXCHANGE",
    "LOSS",
    "NEXT_BATCH",
    "REDUCE_GRADS",
    "Phase",
    "Progress",
    "RankStatus",
    "Snapshot",
    "format_ranks",
]

_TORCH = f"{Path(torch.__file__).parent.resolve()}{os.sep}"
_COLLECTIVES = f"{_TORCH}distributed{os.sep}"
_LIBRARIES = (f"{Path(__file__).parents[2].resolve()}{os.sep}", _TORCH)
_STDLIB = f"{Path(sysconfig.get_path('stdlib')).resolve()}{os.sep}"


@dataclass(slots=True)
class Progress:
    """Where a rank is in its program."""

    at: int = -1


class RunningProgram(Protocol):
    """A program that is run: a ``Runner``."""

    instructions: tuple[Instruction, ...]
    progress: Progress

    @property
    def current(self) -> Instruction | None: ...


class Phase(NamedTuple):
    """A part of a call outside of the program: what others send in it, and what a rank does in it by itself."""

    what: str
    work: str


BUILD = Phase("its pipeline", "building its pipeline")
NEXT_BATCH = Phase("word of the next mini-batch", "getting ready for a mini-batch")
REDUCE_GRADS = Phase("sums of gradients", "summing gradients")
LOSS = Phase("the loss", "working out the loss")
EXCHANGE = Phase("values", "exchanging values")


@dataclass(frozen=True)
class Snapshot:
    """What was seen of a rank, as it is told to the others."""

    kind: str  # "waits", "works", or "idle": in no call of the pipeline
    what: str = ""
    ranks: tuple[int, ...] = ()  # who it waits for
    place: tuple[int, int, str] | None = None  # the stage, micro-batch and action that it works on
    age: float = 0.0  # seconds for which it has been seen so
    beat: int = 0  # grows while the rank's process lives
    silent: float = 0.0  # seconds for which it has not grown
    at: str = ""  # its line of Python, and all lines that led there, once that is of interest
    stack: str = ""

    @staticmethod
    def heard(data: dict[str, Any]) -> Snapshot:
        place = data["place"]
        return Snapshot(**{**data, "ranks": tuple(data["ranks"]), "place": None if place is None else tuple(place)})

    def __str__(self) -> str:
        """As it goes on after the name of the rank."""
        place = f" (at {self.at})" if self.at else ""
        if self.silent:
            was = {"waits": f"waited {self.what} {format_ranks(self.ranks)}", "works": f"was {self.what}"}
            then = was.get(self.kind, "was not in a step")
            return f"has not been heard of for {self.silent:.0f} s (is its process stopped?), when it {then}{place}"
        if self.kind == "waits":
            return f"waits {self.what} {format_ranks(self.ranks)}"
        if self.kind == "works":
            return f"has been {self.what} for {self.age:.0f} s{place}"
        ended = "its last one ended" if self.what else "it has run none since it built its pipeline"
        return f"is not in a step: {ended} {self.age:.0f} s ago{place}"


class RankStatus:
    """This rank's main thread, as it goes."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.phase = BUILD
        self.runner: RunningProgram | None = None
        self.stage_ranks: Sequence[int] = ()  # the rank of each stage, in the world
        self.inside = 0  # how many calls deep
        self.calls = 0
        self._waits = 0
        self._waiting: tuple[str, tuple[int, ...]] | None = None

    def enter(self) -> None:
        self.thread = threading.get_ident()
        self.phase = EXCHANGE
        self.calls += 1
        self.inside += 1

    @contextmanager
    def waiting(self, ranks: Sequence[int], how: str | None = None) -> Iterator[None]:
        """While this rank waits for others, by their ranks in the world; ``how`` is as in "for the loss from"."""
        before = self._waiting
        self._waits += 1
        self._waiting = (f"for {self.phase.what} from" if how is None else how, tuple(ranks))
        try:
            yield
        finally:
            self._waiting = before

    def look(self) -> tuple[Hashable, Snapshot]:
        """What it is now. Looks with equal keys have seen one and the same thing."""
        runner, waiting, inside = self.runner, self._waiting, self.inside
        at = -1 if runner is None else runner.progress.at
        return (self.calls, inside, self._waits, waiting, at, self.phase), self._look(runner, waiting, inside, at)

    def _look(
        self, runner: RunningProgram | None, waiting: tuple[str, tuple[int, ...]] | None, inside: int, at: int
    ) -> Snapshot:
        if waiting is not None:
            return Snapshot("waits", *waiting)
        if not inside and self.phase is not BUILD:
            return Snapshot("idle", "a step" if self.calls else "")
        if not inside or runner is None or at < 0:
            return Snapshot("works", self.phase.work)
        instruction = runner.instructions[at]
        kind, stage, microbatch, peer = instruction
        if kind.startswith("RECV"):
            return Snapshot("waits", f"for {instruction} from", (self.stage_ranks[peer],))
        if kind.startswith("SENT"):
            send = instruction._replace(kind=kind.replace("SENT", "SEND"))
            return Snapshot("waits", f"until {send} is taken by", (self.stage_ranks[peer],))
        return Snapshot("works", f"in {instruction}", place=(stage, microbatch, str(instruction)))

    def python(self) -> tuple[str, str]:
        """Where the main thread is: its innermost line that is neither torch's nor ours, and all that led there."""
        frame = sys._current_frames().get(self.thread)
        if frame is None:
            return "", ""
        frames = traceback.extract_stack(frame)
        theirs = [f for f in frames if not f.filename.startswith(_LIBRARIES) and not _is_stdlib(f.filename)]
        last = theirs[-1] if theirs else frames[-1]
        return f"{Path(last.filename).name}:{last.lineno}, in {last.name}", "".join(frames.format())[-8000:]

    def in_collective(self) -> bool:
        """Whether the main thread is in torch's code for them, and not in somebody's that is called from there."""
        frame = sys._current_frames().get(self.thread)
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            if frame.f_code.co_filename.startswith(_COLLECTIVES):
                return True
            frame = frame.f_back
        return False


def format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _is_stdlib(filename: str) -> bool:
    return filename.startswith((_STDLIB, "<frozen")) and "site-packages" not in filename
