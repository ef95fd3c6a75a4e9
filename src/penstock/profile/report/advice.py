"""Why ranks are idle in a step: every second in which one works on no action has one cause.

rank 0  ▕0F0▏▕0F1▏·······fill·······▕0B0▏··imbalance··▕0B1▏     waits that even stages would have, too, are the
rank 1  fill ▕1F0▏▕1F1▏ h ▕1B0▏                                 pipeline's own; the rest is imbalance
                        └ host: no message is awaited
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError, ScheduleError
from penstock.profile.trace.analysis import milliseconds, traced_messages, typical_steps
from penstock.profile.trace.records import ActionRecord, StepRecord
from penstock.schedule.costs import Costs
from penstock.schedule.recompute import with_recompute
from penstock.schedule.registry import SCHEDULES, build
from penstock.schedule.schedule import BACKWARD, Action, Schedule
from penstock.schedule.search import auto
from penstock.schedule.simulate import Simulation, simulate
from penstock.split.partition import partition

if TYPE_CHECKING:
    from penstock.profile.trace.trace import Trace

__all__ = [
    "CAUSES",
    "LEAST",
    "SLOW",
    "Advice",
    "Idle",
    "Repartition",
    "SlowRank",
    "advise",
    "better_cut",
    "idle_times",
    "layers_of",
    "mapped",
    "moves",
    "recut",
    "slow_ranks",
    "stage_seconds",
]

CAUSES = ("fill", "drain", "imbalance", "communication", "host")


@dataclass(frozen=True)
class Idle:
    """What a rank does between the first action of its pipeline in a step and the last, in seconds.

    ``busy`` is the time in actions. The rest of ``total`` is idle, and is the sum of these:

    - ``fill``: before its first action; and waits for a peer that computes, up to the rank's own first backward, as far
      as they would be there if all stages took the same time: the pipeline fills.
    - ``drain``: after its last action; and such waits after its first backward: the pipeline runs empty.
    - ``imbalance``: what waits for a peer that computes last longer than they would with even stages.
    - ``communication``: the peer is done, and its message is not there yet; or a message that was sent is not over.
    - ``host``: between two actions no message is awaited: the program's own work, such as launching and sending.

    Where a trace has not all ranks, it is not known what even stages would do, and all such waits are imbalance.
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


def idle_times(trace: Trace, step: StepRecord) -> list[Idle]:
    """For each rank that has done anything in ``step``."""
    made = {
        id(crossing.wait): crossing.maker.end for crossing in traced_messages(trace, step) if crossing.wait is not None
    }
    even = _even_gaps(trace, step)
    found = []
    for replica in trace.replicas:
        parts = step.of(trace.replica(replica))
        if parts:
            first = min(part.actions[0].start for part in parts)
            last = max(done.end for part in parts for done in part.actions)
            found += [_idle(part.track, part.actions, first, last, made, even) for part in parts]
    return found


def _idle(
    track: int,
    actions: Iterable[ActionRecord],
    first: float,
    last: float,
    made: Mapping[int, float],
    even: Mapping[Action, float],
) -> Idle:
    fill = drain = imbalance = communication = host = 0.0
    now, begun, backwards = first, False, False
    for done in actions:
        gap = max(0.0, done.start - now)
        if not begun:
            fill += gap
        elif gap:
            computing, waiting = _waits(done, now, made)
            own = min(computing, even.get(done.action, 0.0))
            if backwards:
                drain += own
            else:
                fill += own
            imbalance += computing - own
            communication += waiting - computing
            host += gap - waiting
        begun, backwards = True, backwards or done.action.kind in BACKWARD
        now = max(now, done.end)
    drain += last - now
    idle = fill + drain + imbalance + communication + host
    return Idle(track, last - first, last - first - idle, fill, drain, imbalance, communication, host)


def _waits(done: ActionRecord, now: float, made: Mapping[int, float]) -> tuple[float, float]:
    """Of the time from ``now`` to an action: in which a peer still computes, and all in which any wait goes on."""
    clipped = [(wait, max(wait.start, now), min(wait.end, done.start)) for wait in done.waits]
    waiting = _covered((start, end) for _, start, end in clipped)
    computing = _covered(
        (start, min(end, made.get(id(wait), end))) for wait, start, end in clipped if wait.what == "message"
    )
    return min(computing, waiting), waiting


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long their union is."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _even_gaps(trace: Trace, step: StepRecord) -> dict[Action, float]:
    """How long a rank would be idle before each action if stages took the same time, and messages none."""
    places = [track.place for track in trace.tracks]
    schedule = trace.schedule
    try:
        costs = trace.costs()
        times = {
            name: sum(numbers) / len(numbers)
            for name in ("f", "i", "w", "b")
            for numbers in [costs.of_stages(name, schedule.num_stages)]
        }
        again = costs.durations(schedule.num_stages)["R"]
        replica = trace.tracks[step.of(range(len(trace.tracks)))[0].track].replica
        order = step.schedule(schedule.name, schedule.placement, places, trace.replica(replica))
        even = simulate(order, Costs(**times, r=sum(again) / len(again)), trace.edges)
    except PenstockError:  # one rank's part only, or half of a call
        return {}
    gaps = {}
    for actions, starts, ends in zip(even.schedule.orders, even.starts, even.ends, strict=True):
        for action, start, before in zip(actions, starts, (0.0, *ends), strict=False):
            gaps[action] = start - before
    return gaps


# A better cut, as far as a trace can tell: it has the times of stages, not of their layers.

_MAX_SIMULATED_ACTIONS = 200_000  # actions to simulate; for more of them, only the most even cut is looked at


@dataclass(frozen=True)
class Repartition:
    """How many layers each stage has, and would have: with ``costs``, a step is shorter by ``saved`` of its time."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    layers: tuple[str, ...]
    costs: Costs
    saved: float

    @property
    def text(self) -> str:
        """What to change, in words."""
        moved = self._moved()
        if len(moved) == 1:
            layer, old, new = moved[0]
            return f"moving layer {layer} from stage {old} to stage {new}"
        numbers, there = (", ".join(map(str, sizes)) for sizes in (self.after, self.before))
        return f"a cut into stages of {numbers} layers, not {there},"

    def _moved(self) -> list[tuple[str, int, int]]:
        pairs = zip(self.layers, _owners(self.before), _owners(self.after), strict=True)
        return [(layer, old, new) for layer, old, new in pairs if old != new]


def layers_of(trace: Trace) -> list[tuple[str, ...]] | None:
    """The names of each stage's layers, from the trace's plan; None if it has none of them all."""
    stages = trace.plan.get("stages", [])
    if len(stages) != trace.schedule.num_stages or not all(stage["layers"] for stage in stages):
        return None
    return [tuple(map(str, stage["layers"])) for stage in stages]


def stage_seconds(costs: Costs, num_stages: int, trains: bool) -> list[float]:
    """The time of one micro-batch in each stage, there and back."""
    times = costs.durations(num_stages)
    return [f + b for f, b in zip(times["F"], times["B"], strict=True)] if trains else times["F"]


def better_cut(trace: Trace, base: Simulation) -> Repartition | None:
    """The fastest of some cuts, if the layers of a stage cost alike; None where none is faster, or layers are unknown.

    Looked at are the most even cut, and those in which one layer moves to the next stage or to the one before. Messages
    are taken to be as large and as fast as they are, wherever the cut is. No rank keeps more than the fullest does now.
    """
    groups = layers_of(trace)
    if groups is None or sum(map(len, groups)) == len(groups):
        return None
    before = tuple(map(len, groups))
    seconds = stage_seconds(base.costs, len(groups), base.schedule.trains)
    shares = [s / count for s, count in zip(seconds, before, strict=True) for _ in range(count)]
    cuts = [tuple(partition(shares, len(groups)))]
    if sum(map(len, base.schedule.orders)) * len(groups) <= _MAX_SIMULATED_ACTIONS:
        cuts += moves(before)
    best: Repartition | None = None
    for after in cuts:
        costs = recut(base.costs, before, after)
        found = simulate(base.schedule, costs, trace.edges)
        saved = 1 - found.makespan / base.makespan if base.makespan else 0.0
        fits = max(found.peak_memory) <= max(base.peak_memory) * (1 + 1e-9)
        if fits and saved > (0.0 if best is None else best.saved):
            best = Repartition(before, after, tuple(layer for group in groups for layer in group), costs, saved)
    return best


def moves(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All cuts in which one layer is on the other side of one cut."""
    for stage in range(len(sizes) - 1):
        for here, there in ((stage, stage + 1), (stage + 1, stage)):
            if sizes[here] > 1:
                yield tuple(n - (s == here) + (s == there) for s, n in enumerate(sizes))


def recut(costs: Costs, before: Sequence[int], after: Sequence[int]) -> Costs:
    """The costs of stages of other sizes, each layer with an even share of what its stage had."""
    ends = list(accumulate(after))

    def moved(numbers: list[float]) -> list[float]:
        shares = [number / count for number, count in zip(numbers, before, strict=True) for _ in range(count)]
        return [sum(shares[end - count : end]) for end, count in zip(ends, after, strict=True)]

    return mapped(costs, len(before), moved)


def mapped(costs: Costs, num_stages: int, change: Callable[[list[float]], list[float]]) -> Costs:
    """The costs with all that is counted by stages changed: ``change`` gets the numbers of all stages."""
    names = [name for name in ("f", "i", "w", "b", "r", "activation") if getattr(costs, name) is not None]
    changed: dict[str, Any] = {name: tuple(change(costs.of_stages(name, num_stages))) for name in names}
    return replace(costs, **changed)


def _owners(sizes: Sequence[int]) -> list[int]:
    return [stage for stage, count in enumerate(sizes) for _ in range(count)]


# Ranks that are slower than others for the same work.

SLOW = 1.1
"""How many times as long as others a rank takes to be called slow."""


@dataclass(frozen=True)
class SlowRank:
    """A rank, by its number in the world: how much longer than others it takes, and what that costs a step."""

    rank: int
    factor: float
    saved: float

    @property
    def text(self) -> str:
        return (
            f"rank {self.rank} takes {self.factor:.2f} times as long as others for the same work: as fast as they are, "
            f"it saves {self.saved:.0%}"
        )


def slow_ranks(trace: Trace, base: Simulation) -> Iterator[SlowRank]:
    """The same work is that of one stage in several replicas, or of stages with as many layers and parameters.

    Of ranks that share a GPU none is slow by itself.
    """
    sharing = {track for tracks in trace.sharing for track in tracks}
    times = _times(trace)
    groups: dict[Hashable, list[tuple[int, float]]] = defaultdict(list)
    for (track, stage, kind), seconds in times.items():
        groups[_work(trace, stage), kind].append((track, seconds))
    for track in sorted(set(range(len(trace.tracks))) - sharing):
        own: dict[int, float] = defaultdict(float)
        others: dict[int, float] = defaultdict(float)
        for (t, stage, kind), seconds in times.items():
            peers = [s for other, s in groups[_work(trace, stage), kind] if other != track]
            if t == track and peers:
                own[stage] += seconds
                others[stage] += median(peers)
        usual = sum(others.values())
        if usual and sum(own.values()) > SLOW * usual:
            pooled = _pooled(base)
            slow, even = (
                simulate(base.schedule, _scaled(base, {s: x / pooled[s] for s, x in t.items()}), trace.edges).makespan
                for t in (own, others)
            )
            yield SlowRank(trace.tracks[track].rank, sum(own.values()) / usual, 1 - even / slow)


def _times(trace: Trace) -> dict[tuple[int, int, str], float]:
    """The median time of each kind of action of a stage on a track."""
    found: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for step in typical_steps(trace):
        for part in step.parts:
            for done in part.actions:
                found[part.track, done.action.stage, done.action.kind].append(done.seconds)
    return {key: median(seconds) for key, seconds in found.items()}


def _work(trace: Trace, stage: int) -> Hashable:
    """Equal for stages that have the same to do, as far as the plan tells."""
    stages = trace.plan.get("stages", [])
    if len(stages) != trace.schedule.num_stages:
        return stage
    return len(stages[stage]["layers"]), stages[stage]["parameters"]


def _pooled(base: Simulation) -> list[float]:
    """What a stage takes for one micro-batch, by the costs of the simulation."""
    times = base.costs.durations(base.schedule.num_stages)
    kinds = base.schedule.kinds
    return [sum(times[kind][stage] for kind in kinds) for stage in range(base.schedule.num_stages)]


def _scaled(base: Simulation, factors: Mapping[int, float]) -> Costs:
    def scaled(numbers: list[float]) -> list[float]:
        return [x * factors.get(stage, 1.0) for stage, x in enumerate(numbers)]

    return mapped(base.costs, base.schedule.num_stages, scaled)


# What would make a step shorter, and by how much: each change is simulated with the trace's costs.

LEAST = 0.01
"""The share of a step that advice must save to be given."""

_MORE = "more memory"
_EDGES = 4  # of all edges, those that take longest
_SAME = 1 + 1e-9  # two sums of the same sizes
_MAX_SEARCHED_ACTIONS = 50_000  # actions; for more of them a search takes too long to be worth it


@dataclass(frozen=True)
class Advice:
    """A change, in words, and the share of a step's time that it saves; or at most saves, if that is a ``bound``."""

    what: str
    text: str
    saved: float
    bound: bool = False


def advise(trace: Trace, idle: Sequence[Idle] = ()) -> list[Advice]:
    """All changes that save at least a hundredth of a step: first those in the memory of now, last bounds.

    Within each, what saves most comes first. ``idle`` are the causes of idle time in a step, if they are known. Where
    steps cannot be simulated, as of half a call or of one rank's part, there is nothing but what these say.
    """
    found = list(_host(idle))
    try:
        base = trace.simulation()
    except PenstockError:
        base = None
    if base is not None and base.makespan:
        found += _schedules(trace, base)
        found += _microbatches(trace, base)
        found += [_cut(cut) for cut in [better_cut(trace, base)] if cut is not None]
        found += [Advice("slow rank", slow.text, slow.saved) for slow in slow_ranks(trace, base)]
        found += _edges(trace, base)
    worth = [advice for advice in found if advice.saved >= LEAST]
    return sorted(worth, key=lambda advice: (advice.bound, advice.what == _MORE, -advice.saved))


def _saved(base: Simulation, makespan: float) -> float:
    return 1 - makespan / base.makespan


# ── schedules ────────────────────────────────────────────────────────────────────────────────────────────────


def _schedules(trace: Trace, base: Simulation) -> Iterator[Advice]:
    """The best fixed schedule within the memory of now, the best with more, and the searched one if it beats them."""
    if not base.schedule.trains:
        return
    costs = _counted(base.costs, base.schedule.num_stages)
    kept = max(simulate(base.schedule, costs, trace.edges).peak_memory)
    best, larger = 0.0, Advice("", "", 0.0)
    fixed = [simulate(schedule, costs, trace.edges) for schedule in _fixed(base.schedule)]
    fixed.sort(key=lambda found: found.makespan)
    split = _split_note(trace)
    for found in fixed:
        saved, peak, name = _saved(base, found.makespan), max(found.peak_memory), found.schedule.name
        note = split if found.schedule.kinds & {"I", "W"} else ""
        if peak <= kept * _SAME:
            best = saved
            yield Advice("schedule", f"schedule {name} saves {saved:.0%} at the same memory{note}", saved)
            break
        if not larger.text:
            more = f"{peak / kept:.2g} times the memory" if kept else "more memory"
            larger = Advice(_MORE, f"schedule {name} saves {saved:.0%}, with {more}{note}", saved)
    if larger.saved > best + LEAST:
        yield larger
    if "R" in base.schedule.kinds or sum(map(len, base.schedule.orders)) > _MAX_SEARCHED_ACTIONS:
        return
    try:
        found_order = auto(
            costs, base.schedule.placement, base.schedule.num_microbatches, cap=kept, edges=trace.edges, seconds=0.4
        )
    except ScheduleError:  # for orders that auto does not know
        return
    saved = _saved(base, found_order.makespan)
    if saved > best + LEAST:
        note = split if found_order.schedule.kinds & {"I", "W"} else ""
        yield Advice("schedule", f"schedule auto saves {saved:.0%} at the same memory{note}", saved)


def _fixed(now: Schedule) -> Iterator[Schedule]:
    """All other fixed schedules for the same stages on the same ranks, with the recomputes of ``now``."""
    for name in SCHEDULES:
        try:
            schedule = _like(name, now, now.num_microbatches)
        except ScheduleError:  # for other numbers of stages or micro-batches
            continue
        if schedule.trains and schedule.placement == now.placement and schedule.orders != now.orders:
            yield schedule


def _like(name: str, now: Schedule, m: int) -> Schedule:
    each, rest = divmod(now.num_stages, now.num_ranks)
    if rest:
        raise ScheduleError("some ranks have more stages than others")
    return with_recompute(build(name, now.num_ranks, m, each), _modes(now))


def _modes(schedule: Schedule) -> list[str]:
    """How each stage of a schedule recomputes."""
    again = {(a.stage, a.microbatch) for order in schedule.orders for a in order if a.kind == "R"}
    stages, last = range(schedule.num_stages), schedule.num_microbatches - 1
    some = {stage for stage, _ in again}
    return ["never" if s not in some else "always" if (s, last) in again else "except_last" for s in stages]


def _counted(costs: Costs, num_stages: int) -> Costs:
    """Where no stage is known to keep anything, micro-batches in flight are counted instead of bytes."""
    return costs if any(costs.of_stages("activation", num_stages)) else replace(costs, activation=1.0)


def _split_note(trace: Trace) -> str:
    return "" if "W" in trace.order.kinds else " (if a weight's gradient takes half of a backward)"


# ── micro-batches, cuts, edges, hosts ────────────────────────────────────────────────────────────────────────


def _microbatches(trace: Trace, base: Simulation) -> Iterator[Advice]:
    """The same mini-batch in twice as many micro-batches, each half as large: that keeps no more than now."""
    now = base.schedule
    if not now.trains:
        return
    m = 2 * now.num_microbatches
    try:
        schedule = _like(now.name, now, m)
    except ScheduleError:  # an order of one's own
        return
    if schedule.placement != now.placement:
        return
    halves = mapped(base.costs, now.num_stages, lambda numbers: [x / 2 for x in numbers])
    saved = _saved(base, simulate(schedule, halves, trace.edges).makespan)
    text = f"{m} micro-batches, not {m // 2}, save {saved:.0%} (if one of half the size takes half the time)"
    yield Advice("micro-batches", text, saved)


def _cut(cut: Repartition) -> Advice:
    return Advice("cut", f"{cut.text} saves {cut.saved:.0%} (if the layers of a stage cost alike)", cut.saved)


def _edges(trace: Trace, base: Simulation) -> Iterator[Advice]:
    """What the slowest messages cost: an upper bound of what a faster link would save."""
    costs, placement = base.costs, base.schedule.placement
    crossing = [(src, dst) for src, dst in trace.edges if placement[src] != placement[dst]]
    slowest = sorted(crossing, key=lambda edge: -costs.of_edge("latency", edge))[:_EDGES]
    for edge in (edge for edge in slowest if costs.of_edge("latency", edge)):
        latency = {other: costs.of_edge("latency", other) * (other != edge) for other in trace.edges}
        saved = _saved(base, simulate(base.schedule, replace(costs, latency=latency), trace.edges).makespan)
        takes = milliseconds(costs.of_edge("latency", edge))
        text = (
            f"messages from stage {edge[0]} to stage {edge[1]} and back take {takes} each: a faster link, or a cut "
            f"where less crosses, saves at most {saved:.0%}"
        )
        yield Advice("edge", text, saved, bound=True)


def _host(idle: Sequence[Idle]) -> Iterator[Advice]:
    """The share of a step in which the busiest host keeps its rank from working."""
    worst = max(idle, key=lambda rank: rank.host, default=None)
    if worst is not None and worst.total:
        saved = worst.host / worst.total
        text = (
            f"hosts need up to {saved:.0%} of a step between actions: fewer and larger micro-batches, fewer programs "
            "on the machine, or compiled stages save at most that"
        )
        yield Advice("host", text, saved, bound=True)
