"""Numbers for people."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import PenstockError, PlanError
from penstock.profile.trace.records import ActionRecord, RankRecord, SendRecord, StepRecord, WaitRecord
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Edge, Schedule
from penstock.schedule.simulate import Prediction

if TYPE_CHECKING:
    from penstock.profile.trace.trace import Trace

__all__ = [
    "TracedMessage",
    "bubble",
    "comparison",
    "costs",
    "middle",
    "milliseconds",
    "order",
    "plural",
    "predicted",
    "prediction_from",
    "prediction_source",
    "prediction_text",
    "prediction_to",
    "sharing",
    "size",
    "summary",
    "traced_messages",
    "typical_steps",
]


def plural(number: int, what: str) -> str:
    """As in "3 stages"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"


def milliseconds(seconds: float) -> str:
    """As in "1.23 ms"; from a second on, in seconds."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def size(number: float) -> str:
    """As in ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"


# What a trace's numbers say: bubbles, and the costs of actions and edges.


class TracedMessage(NamedTuple):
    """A message from one action to another: between two ranks, or within one."""

    maker: ActionRecord
    sent: SendRecord
    taker: ActionRecord
    made_on: int  # tracks
    taken_on: int
    wait: WaitRecord | None  # for it; None within a rank

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


def traced_messages(trace: Trace, step: StepRecord) -> Iterator[TracedMessage]:
    """All messages of a step whose two ends are known."""
    for replica in trace.replicas:
        parts = step.of(trace.replica(replica))
        takers: dict[tuple[str, int, int], tuple[RankRecord, ActionRecord]] = {}
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
                        yield TracedMessage(done, sent, taker, part.track, there.track, wait)


def _lane(done: ActionRecord) -> str:
    return "F" if done.action.kind == "F" else "B"


def bubble(trace: Trace, step: StepRecord) -> float | None:
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


def typical_steps(trace: Trace) -> list[StepRecord]:
    """The steps to judge by: whole ones, to train where there are any, which have done what most of them have."""
    whole = [step for step in trace.steps if not step.failed and step.of(range(len(trace.tracks)))]
    whole = [step for step in whole if step.kind == "step"] or whole
    counts = Counter(_shape(step) for step in whole)
    if not counts:
        return []
    most = counts.most_common(1)[0][0]
    return [step for step in whole if _shape(step) == most]


def _shape(step: StepRecord) -> tuple[object, ...]:
    return step.kind, tuple((part.track, tuple(done.action for done in part.actions)) for part in step.parts)


def order(trace: Trace) -> Schedule:
    """The schedule that the typical steps have run, on the first replica."""
    steps = typical_steps(trace)
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


def _edges(trace: Trace, steps: Sequence[StepRecord]) -> tuple[dict[Edge, float], dict[Edge, float]]:
    """For each edge, how long a message takes, and how many bytes go forward."""
    latencies: dict[Edge, list[float]] = defaultdict(list)
    sizes: dict[Edge, list[float]] = defaultdict(list)
    for step in steps:
        for crossing in traced_messages(trace, step):
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


# What was predicted, beside what was measured.

_BY = {
    "plan": "predicted by the plan",
    "costs": "predicted from the pipeline's costs",
    "replan": "predicted by replan",
    "trace": "simulated with the times of this trace",
}


def predicted(trace: Trace) -> Prediction | None:
    """See ``Trace.predicted``."""
    steps = typical_steps(trace)
    if trace.missing is not None or not steps or steps[0].kind != "step":
        return None
    try:
        if trace.prediction is not None and trace.order.num_microbatches == trace.schedule.num_microbatches:
            return trace.prediction
        return Prediction(trace.simulation().makespan, "trace")
    except PenstockError:  # not all ranks have done anything
        return None


def comparison(trace: Trace) -> str | None:
    """One line: both times of a step, and both numbers of bytes of the fullest rank; None without a prediction."""
    text, seconds = prediction_text(trace), trace.seconds
    return None if text is None or seconds is None else f"step {milliseconds(seconds)} measured, {text}"


def prediction_text(trace: Trace) -> str | None:
    """What is to be said beside the measured time of a step."""
    found, seconds = trace.predicted, trace.seconds
    if found is None or seconds is None:
        return None
    text = f"{milliseconds(found.seconds)} {prediction_source(found, seconds)}"
    expects = found.saved if trace.memory == "saved" else found.memory
    most = _most(trace)
    if expects is None or not most or len(expects) != trace.schedule.num_ranks:
        return text
    track = max(most, key=lambda track: most[track])
    where, expected = trace.tracks[track], expects[trace.tracks[track].place]
    kind = "saved for backwards" if trace.memory == "saved" else "memory"
    there = f"{size(most[track])} measured, {size(expected)} predicted on rank {where.rank}"
    return f"{text}; {kind} {there} ({_difference(expected, most[track])})"


def prediction_source(found: Prediction, seconds: float) -> str:
    """By whom, and how far it is off the measured ``seconds``."""
    return f"{_BY[found.by]} ({_difference(found.seconds, seconds)})"


def _most(trace: Trace) -> dict[int, int]:
    """The most bytes of each track in the steps to judge by, where they are known."""
    most: dict[int, int] = {}
    for step in typical_steps(trace):
        for part in step.parts:
            for done in part.actions:
                if done.memory is not None:
                    most[part.track] = max(most.get(part.track, 0), done.memory)
    return most


def _difference(expected: float, measured: float) -> str:
    share = expected / measured - 1 if measured else 0.0
    return "the same" if abs(share) < 0.0005 else f"{abs(share):.1%} {'more' if share > 0 else 'less'}"


def prediction_to(found: Prediction | None) -> dict[str, Any] | None:
    """As numbers, texts, lists and dicts."""
    return None if found is None else asdict(found)


def prediction_from(data: Mapping[str, Any] | None) -> Prediction | None:
    """The inverse."""
    if data is None:
        return None
    memory, saved = (None if data[name] is None else tuple(map(float, data[name])) for name in ("memory", "saved"))
    samples, by = data["samples"], str(data["by"])
    if by not in _BY:
        raise PlanError(f"the trace has a prediction by {by!r}: it must be one of {sorted(_BY)}")
    return Prediction(float(data["seconds"]), by, memory, saved, None if samples is None else int(samples))


# A trace in a few lines.


def summary(trace: Trace) -> str:
    """How long a step takes, its bubble beside the simulated one, and what each rank does meanwhile."""
    schedule = trace.schedule
    head = (
        f"trace of {plural(len(trace.steps), 'step')}: {schedule.name}, {plural(schedule.num_stages, 'stage')} on "
        f"{plural(schedule.num_ranks, 'rank')}, {plural(schedule.num_microbatches, 'micro-batch')}"
    )
    if len(trace.replicas) > 1:
        head += f", {len(trace.replicas)} replicas"
    lines = [head] + ([] if trace.missing is None else [f"one rank's part only: {trace.missing}"])
    steps = typical_steps(trace)
    if not steps:
        return "\n".join([*lines, "no whole step"])
    times = [step.seconds for step in steps]
    middle, least, most = (milliseconds(pick(times)) for pick in (median, min, max))
    lines.append(f"step    {middle} (median of {len(times)}; {least} to {most})")
    lines += [f"        {text}" for text in [prediction_text(trace)] if text]
    lines += [f"bubble  {text}" for text in [_bubble(trace)] if text]
    lines += sharing(trace)
    cells: list[tuple[str, ...]] = [("rank", "device", "stages", "busy", "waits", "around", "other")]
    for t, track in enumerate(trace.tracks):
        parts = [part for step in steps for part in step.of([t])]
        if parts:
            known = [[part.busy, part.waited, part.around] for part in parts]
            other = [max(0.0, p.end - p.begin - sum(row)) for p, row in zip(parts, known, strict=True)]
            times = [median(column) for column in (*zip(*known, strict=True), other)]
            stages = " ".join(map(str, schedule.stages_of(track.place)))
            cells.append((str(track.rank), track.device, stages, *map(milliseconds, times)))
    return "\n".join([*lines, "", *_columns(cells)])


def sharing(trace: Trace) -> list[str]:
    """A sentence for each GPU that ranks share."""
    return [
        f"ranks {', '.join(str(trace.tracks[t].rank) for t in tracks)} share a GPU: what they do on it takes as long "
        "as all of it together, and its memory is counted for each"
        for tracks in trace.sharing
    ]


def _bubble(trace: Trace) -> str | None:
    if trace.bubble is None:
        return None
    text = f"{trace.bubble:.1%} measured"
    try:
        return f"{text}, {trace.simulation().bubble:.1%} simulated with the median time of each action"
    except PenstockError:  # one rank's part only, or half of a call
        return text


def _columns(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = []
    for row in cells:
        padded = [c.rjust(w) if i > 2 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("─" * width for width in widths))
    return lines
