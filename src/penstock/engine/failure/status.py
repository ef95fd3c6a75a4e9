"""Status of each rank, heartbeats that exchange it, and the detection of hangs.

The main thread only sets attributes of its ``RankStatus``, and the runner its position in the program: neither reads a
clock. The thread of the watch takes snapshots. Two snapshots with equal keys mean that the rank has made no progress in
between. Each rank sends its snapshot as a heartbeat about once a second. A rank that waits for long follows the
snapshots of the others to the rank at the end of the chain of waits:

    rank 3 waits for 3RECV_F1 from rank 2, which waits for 2RECV_F1 from rank 1, which has been in 1F1 for 31 s
"""

from __future__ import annotations

import json
import logging
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.engine.failure.cause import Cause
from penstock.engine.failure.sockets import read_record
from penstock.schedule.lower import Instruction

TIMEOUT = "timed out"  # a kind of cause that is not the name of an exception

_TORCH = f"{Path(torch.__file__).parent.resolve()}{os.sep}"
_COLLECTIVES = f"{_TORCH}distributed{os.sep}"
_LIBRARIES = (f"{Path(__file__).parents[2].resolve()}{os.sep}", _TORCH)
_STDLIB = (f"{Path(sysconfig.get_path('stdlib')).resolve()}{os.sep}", "<frozen")

logger = logging.getLogger("penstock")


class ProgramPosition:
    """The instructions of a rank's program, and the position of the rank in them."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.instructions = tuple(instructions)
        self.at = -1  # not running

    @property
    def current(self) -> Instruction | None:
        """The running instruction, or the instruction that failed."""
        return self.instructions[self.at] if self.at >= 0 else None


# The phases of a call outside of the program: the description of a rank's waits, and of its own work, in the phase.
BUILD = ("its pipeline", "building its pipeline")
NEXT_BATCH = ("the next mini-batch", "preparing a mini-batch")
REDUCE_GRADS = ("sums of gradients", "summing gradients")
LOSS = ("the loss", "computing the loss")
EXCHANGE = ("values", "exchanging values")


@dataclass(frozen=True)
class Snapshot:
    """The status of a rank at one time, as sent to the others."""

    kind: str  # "waits", "works", or "idle": in no call of the pipeline
    what: str = ""
    ranks: tuple[int, ...] = ()  # ranks that it waits for
    place: tuple[int, int, str] | None = None  # stage, micro-batch and action of its work
    age: float = 0.0  # seconds since its last progress
    beat: int = 0  # the number of the heartbeat
    silent: float = 0.0  # seconds since the last heartbeat, if it is overdue
    line: str = ""  # the main thread's line of Python; set, like the stack, if the rank makes no progress for long
    stack: str = ""

    @property
    def waits(self) -> bool:
        """Whether the rank waits for others. Unknown, and therefore False, without recent heartbeats."""
        return self.kind == "waits" and not self.silent

    def __str__(self) -> str:
        """A sentence whose subject, the rank, is left out."""
        place = f" (at {self.line})" if self.line else ""
        if self.silent:
            last = {"waits": f"last waited {self.what} {_format_ranks(self.ranks)}", "works": f"was last {self.what}"}
            status = last.get(self.kind, "was not in a step")
            return f"has sent no heartbeat for {self.silent:.0f} s (is its process stopped?) and {status}{place}"
        if self.kind == "waits":
            return f"waits {self.what} {_format_ranks(self.ranks)}"
        if self.kind == "works":
            return f"has been {self.what} for {self.age:.0f} s{place}"
        ended = "its last one ended" if self.what else "it has run none since it built its pipeline"
        return f"is not in a step: {ended} {self.age:.0f} s ago{place}"


class RankStatus:
    """The activity of this rank's main thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.phase = BUILD
        self.runner: ProgramPosition | None = None
        self.stage_ranks: Sequence[int] = ()  # world rank of each stage
        self.call_depth = 0  # nested calls of the pipeline
        self.num_calls = 0
        self._num_waits = 0
        self._waiting: tuple[str, tuple[int, ...]] | None = None

    def enter_call(self) -> None:
        self.thread = threading.get_ident()
        self.phase = EXCHANGE
        self.num_calls += 1
        self.call_depth += 1

    @contextmanager
    def waiting(self, ranks: Sequence[int], how: str | None = None) -> Iterator[None]:
        """A context in which this rank waits for other world ranks; ``how`` is a phrase such as "for the loss from"."""
        before = self._waiting
        self._num_waits += 1
        self._waiting = (f"for {self.phase[0]} from" if how is None else how, tuple(ranks))
        try:
            yield
        finally:
            self._waiting = before

    def snapshot(self) -> tuple[Hashable, Snapshot]:
        """The present status and its key: equal keys mean that the rank has made no progress."""
        runner, waiting, depth = self.runner, self._waiting, self.call_depth
        at = -1 if runner is None else runner.at
        key = (self.num_calls, depth, self._num_waits, waiting, at, self.phase)
        if waiting is not None:
            return key, Snapshot("waits", *waiting)
        if not depth and self.phase is not BUILD:
            return key, Snapshot("idle", "a step" if self.num_calls else "")
        if not depth or runner is None or at < 0:
            return key, Snapshot("works", self.phase[1])
        instruction = runner.instructions[at]
        kind, stage, microbatch, peer = instruction
        if kind.startswith("RECV"):
            return key, Snapshot("waits", f"for {instruction} from", (self.stage_ranks[peer],))
        if kind.startswith("SENT"):
            send = instruction._replace(kind=kind.replace("SENT", "SEND"))
            return key, Snapshot("waits", f"until {send} is received by", (self.stage_ranks[peer],))
        return key, Snapshot("works", f"in {instruction}", place=(stage, microbatch, str(instruction)))

    def python_stack(self) -> tuple[str, str]:
        """The main thread's innermost line outside torch, Penstock and the standard library, and its stack."""
        frame = sys._current_frames().get(self.thread)
        if frame is None:
            return "", ""
        frames = traceback.extract_stack(frame)
        users = [f for f in frames if "site-packages" in f.filename or not f.filename.startswith(_STDLIB)]
        users = [f for f in users if not f.filename.startswith(_LIBRARIES)]
        last = users[-1] if users else frames[-1]
        return f"{Path(last.filename).name}:{last.lineno}, in {last.name}", "".join(frames.format())[-8000:]

    def in_collective(self) -> bool:
        """Whether the main thread runs code of ``torch.distributed``, and not code outside torch that it calls."""
        frame = sys._current_frames().get(self.thread)
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            if frame.f_code.co_filename.startswith(_COLLECTIVES):
                return True
            frame = frame.f_back
        return False


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# ── hangs ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class HangLimits:
    """Seconds without progress after which a wait is reported, and after which it is a failure; None: never."""

    stuck_after: float | None = 60.0
    timeout: float | None = None

    @property
    def earliest(self) -> float | None:
        return min((limit for limit in (self.stuck_after, self.timeout) if limit is not None), default=None)

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats and between two checks."""
        return 1.0 if self.earliest is None else min(1.0, self.earliest / 4)


# A description of the chain of waits, the rank at its end, and the snapshot of that rank if it has sent one.
WaitChain = tuple[str, int, Snapshot | None]


@dataclass
class HangDetector:
    """Checks the status of one rank. Reports a wait after ``stuck_after`` seconds, after twice as many, and so on."""

    status: RankStatus
    limits: HangLimits
    _key: Hashable = None
    _since: float = 0.0  # the time of the rank's last progress
    _stack: tuple[str, str] = ("", "")  # set if the rank makes no progress for long
    _reported: float = 0.0  # age of the wait at its last report
    _last_check: float = 0.0

    def update(self, now: float) -> Snapshot:
        """The status of the rank with its age; if that is long, also with the main thread's line and stack."""
        key, snapshot = self.status.snapshot()
        if key != self._key:
            self._key, self._since, self._reported, self._stack = key, now, 0.0, ("", "")
        age, earliest = now - self._since, self.limits.earliest
        if not self._stack[0] and earliest is not None and age > earliest / 2:
            self._stack = self.status.python_stack()
        return replace(snapshot, age=age, line=self._stack[0], stack=self._stack[1])

    def check(self, snapshot: Snapshot, now: float, chain: Callable[[], WaitChain]) -> Cause | None:
        """Log a report if one is due; return a cause if the rank has waited longer than the timeout.

        The chain is followed from half of the limit on, because the detection of a wait needs two snapshots.
        """
        stuck_after, timeout, earliest = self.limits.stuck_after, self.limits.timeout, self.limits.earliest
        age = snapshot.age
        if snapshot.kind != "waits" or earliest is None or age < earliest / 2:
            return None
        if now - self._last_check < self.limits.interval:
            return None
        self._last_check = now
        text, end, last = chain()
        if stuck_after is not None and age >= max(stuck_after, 2 * self._reported):
            self._reported = age
            logger.warning("%s", text)
        if timeout is None or age < timeout:
            return None
        place = (None, None, None) if last is None or last.place is None else last.place
        stack = "" if last is None else last.stack
        return Cause(end, TIMEOUT, f"{text}: longer than timeout={timeout:g} s", stack, *place)


def wait_chain(rank: int, snapshot: Snapshot, read: Callable[[int], Snapshot | None]) -> WaitChain:
    """Follow the waits from a rank to one that does not wait; ``read`` returns the snapshot of a rank."""
    text, path = f"rank {rank} {snapshot}", [rank]
    while True:
        others = {rank: read(rank) for rank in snapshot.ranks}
        # Prefer a rank that does not wait, then one that waits for no rank on the path.
        priority = {
            rank: 0 if found is None or not found.waits else 2 if set(found.ranks) & set(path) else 1
            for rank, found in others.items()
        }
        rank = min(others, key=priority.__getitem__)
        found = others[rank]
        status = "has sent no status yet" if found is None else str(found)
        text += f", which {status}" if len(others) == 1 else f", of which rank {rank} {status}"
        path.append(rank)
        if found is None or not found.waits:
            return text, rank, found
        if set(found.ranks) & set(path):
            return f"{text}: they wait for each other", rank, found
        snapshot = found


@dataclass
class Heartbeat:
    """Sends the snapshots of this rank to the others, and reads theirs, through the store."""

    store: Any
    rank: int
    limits: HangLimits
    _beat: int = 0
    _sent_at: float = 0.0
    _read: dict[int, tuple[int, float]] = field(default_factory=dict)  # last beat of each rank, and when it was read

    def send(self, snapshot: Snapshot, now: float) -> None:
        """Send a snapshot, at most once per interval."""
        if not self._beat or now - self._sent_at >= self.limits.interval:
            self._sent_at = now
            self._beat += 1
            self.store.set(f"status/{self.rank}", json.dumps(asdict(replace(snapshot, beat=self._beat))))

    def read(self, rank: int, now: float) -> Snapshot | None:
        """The last snapshot of a rank, if it has sent one."""
        snapshot = read_record(self.store, f"status/{rank}", Snapshot)
        if snapshot is None or (snapshot.kind == "waits" and not snapshot.ranks):
            return None
        beat, since = self._read.get(rank, (-1, now))
        if beat != snapshot.beat:
            self._read[rank] = (snapshot.beat, now)
        elif now - since > 3 * self.limits.interval + 1:
            return replace(snapshot, silent=now - since)
        return snapshot


def thread_status(runner: ProgramPosition, thread: threading.Thread, stage_ranks: Sequence[int]) -> RankStatus:
    """The status of a rank that runs its program in another thread of this process."""
    status = RankStatus()
    status.enter_call()
    status.runner, status.stage_ranks, status.thread = runner, stage_ranks, thread.ident or 0
    return status


def check_threads(detectors: Sequence[HangDetector]) -> None:
    """Log ranks that have waited for long; raise a ``PipelineError`` for a wait longer than the timeout."""
    now = time.monotonic()
    snapshots = [detector.update(now) for detector in detectors]
    for rank, (detector, snapshot) in enumerate(zip(detectors, snapshots, strict=True)):
        cause = detector.check(snapshot, now, partial(wait_chain, rank, snapshot, snapshots.__getitem__))
        if cause is not None:
            raise cause.error()
