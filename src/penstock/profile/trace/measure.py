"""What a trace's numbers say: bubbles, and the costs of actions and edges."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import PlanError
from penstock.profile.trace.steps import Done, Part, Sent, Step, Wait
from penstock.schedule.costs import Costs
from penstock.schedule.flow import Edge
from penstock.schedule.schedule import Schedule

if TYPE_CHECKING:
    from penstock.profile.trace.trace import Trace

__all__ = ["Crossing", "bubble", "costs", "crossings", "middle", "order", "typical"]


class Crossing(NamedTuple):
    """A message from one action to another: between two ranks, or within one."""

    maker: Done
    sent: Sent
    taker: Done
    made_on: int  # tracks
    taken_on: int
    wait: Wait | None  # for it; None within a rank

    @property
    def edge(self) -> Edge:
        """As the plan has it: from the earlier stage to the later one."""
        ends = self.maker.action.stage, self.taker.action.stage
        return ends if self.maker.action.kind == "F" else ends[::-1]

    @property
    def seconds(self) -> float | None:
        """How long it was on its way; known if it was waited for when it was sent."""
        sent = max(self.sent.start, self.maker.end)
        if self.wait is None or self.wait.start > sent:
            return None
        return max(0.0, self.wait.end - sent)


def crossings(trace: Trace, step: Step) -> Iterator[Crossing]:
    """All messages of a step whose two ends are known."""
    for replica in trace.replicas:
        parts = step.of(trace.replica(replica))
        takers: dict[tuple[str, int, int], tuple[Part, Done]] = {}
        for part in parts:
            for done in part.actions:
                if done.action.kind in "FBI":
                    takers[_lane(done), done.action.stage, done.action.microbatch] = part, done
        for part in parts:
            for done in part.actions:
                for sent in done.sends:
                    found = takers.get((_lane(done), sent.target, done.action.microbatch))
                    if found is not None:
                        there, taker = found
                        waits = [w for w in taker.waits if w.what == "message" and w.peer == done.action.stage]
                        wait = waits[0] if waits else None
                        yield Crossing(done, sent, taker, part.track, there.track, wait)


def _lane(done: Done) -> str:
    return "F" if done.action.kind == "F" else "B"


def bubble(trace: Trace, step: Step) -> float | None:
    """The share of a step in which its ranks work on no action, between its first and its last one."""
    busy = total = 0.0
    for replica in trace.replicas:
        tracks = trace.replica(replica)
        parts = step.of(tracks)
        if parts:
            first = min(part.actions[0].start for part in parts)
            last = max(done.end for part in parts for done in part.actions)
            busy += sum(part.busy for part in parts)
            total += (last - first) * len(tracks)
    return max(0.0, 1 - busy / total) if total else None


def middle(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return median(known) if known else None


def typical(trace: Trace) -> list[Step]:
    """The steps to judge by: whole ones, to train where there are any, which have done what most of them have."""
    whole = [step for step in trace.steps if not step.failed and step.of(range(len(trace.tracks)))]
    whole = [step for step in whole if step.kind == "step"] or whole
    counts = Counter(_shape(step) for step in whole)
    if not counts:
        return []
    most = counts.most_common(1)[0][0]
    return [step for step in whole if _shape(step) == most]


def _shape(step: Step) -> tuple[object, ...]:
    return step.kind, tuple((part.track, tuple(done.action for done in part.actions)) for part in step.parts)


def order(trace: Trace) -> Schedule:
    """The schedule that the typical steps have run, on the first replica."""
    steps = typical(trace)
    if not steps:
        raise PlanError(_NOTHING)
    places = [track.place for track in trace.tracks]
    schedule = trace.schedule
    return steps[0].schedule(schedule.name, schedule.placement, places, trace.replica(trace.replicas[0]))


_NOTHING = (
    "this trace has no whole step: its block must end before it is used, and at least one step must come in it after "
    "those that are skipped"
)


def costs(trace: Trace) -> Costs:
    """See ``Trace.costs``."""
    steps = [step for step in trace.steps if not step.failed]
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for step in steps:
        for part in step.parts:
            for done in part.actions:
                times[done.action.kind, done.action.stage].append(done.seconds)
    stages = range(trace.schedule.num_stages)
    if not times:
        raise PlanError(_NOTHING)
    lost = [stage for stage in stages if not times["F", stage]]
    if lost:
        why = "" if trace.missing is None else f", for it has one rank's part only: {trace.missing}"
        raise PlanError(f"this trace has no forward of stages {lost}{why}")
    latency, sizes = _edges(trace, steps)
    found = {kind: [_median(times[kind, stage]) for stage in stages] for kind in "FRBIW"}
    halves = [None if b is None else b / 2 for b in found["B"]]
    i, w = ([_first(x, half) for x, half in zip(found[kind], halves, strict=True)] for kind in "IW")
    whole = [_first(b, x + y) for b, x, y in zip(found["B"], i, w, strict=True)]
    return Costs(
        f=tuple(_first(f) for f in found["F"]),
        i=tuple(i),
        w=tuple(w),
        b=tuple(whole),
        r=None if not any(found["R"]) else tuple(_first(r, f) for r, f in zip(found["R"], found["F"], strict=True)),
        latency=latency,
        bytes=sizes,
        activation=tuple(float(trace.saved.get(stage, 0)) for stage in stages),
    )


def _edges(trace: Trace, steps: Sequence[Step]) -> tuple[dict[Edge, float], dict[Edge, float]]:
    """For each edge, how long a message takes, and how many bytes go forward."""
    latencies: dict[Edge, list[float]] = defaultdict(list)
    sizes: dict[Edge, list[float]] = defaultdict(list)
    for step in steps:
        for crossing in crossings(trace, step):
            if crossing.seconds is not None:
                latencies[crossing.edge].append(crossing.seconds)
            if crossing.maker.action.kind == "F":
                sizes[crossing.edge].append(float(crossing.sent.bytes))
    pairs = latencies, sizes
    a, b = ({edge: _first(_median(found[edge])) for edge in trace.edges} for found in pairs)
    return a, b


def _median(numbers: Sequence[float]) -> float | None:
    return max(0.0, median(numbers)) if numbers else None


def _first(*numbers: float | None) -> float:
    return next((number for number in numbers if number is not None), 0.0)
