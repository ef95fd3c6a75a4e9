"""What would make a step shorter, and by how much: each change is simulated with the trace's costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, ScheduleError
from penstock.profile.report.balance import Cut, better_cut, mapped
from penstock.profile.report.causes import Idle
from penstock.profile.report.slow import slow_ranks
from penstock.profile.trace.words import milliseconds
from penstock.schedule.auto import auto
from penstock.schedule.costs import Costs
from penstock.schedule.recompute import with_recompute
from penstock.schedule.registry import SCHEDULES, build
from penstock.schedule.schedule import Schedule
from penstock.schedule.simulate import Simulation, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.profile.trace.trace import Trace

__all__ = ["LEAST", "Advice", "advise"]

LEAST = 0.01
"""The share of a step that advice must save to be given."""

_MORE = "more memory"
_EDGES = 4  # of all edges, those that take longest
_SAME = 1 + 1e-9  # two sums of the same sizes
_LARGE = 50_000  # actions; for more of them a search takes too long to be worth it


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
    if "R" in base.schedule.kinds or sum(map(len, base.schedule.orders)) > _LARGE:
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


def _cut(cut: Cut) -> Advice:
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
