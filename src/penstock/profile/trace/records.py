"""Records of a step: plain data, in seconds on one clock.

rank 1   ····wait····▕▔▔▔2F0▔▔▔▏send▕  ··wait··▕▔▔▔2B0▔▔▔▏        RankRecord: the actions of one rank in a step
                      start    end
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.schedule.schedule import Action, Edge


def covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of time spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """A wait of a rank for a message, or for the completion of its send."""

    peer: int  # the other stage of the message
    start: float
    end: float
    what: str = "message"  # or "sent"


@dataclass(frozen=True, slots=True)
class SendRecord:
    """A message to another stage, on the same or another rank; ``start`` and ``end`` are the times of the send call."""

    target: int  # the stage that receives it
    start: float
    end: float
    bytes: int


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """An action with the waits before it and the sends after it.

    On a GPU, ``start`` and ``end`` are times of the device, and ``launched`` is when the host began to launch the
    action. ``memory`` is the number of bytes after the action.
    """

    action: Action
    start: float
    end: float
    launched: float | None = None
    memory: int | None = None
    waits: tuple[WaitRecord, ...] = ()
    sends: tuple[SendRecord, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def waited(self) -> float:
        """Seconds that the rank waited before the action; concurrent waits count once."""
        return covered_seconds((wait.start, wait.end) for wait in self.waits)

    def to_row(self) -> list[Any]:
        waits = [[wait.peer, wait.start, wait.end, wait.what] for wait in self.waits]
        sends = [[sent.target, sent.start, sent.end, sent.bytes] for sent in self.sends]
        return [str(self.action), self.start, self.end, self.launched, self.memory, waits, sends]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> ActionRecord:
        name, start, end, launched, memory, waits, sends = row
        times, sent = tuple(WaitRecord(*wait) for wait in waits), tuple(SendRecord(*send) for send in sends)
        return cls(Action.parse(name), start, end, launched, memory, times, sent)


class TracedMessage(NamedTuple):
    """A message from one action to another, between two ranks or within a rank."""

    source: ActionRecord
    sent: SendRecord
    target: ActionRecord
    source_track: int
    target_track: int
    wait: WaitRecord | None  # of the receiver; None within a rank

    @property
    def edge(self) -> Edge:
        """The edge of the plan: from the earlier stage to the later one."""
        ends = self.source.action.stage, self.target.action.stage
        return ends if self.source.action.kind == "F" else ends[::-1]

    @property
    def seconds(self) -> float | None:
        """The time in transit; None unless the receiver was waiting when the message was sent."""
        sent = max(self.sent.start, self.source.end)
        if self.wait is None or self.wait.start > sent:
            return None
        return max(0.0, self.wait.end - sent)


@dataclass(frozen=True, slots=True)
class Span:
    """A named span of time outside of actions.

    ``announce``: exchange of the mini-batch's description between ranks. ``sends``: completion of the last sends.
    ``reduce``: all-reduce of gradients over replicas. ``loss``: broadcast of the loss.
    """

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The actions of one rank in a step. ``track`` is its index in the trace's tracks."""

    track: int
    begin: float
    end: float
    actions: tuple[ActionRecord, ...]
    spans: tuple[Span, ...] = ()

    @property
    def busy(self) -> float:
        """Seconds spent in actions."""
        return sum(done.seconds for done in self.actions)

    @property
    def waited(self) -> float:
        return sum(done.waited for done in self.actions)

    @property
    def host_spans(self) -> tuple[Span, ...]:
        """The spans, except on a GPU, where actions overlap them."""
        return self.spans if all(done.launched is None for done in self.actions) else ()

    def to_data(self) -> dict[str, Any]:
        return {
            "track": self.track,
            "begin": self.begin,
            "end": self.end,
            "actions": [done.to_row() for done in self.actions],
            "spans": [[span.name, span.start, span.end] for span in self.spans],
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RankRecord:
        return cls(
            data["track"],
            data["begin"],
            data["end"],
            tuple(map(ActionRecord.from_row, data["actions"])),
            tuple(Span(*span) for span in data["spans"]),
        )


@dataclass(frozen=True, slots=True)
class Track:
    """One rank of the mesh: a thread or a process."""

    rank: int  # global rank; for threads, the rank in the pipeline
    replica: int  # number of its pipeline
    place: int  # rank in that pipeline
    device: str
    gpu: str = ""  # UUID
    clock_error: float = 0.0  # maximal error of its clock relative to the first rank, in seconds


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One mini-batch: a training step, a forward without gradients, or the forward or backward of a call."""

    number: int  # index in the trace
    kind: str  # "step", "evaluate", "call" or "backward"
    parts: tuple[RankRecord, ...]
    failed: bool = False

    @property
    def seconds(self) -> float:
        return max(part.end for part in self.parts) - min(part.begin for part in self.parts)

    @property
    def name(self) -> str:
        """Such as ``step 3`` or ``evaluate 4 (failed)``."""
        return f"{self.kind} {self.number}" + (" (failed)" if self.failed else "")

    def to_data(self) -> dict[str, Any]:
        parts = [part.to_data() for part in self.parts]
        return {"number": self.number, "kind": self.kind, "failed": self.failed, "parts": parts}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> StepRecord:
        parts = tuple(map(RankRecord.from_data, data["parts"]))
        return cls(data["number"], data["kind"], parts, data["failed"])

    def of(self, tracks: Iterable[int]) -> list[RankRecord]:
        """The records of these tracks that have actions."""
        wanted = set(tracks)
        return [part for part in self.parts if part.track in wanted and part.actions]


def pending_backwards(
    actions: Iterable[ActionRecord], kept: Counter[tuple[int, int]], trains: bool = True
) -> Iterator[ActionRecord]:
    """Yield each action after updating ``kept``, which counts the pending backwards by stage and micro-batch.

    A backward is pending from its forward, or from its recompute, to its end.
    """
    actions = list(actions)
    recomputed = {done.action[::2] for done in actions if done.action.kind == "R"}
    for done in actions:
        stage, kind, microbatch = done.action
        pair = stage, microbatch
        if kind == "R" or (kind == "F" and trains and pair not in recomputed):
            kept[pair] += 1
        elif kind in "BW" and kept[pair]:
            kept[pair] -= 1
        yield done


def with_memory(steps: Iterable[StepRecord], saved: Mapping[int, int]) -> tuple[StepRecord, ...]:
    """Set the memory of actions for which no allocated bytes are known: the bytes saved for pending backwards.

    Messages, and the inputs kept for a recompute, do not count.
    """
    found = []
    in_flight: dict[int, Counter[tuple[int, int]]] = {}  # by track
    for step in steps:
        parts = []
        for part in step.parts:
            kept = in_flight.setdefault(part.track, Counter())
            if step.kind == "step":  # pending backwards of a failed step are dropped
                kept.clear()
            actions = []
            for done in pending_backwards(part.actions, kept, step.kind in ("step", "call")):
                total = sum(saved.get(stage, 0) * count for (stage, _), count in kept.items())
                actions.append(done if done.memory is not None else replace(done, memory=total))
            parts.append(replace(part, actions=tuple(actions)))
        found.append(replace(step, parts=tuple(parts)))
    return tuple(found)
