"""The findings of a report: idle time by cause, memory peaks, use of edges, and simulated advice.

All time between actions has one cause:

    rank 0  ▕0F0▏▕0F1▏·······fill·······▕0B0▏··imbalance··▕0B1▏     waits that balanced stages would have, too, are
    rank 1  fill ▕1F0▏▕1F1▏ h ▕1B0▏                                 fill or drain; the rest is imbalance
                            └ host: no wait for a message
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from statistics import fmean, median
from typing import Any

from penstock.errors import PenstockError, PlanError, ScheduleError
from penstock.format import count_noun
from penstock.profile.trace.analysis import TraceData, milliseconds
from penstock.profile.trace.records import RankRecord, StepRecord, covered_seconds, pending_backwards
from penstock.schedule.costs import Costs
from penstock.schedule.registry import SCHEDULES, build
from penstock.schedule.schedule import BACKWARD, Action, Schedule, with_recompute
from penstock.schedule.search import auto
from penstock.schedule.simulate import Simulation, simulate
from penstock.split.balance import partition

CAUSES = ("fill", "drain", "imbalance", "communication", "host")


@dataclass(frozen=True)
class Idle:
    """The time of a rank in a step, in seconds, from the first action of its pipeline to the last.

    ``busy`` is the time in actions. The rest of ``total`` is idle, and is the sum of these:

    - ``fill``: before the rank's first action; and waits for a computing peer up to the rank's first backward, as long
      as balanced stages would wait.
    - ``drain``: after the rank's last action; and such waits after its first backward.
    - ``imbalance``: waits for a computing peer beyond those of balanced stages.
    - ``communication``: the peer has finished but its message has not arrived, or a send is not complete.
    - ``host``: neither: launches, sends, Python.

    If a trace has only some of the ranks, all waits for a computing peer are imbalance.
    """

    track: int
    total: float
    busy: float
    fill: float
    drain: float
    imbalance: float
    communication: float
    host: float

    @property
    def idle(self) -> float:
        return self.total - self.busy

    @property
    def causes(self) -> dict[str, float]:
        return {cause: getattr(self, cause) for cause in CAUSES}


def idle_times(trace: TraceData, step: StepRecord) -> list[Idle]:
    """The idle time of each rank with actions in ``step``."""
    sent_at = {id(one.wait): one.source.end for one in trace.messages(step) if one.wait is not None}
    even = _balanced_gaps(trace, step)
    found = []
    for parts in map(step.of, trace.replicas.values()):
        first = min((part.actions[0].start for part in parts), default=0.0)
        last = max((done.end for part in parts for done in part.actions), default=0.0)
        for part in parts:
            causes = dict.fromkeys(CAUSES, 0.0)
            now, phase = first, "fill"
            for number, done in enumerate(part.actions):
                gap = max(0.0, done.start - now)
                computing = waiting = gap
                if number:  # the time with a computing peer, and the time with any wait
                    waits = [(wait, max(wait.start, now), min(wait.end, done.start)) for wait in done.waits]
                    waiting = covered_seconds((start, end) for _, start, end in waits)
                    messages = [one for one in waits if one[0].what == "message"]
                    computing = covered_seconds((a, min(b, sent_at.get(id(wait), b))) for wait, a, b in messages)
                    computing = min(computing, waiting)
                own = min(computing, even.get(done.action, 0.0)) if number else gap
                causes[phase] += own
                causes["imbalance"] += computing - own
                causes["communication"] += waiting - computing
                causes["host"] += gap - waiting
                phase = "drain" if done.action.kind in BACKWARD else phase
                now = max(now, done.end)
            causes["drain"] += last - now
            busy = last - first - sum(causes.values())
            found.append(Idle(part.track, last - first, busy, **causes))
    return found


def _balanced_gaps(trace: TraceData, step: StepRecord) -> dict[Action, float]:
    """Idle seconds before each action if all stages took the same time and messages none."""
    stages = trace.schedule.num_stages
    try:
        costs = trace.costs()
        times = {name: fmean(costs.of_stages(name, stages)) for name in ("f", "i", "w", "b")}
        recompute = fmean(costs.durations(stages)["R"])
        replica = trace.tracks[step.of(range(len(trace.tracks)))[0].track].replica
        even = simulate(trace.step_order(step, replica), Costs(**times, r=recompute), trace.edges)
    except PenstockError:  # only the records of one rank, or of the forward of a call
        return {}
    gaps = {}
    for actions, starts, ends in zip(even.schedule.orders, even.starts, even.ends, strict=True):
        for action, start, before in zip(actions, starts, (0.0, *ends), strict=False):
            gaps[action] = start - before
    return gaps


# ── cuts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Repartition:
    """Layers per stage before and after, with the new ``costs``; ``saved`` is a fraction of the step time."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    costs: Costs
    saved: float

    @property
    def text(self) -> str:
        after, before = (", ".join(map(str, sizes)) for sizes in (self.after, self.before))
        return f"a cut into stages of {after} layers, not {before},"


def layers_of(trace: TraceData) -> list[tuple[str, ...]] | None:
    """The names of the layers of each stage; None if the trace's plan does not have all of them."""
    stages = trace.plan.get("stages", [])
    if len(stages) != trace.schedule.num_stages or not all(stage["layers"] for stage in stages):
        return None
    return [tuple(map(str, stage["layers"])) for stage in stages]


def stage_seconds(costs: Costs, num_stages: int, trains: bool) -> list[float]:
    """Seconds of forward and backward of one micro-batch per stage."""
    times = costs.durations(num_stages)
    return [f + b for f, b in zip(times["F"], times["B"], strict=True)] if trains else times["F"]


def better_cut(trace: TraceData, base: Simulation) -> Repartition | None:
    """The most balanced cut, assuming equal layers within a stage; None if it is not faster or layers are unknown.

    Messages keep their size and time. The cut does not increase the largest peak memory of a rank.
    """
    groups = layers_of(trace)
    if groups is None or sum(map(len, groups)) == len(groups):
        return None
    before = tuple(map(len, groups))
    seconds = stage_seconds(base.costs, len(groups), base.schedule.trains)
    shares = [s / count for s, count in zip(seconds, before, strict=True) for _ in range(count)]
    after = tuple(partition(shares, len(groups)))
    costs = recut(base.costs, before, after)
    found = simulate(base.schedule, costs, trace.edges)
    if max(found.peak_memory) > max(base.peak_memory) * _ROUNDING or found.makespan >= base.makespan:
        return None
    return Repartition(before, after, costs, _saved(base, found.makespan))


def recut(costs: Costs, before: Sequence[int], after: Sequence[int]) -> Costs:
    """The costs of the new stages, if the layers of each old stage have equal costs."""
    ends = list(accumulate(after))

    def moved(numbers: list[float]) -> list[float]:
        shares = [number / count for number, count in zip(numbers, before, strict=True) for _ in range(count)]
        return [sum(shares[end - count : end]) for end, count in zip(ends, after, strict=True)]

    return map_stage_costs(costs, len(before), moved)


def map_stage_costs(costs: Costs, num_stages: int, change: Callable[[list[float]], list[float]]) -> Costs:
    """Apply ``change`` to each cost that has a number per stage."""
    names = [name for name in ("f", "i", "w", "b", "r", "activation") if getattr(costs, name) is not None]
    changed: dict[str, Any] = {name: tuple(change(costs.of_stages(name, num_stages))) for name in names}
    return replace(costs, **changed)


# ── advice ───────────────────────────────────────────────────────────────────────────────────────────────────────

MIN_SAVING = 0.01
"""The smallest fraction of a step that advice must save."""

SLOW = 1.1  # least ratio of a slow rank's time to that of other ranks
_MORE_MEMORY = "more memory"
_MAX_EDGES = 4  # number of slowest edges that are considered
_ROUNDING = 1 + 1e-9  # tolerance for rounding
_MAX_SEARCHED_ACTIONS = 50_000  # limit for a search


@dataclass(frozen=True)
class Advice:
    """A change as text, and the fraction of a step that it saves; if ``bound``, that it saves at most."""

    what: str
    text: str
    saved: float
    bound: bool = False


def advise(trace: TraceData, idle: Sequence[Idle], base: Simulation | None, cut: Repartition | None) -> list[Advice]:
    """All changes that save at least ``MIN_SAVING``: first those within the current memory, then others, then bounds.

    For steps that cannot be simulated (the forward of a call, or the records of one rank) advice is based on ``idle``.
    """
    host = max((rank.host / (rank.total or 1.0) for rank in idle), default=0.0)
    text = (
        f"hosts need up to {host:.0%} of a step between actions: fewer and larger micro-batches, fewer programs on the "
        "machine, or compiled stages save at most that"
    )
    found = [Advice("host", text, host, bound=True)]
    if base is not None and base.makespan:
        if base.schedule.trains:
            found += [*_other_schedules(trace, base), *_more_microbatches(trace, base)]
        found += [*_slow_ranks(trace, base), *_faster_links(trace, base)]
        if cut is not None:
            text = f"{cut.text} saves {cut.saved:.0%} (if the layers of a stage cost alike)"
            found.append(Advice("cut", text, cut.saved))
    worth = [advice for advice in found if advice.saved >= MIN_SAVING]
    return sorted(worth, key=lambda advice: (advice.bound, advice.what == _MORE_MEMORY, -advice.saved))


def _saved(base: Simulation, makespan: float) -> float:
    return 1 - makespan / base.makespan


def _other_schedules(trace: TraceData, base: Simulation) -> Iterator[Advice]:
    """The best fixed schedule within the current memory, the best with more, and a searched one if it is better."""
    costs = base.costs
    if not any(costs.of_stages("activation", base.schedule.num_stages)):
        costs = replace(costs, activation=1.0)  # count micro-batches in flight, as no bytes are known
    kept = max(simulate(base.schedule, costs, trace.edges).peak_memory)
    best, larger = 0.0, Advice("", "", 0.0)
    now, fixed = base.schedule, []
    for name in SCHEDULES:
        with suppress(ScheduleError):  # for other numbers of stages or micro-batches
            schedule = _same_placement(name, now, now.num_microbatches)
            if schedule.trains and schedule.placement == now.placement and schedule.orders != now.orders:
                fixed.append(simulate(schedule, costs, trace.edges))
    fixed.sort(key=lambda found: found.makespan)
    split = "" if "W" in trace.order.kinds else " (if a weight gradient takes half of a backward)"
    for found in fixed:
        saved, peak, name = _saved(base, found.makespan), max(found.peak_memory), found.schedule.name
        note = split if found.schedule.kinds & {"I", "W"} else ""
        if peak <= kept * _ROUNDING:
            best = saved
            yield Advice("schedule", f"schedule {name} saves {saved:.0%} at the same memory{note}", saved)
            break
        if not larger.text:
            more = f"{peak / kept:.2g} times the memory" if kept else "more memory"
            larger = Advice(_MORE_MEMORY, f"schedule {name} saves {saved:.0%}, with {more}{note}", saved)
    if larger.saved > best + MIN_SAVING:
        yield larger
    if "R" in now.kinds or sum(map(len, now.orders)) > _MAX_SEARCHED_ACTIONS:
        return
    with suppress(ScheduleError):  # for orders that auto does not support
        order = auto(costs, now.placement, now.num_microbatches, cap=kept, edges=trace.edges, seconds=0.4)
        saved = _saved(base, order.makespan)
        if saved > best + MIN_SAVING:
            note = split if order.schedule.kinds & {"I", "W"} else ""
            yield Advice("schedule", f"schedule auto saves {saved:.0%} at the same memory{note}", saved)


def _same_placement(name: str, now: Schedule, m: int) -> Schedule:
    """The schedule ``name`` for the ranks and stages of ``now``, with the recomputes of ``now``."""
    each, rest = divmod(now.num_stages, now.num_ranks)
    if rest:
        raise ScheduleError("some ranks have more stages than others")
    some, last = {stage for stage, _ in now.recomputed}, now.num_microbatches - 1
    modes = [
        "never" if stage not in some else "always" if (stage, last) in now.recomputed else "except_last"
        for stage in range(now.num_stages)
    ]
    return with_recompute(build(name, now.num_ranks, m, each), modes)


def _more_microbatches(trace: TraceData, base: Simulation) -> Iterator[Advice]:
    """Twice as many micro-batches of half the size."""
    now, m = base.schedule, 2 * base.schedule.num_microbatches
    with suppress(ScheduleError):  # a custom order
        schedule = _same_placement(now.name, now, m)
        if schedule.placement == now.placement:
            halves = map_stage_costs(base.costs, now.num_stages, lambda numbers: [x / 2 for x in numbers])
            saved = _saved(base, simulate(schedule, halves, trace.edges).makespan)
            text = f"{m} micro-batches, not {m // 2}, save {saved:.0%} (if one of half the size takes half the time)"
            yield Advice("micro-batches", text, saved)


def _slow_ranks(trace: TraceData, base: Simulation) -> Iterator[Advice]:
    """Ranks that are slower than others for the same work, except those that share a GPU.

    The same work is one stage in several replicas, or stages with equal numbers of layers and parameters.
    """
    stages, plan = trace.schedule.num_stages, trace.plan.get("stages", [])
    work: list[Hashable] = list(range(stages))
    if len(plan) == stages:
        work = [(len(stage["layers"]), stage["parameters"]) for stage in plan]
    found: dict[tuple[int, int, str], list[float]] = defaultdict(list)  # by track, stage and kind of action
    for part in (part for step in trace.typical_steps() for part in step.parts):
        for done in part.actions:
            found[part.track, done.action.stage, done.action.kind].append(done.seconds)
    times = {key: median(seconds) for key, seconds in found.items()}
    durations = base.costs.durations(stages)
    pooled = [sum(durations[kind][stage] for kind in base.schedule.kinds) for stage in range(stages)]

    def makespan(seconds: Mapping[int, float]) -> float:
        """The time of a step if these stages took ``seconds`` for a micro-batch."""
        factors = [seconds.get(stage, usual) / (usual or 1.0) for stage, usual in enumerate(pooled)]
        costs = map_stage_costs(base.costs, stages, lambda numbers: list(map(mul, numbers, factors)))
        return simulate(base.schedule, costs, trace.edges).makespan

    shared = {track for tracks in trace.shared_gpus for track in tracks}
    for track in sorted(set(range(len(trace.tracks))) - shared):
        own: dict[int, float] = defaultdict(float)
        others: dict[int, float] = defaultdict(float)
        for (t, stage, kind), seconds in times.items():
            peers = [s for (o, x, k), s in times.items() if o != track and k == kind and work[x] == work[stage]]
            if t == track and peers:
                own[stage] += seconds
                others[stage] += median(peers)
        factor = sum(own.values()) / (sum(others.values()) or float("inf"))
        if factor > SLOW:
            saved = 1 - makespan(others) / makespan(own)
            text = f"rank {trace.tracks[track].rank} takes {factor:.2f} times as long as others for the same work"
            yield Advice("slow rank", f"{text}: at their speed, a step would save {saved:.0%}", saved)


def _faster_links(trace: TraceData, base: Simulation) -> Iterator[Advice]:
    """Upper bounds of the savings by faster links, for the slowest edges."""
    costs, placement = base.costs, base.schedule.placement
    channels = [(src, dst) for src, dst in trace.edges if placement[src] != placement[dst]]
    slowest = sorted(channels, key=lambda edge: -costs.of_edge("latency", edge))[:_MAX_EDGES]
    for edge in (edge for edge in slowest if costs.of_edge("latency", edge)):
        latency = {other: costs.of_edge("latency", other) * (other != edge) for other in trace.edges}
        saved = _saved(base, simulate(base.schedule, replace(costs, latency=latency), trace.edges).makespan)
        takes = milliseconds(costs.of_edge("latency", edge))
        text = (
            f"messages from stage {edge[0]} to stage {edge[1]} and back take {takes} each: a faster link, or a cut "
            f"with fewer bytes, saves at most {saved:.0%}"
        )
        yield Advice("edge", text, saved, bound=True)


# ── findings ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class MemoryPeak:
    """The peak memory of a rank in a step, and the action after which it occurs.

    ``flight[s]`` are the micro-batches of stage ``s`` with a pending backward, and ``saved`` their bytes, if known. The
    rest is parameters, gradients, optimizer state, and other tensors on the device.
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
    """Messages of an edge in a step, in both directions. ``seconds`` of a message is None if no rank waited for one."""

    src: int
    dst: int
    ranks: tuple[int, int]  # pipeline ranks
    messages: int
    forward: int  # bytes of one message
    backward: int
    seconds: float | None

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of a message; None if its time is unknown."""
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
    simulation: Simulation | None  # None if some records are missing
    cut: Repartition | None

    @property
    def bubble(self) -> float:
        return sum(self.causes.values())

    @property
    def causes(self) -> dict[str, float]:
        """The fraction of all ranks' time by cause; the sum is the bubble."""
        total = sum(rank.total for rank in self.idle) or 1.0
        return {cause: sum(rank.causes[cause] for rank in self.idle) / total for cause in CAUSES}

    @property
    def what(self) -> str:
        """The kind of step, with an article."""
        return {"evaluate": "an evaluation"}.get(self.step.kind, f"a {self.step.kind}")

    @property
    def head(self) -> str:
        """One line: the schedule, the duration of a step, and its bubble by cause."""
        trace, schedule = self.trace, self.trace.schedule
        causes = sorted(self.causes.items(), key=lambda item: -item[1])
        why = ", ".join(f"{cause} {share:.1%}" for cause, share in causes if share >= 0.0005)
        text = (
            f"{schedule.name}, {count_noun(schedule.num_stages, 'stage')} on {count_noun(schedule.num_ranks, 'rank')}, "
            f"{count_noun(trace.order.num_microbatches, 'micro-batch')}: {self.what} takes "
            f"{milliseconds(self.step.seconds)}, bubble {self.bubble:.1%}"
        )
        return f"{text} ({why})" if why else text

    @property
    def best(self) -> str:
        return self.advice[0].text if self.advice else f"no change was found that saves {MIN_SAVING:.0%} or more"


def analyze(trace: TraceData) -> Findings:
    """Analyze a trace; ``PlanError`` if it has no complete step."""
    steps = trace.typical_steps()
    if not steps:
        raise PlanError(
            "this trace has no complete step to report on: record one, with `with pipe.trace() as trace: pipe.step(…)`"
        )
    step = sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]
    idle = idle_times(trace, step)
    simulation = None
    with suppress(PenstockError):  # only the records of one rank, or of the forward of a call
        simulation = trace.simulation()
    cut = None if simulation is None else better_cut(trace, simulation)
    peaks = [memory_peak(part, trace.saved) for part in step.of(range(len(trace.tracks)))]
    known = [peak for peak in peaks if peak is not None]
    by_edge = defaultdict(list)
    for message in trace.messages(step):
        by_edge[message.edge].append(message)
    uses = []
    for src, dst in trace.edges:
        messages = by_edge[src, dst]
        sizes = [[c.sent.bytes for c in messages if (c.source.action.kind == "F") == way] for way in (True, False)]
        times = [c.seconds for c in messages if c.seconds is not None]
        ranks = trace.schedule.placement[src], trace.schedule.placement[dst]
        forward, backward = (int(median(bytes_of or [0])) for bytes_of in sizes)
        uses.append(EdgeUse(src, dst, ranks, len(messages), forward, backward, median(times) if times else None))
    return Findings(trace, step, idle, known, uses, advise(trace, idle, simulation, cut), simulation, cut)
