"""The findings of a report as data: idle times, memory peaks, use of edges, advice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from penstock.errors import PenstockError, PlanError
from penstock.profile.report.advice import CAUSES, MIN_SAVING, Advice, Idle, Repartition, advise, better_cut, idle_times
from penstock.profile.trace.analysis import TraceData, milliseconds, plural, traced_messages, typical_steps
from penstock.profile.trace.records import (
    RankRecord,
    StepRecord,
    pending_backwards,
)
from penstock.schedule.simulate import Simulation


@dataclass(frozen=True)
class MemoryPeak:
    """The peak memory of a rank in a step, and the action after which it occurs.

    ``flight[s]`` are the micro-batches of stage ``s`` with a pending backward, and ``saved`` their bytes, as far as
    known. The rest is parameters, gradients, optimizer state, and other tensors on the device.
    """

    track: int
    bytes: int
    at: float
    after: str
    flight: Mapping[int, Sequence[int]]
    saved: int

    @property
    def rest(self) -> int:
        return max(0, self.bytes - self.saved)


def memory_peak(part: RankRecord, saved: Mapping[int, int]) -> MemoryPeak | None:
    """The peak of one rank; None if its memory is unknown."""
    kept: Counter[tuple[int, int]] = Counter()
    best: MemoryPeak | None = None
    for done in pending_backwards(part.actions, kept):
        if done.memory is not None and (best is None or done.memory > best.bytes):
            flight: dict[int, list[int]] = {}
            for stage, microbatch in sorted(pair for pair, count in kept.items() if count):
                flight.setdefault(stage, []).append(microbatch)
            size = sum(saved.get(stage, 0) * len(microbatches) for stage, microbatches in flight.items())
            best = MemoryPeak(part.track, done.memory, done.end, str(done.action), flight, size)
    return best


@dataclass(frozen=True)
class EdgeUse:
    """Messages of an edge in a step, in both directions. ``seconds`` of one message is known if ranks waited for it."""

    src: int
    dst: int
    ranks: tuple[int, int]  # pipeline ranks
    messages: int
    forward: int  # bytes of one message
    backward: int
    seconds: float | None

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of a message, if its time is known."""
        return max(self.forward, self.backward) / self.seconds if self.seconds else None


@dataclass(frozen=True)
class Findings:
    """The findings of a trace. ``step`` is the typical step with the median duration."""

    trace: TraceData
    step: StepRecord
    idle: Sequence[Idle]
    peaks: Sequence[MemoryPeak]
    edges: Sequence[EdgeUse]
    advice: Sequence[Advice]
    simulation: Simulation | None  # where one is possible
    cut: Repartition | None

    @property
    def bubble(self) -> float:
        return _share(self.idle, "idle")

    @property
    def causes(self) -> dict[str, float]:
        """The fraction of all ranks' time by cause; their sum is the bubble."""
        return {cause: _share(self.idle, cause) for cause in CAUSES}

    @property
    def what(self) -> str:
        """The kind of step, with its article."""
        return {"evaluate": "an evaluation"}.get(self.step.kind, f"a {self.step.kind}")

    @property
    def head(self) -> str:
        """One line: the schedule, the duration of a step, and its bubble by cause."""
        trace, schedule = self.trace, self.trace.schedule
        causes = sorted(self.causes.items(), key=lambda item: -item[1])
        why = ", ".join(f"{cause} {share:.1%}" for cause, share in causes if share >= 0.0005)
        text = (
            f"{schedule.name}, {plural(schedule.num_stages, 'stage')} on {plural(schedule.num_ranks, 'rank')}, "
            f"{plural(trace.order.num_microbatches, 'micro-batch')}: {self.what} takes "
            f"{milliseconds(self.step.seconds)}, bubble {self.bubble:.1%}"
        )
        return f"{text} ({why})" if why else text

    @property
    def best(self) -> str:
        """The first advice."""
        return self.advice[0].text if self.advice else f"no change was found that saves {MIN_SAVING:.0%} or more"


def analyze(trace: TraceData) -> Findings:
    """Analyze a trace; an error if it has no whole step."""
    steps = typical_steps(trace)
    if not steps:
        raise PlanError(
            "this trace has no whole step to report on: record one, with `with pipe.trace() as trace: pipe.step(…)`"
        )
    step = sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]
    idle = idle_times(trace, step)
    simulation = None
    with suppress(PenstockError):  # records of one rank only, or of half of a call
        simulation = trace.simulation()
    cut = None if simulation is None else better_cut(trace, simulation)
    peaks = [memory_peak(part, trace.saved) for part in step.of(range(len(trace.tracks)))]
    known = [peak for peak in peaks if peak is not None]
    return Findings(trace, step, idle, known, _edges(trace, step), advise(trace, idle), simulation, cut)


def _edges(trace: TraceData, step: StepRecord) -> list[EdgeUse]:
    found = defaultdict(list)
    for message in traced_messages(trace, step):
        found[message.edge].append(message)
    uses = []
    for src, dst in trace.edges:
        messages = found[src, dst]
        sizes = [[c.sent.bytes for c in messages if (c.source.action.kind == "F") == way] for way in (True, False)]
        times = [c.seconds for c in messages if c.seconds is not None]
        ranks = trace.schedule.placement[src], trace.schedule.placement[dst]
        forward, backward = (int(median(bytes_of or [0])) for bytes_of in sizes)
        uses.append(EdgeUse(src, dst, ranks, len(messages), forward, backward, median(times) if times else None))
    return uses


def _share(idle: Sequence[Idle], what: str) -> float:
    total = sum(rank.total for rank in idle)
    return sum(getattr(rank, what) for rank in idle) / total if total else 0.0
