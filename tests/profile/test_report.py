"""Content of reports: idle time by cause, peaks and edges."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import ScheduleError
from penstock.profile.report.findings import CAUSES, analyze, idle_times, memory_peak
from penstock.profile.trace.records import ActionRecord, RankRecord, StepRecord, WaitRecord
from penstock.schedule import SCHEDULES, Costs, build, simulate
from penstock.schedule.schedule import with_recompute
from tests.profile.test_trace import pipeline
from tests.profile.test_trace_files import example
from tests.support.models import batch, labels
from tests.support.simulated_trace import simulated_trace


def plan(*stages: list[str], parameters: list[int] | None = None) -> dict[str, Any]:
    sizes = parameters or [10] * len(stages)
    rows = [{"layers": names, "parameters": n, "bytes": 4 * n} for names, n in zip(stages, sizes, strict=True)]
    return {"penstock_plan": 1, "stages": rows, "edges": [], "ties": [], "devices": None, "ranks": None, "recipe": {}}


def traced(name: str, p: int, m: int, costs: Costs, **plans: Any) -> ps.Trace:
    return replace(simulated_trace(simulate(build(name, p, m), costs)), **plans)


def uncovered(actions: tuple[ActionRecord, ...], first: float, last: float) -> float:
    """Idle time counted another way: at the middles between all begins and ends."""
    marks = sorted({first, last, *(d.start for d in actions), *(d.end for d in actions)})
    pieces = [(a, b) for a, b in pairwise(marks) if b > a]
    return math.fsum(b - a for a, b in pieces if not any(d.start <= (a + b) / 2 < d.end for d in actions))


# ── why ranks are idle ───────────────────────────────────────────────────────────────────────────────────────


def test_causes_by_hand() -> None:
    """Rank 0 waits from 1.5 for 1B0, which ends at 4 and is there at 4.5; even stages would have it wait for 2.5."""
    trace = example()
    first, second = idle_times(trace, trace.steps[0])
    assert (first.total, first.busy) == (6.0, 2.5)
    assert first.causes == {"fill": 2.5, "drain": 0.0, "imbalance": 0.0, "communication": 0.5, "host": 0.5}
    assert (second.total, second.busy) == (6.0, 2.5)
    assert second.causes == {"fill": 1.5, "drain": 2.0, "imbalance": 0.0, "communication": 0.0, "host": 0.0}


def test_even_stages_have_no_imbalance() -> None:
    """A pipeline fills and drains however even it is: GPipe's first rank waits in the middle of a step."""
    for name in ("gpipe", "1f1b", "zb_h1", "interleaved"):
        trace = traced(name, 4, 8, Costs())
        for idle in idle_times(trace, trace.steps[0]):
            assert idle.imbalance == idle.communication == idle.host == 0.0
            assert idle.fill + idle.drain == pytest.approx(idle.idle)
    for modes in (["always"] * 4, ["never"] * 3 + ["always"]):
        again = simulated_trace(simulate(with_recompute(build("gpipe", 4, 8), modes), Costs()))
        assert all(idle.imbalance == 0.0 for idle in idle_times(again, again.steps[0]))
    gpipe = traced("gpipe", 3, 4, Costs())
    first, _, last = idle_times(gpipe, gpipe.steps[0])
    assert (first.fill, first.drain) == (6.0, 0.0)
    assert (last.fill, last.drain) == (2.0, 4.0)


def test_a_slow_stage_is_imbalance_and_a_slow_edge_communication() -> None:
    slow = traced("1f1b", 3, 6, Costs(f=(1.0, 1.0, 2.0), i=(1.0, 1.0, 2.0), w=(1.0, 1.0, 2.0)))
    times = idle_times(slow, slow.steps[0])
    assert times[0].imbalance > 8
    assert times[1].imbalance > 8
    assert times[2].imbalance == 0.0
    assert all(idle.communication == 0.0 for idle in times)
    # Each of 6 micro-batches goes 0 → 1 → 0; rank 0 waits for the last gradient's last half unit on its way.
    far = traced("gpipe", 2, 1, Costs(latency=0.5))
    assert [idle.communication for idle in idle_times(far, far.steps[0])] == [0.5, 0.0]
    assert idle_times(far, far.steps[0])[1].fill == 1.5


@pytest.mark.parametrize(
    ("waits", "imbalance", "communication", "host"),
    [
        ([WaitRecord(1, 1.5, 4.5), WaitRecord(1, 1.5, 4.0, "sent")], 0.0, 0.5, 0.5),  # at the same time
        ([WaitRecord(1, 1.0, 1.5, "sent"), WaitRecord(1, 1.5, 4.5)], 0.0, 1.0, 0.0),  # the first until a send is over
        ([WaitRecord(1, 0.5, 4.5)], 0.5, 0.5, 0.0),  # from before the end of 0F0
        ([], 0.0, 0.0, 3.5),
    ],
)
def test_waits_of_all_sorts(waits: list[WaitRecord], imbalance: float, communication: float, host: float) -> None:
    """Before 0B0, from 1 to 4.5, for 1B0, which ends at 4."""
    trace = example()
    first, second = trace.steps[0].parts
    other = replace(first, actions=(first.actions[0], replace(first.actions[1], waits=tuple(waits))))
    step = StepRecord(0, "step", (other, second))
    idle = idle_times(replace(trace, steps=(step,)), step)[0]
    assert (idle.imbalance, idle.communication, idle.host) == (imbalance, communication, host)
    assert (idle.fill, idle.idle) == (3.5 - imbalance - communication - host, 3.5)


COST = st.floats(0.01, 10)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_causes_add_up(data: st.DataObject) -> None:
    """Of any schedule with any costs, and of one whose actions begin late for no reason that a trace knows."""
    name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    p, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    try:
        schedule = build(name, p, m)
    except ScheduleError:
        return
    stages = schedule.num_stages
    per_stage = [tuple(data.draw(st.lists(COST, min_size=stages, max_size=stages))) for _ in range(3)]
    costs = Costs(*per_stage, latency=data.draw(st.floats(0, 3)))
    trace = simulated_trace(simulate(schedule, costs))
    step = trace.steps[0]
    late = data.draw(st.floats(0, 2))
    parts = [
        replace(part, actions=tuple(replace(d, start=d.start + late * (d.end - d.start) / 3) for d in part.actions))
        for part in step.parts
    ]
    for one in (step, replace(step, parts=tuple(parts))):
        again = replace(trace, steps=(one,))
        first = min(part.actions[0].start for part in one.parts)
        last = max(done.end for part in one.parts for done in part.actions)
        times = idle_times(again, one)
        assert len(times) == p
        for idle, part in zip(times, one.parts, strict=True):
            assert all(seconds >= -1e-9 for seconds in idle.causes.values())
            assert sum(idle.causes.values()) == pytest.approx(uncovered(part.actions, first, last), abs=1e-9)
            assert idle.busy == pytest.approx(part.busy, abs=1e-9)
        assert again.bubble == pytest.approx(sum(i.idle for i in times) / sum(i.total for i in times), abs=1e-9)
    assert all(idle.host == pytest.approx(0, abs=1e-9) for idle in idle_times(trace, step))
    dones = [(part.track, done) for part in step.parts for done in part.actions]
    assert all(schedule.placement[wait.peer] != rank for rank, done in dones for wait in done.waits)


def test_one_ranks_part_alone() -> None:
    trace = example()
    step = StepRecord(0, "step", trace.steps[0].parts[:1])
    alone = replace(trace, steps=(step,), missing="the others are gone")
    (idle,) = idle_times(alone, step)
    assert idle.causes == {"fill": 0.0, "drain": 0.0, "imbalance": 3.0, "communication": 0.0, "host": 0.5}
    findings = analyze(alone)
    assert findings.simulation is None
    assert findings.cut is None
    assert [advice.what for advice in findings.advice] == ["host"]


# ── what is kept, and what crosses ───────────────────────────────────────────────────────────────────────────


def test_peaks_and_edges_by_hand() -> None:
    trace = example()
    one = memory_peak(trace.steps[0].parts[0], trace.saved)
    assert one is not None
    assert (one.bytes, one.after, one.at, one.flight, one.saved, one.rest) == (100, "0F0", 1.0, {0: [0]}, 100, 0)
    findings = analyze(trace)
    (edge,) = findings.edges
    assert (edge.messages, edge.forward, edge.backward, edge.seconds) == (2, 64, 32, 0.5)
    assert edge.bandwidth == 128
    assert findings.bubble == pytest.approx(trace.bubble)
    assert sum(findings.causes.values()) == pytest.approx(findings.bubble)


def test_what_a_peak_holds_of_each_schedule() -> None:
    trace = traced("1f1b", 3, 6, Costs(activation=7.0))
    peaks = [memory_peak(part, trace.saved) for part in trace.steps[0].parts]
    assert [(one.bytes, one.flight) for one in peaks if one] == [(21, {0: [0, 1, 2]}), (14, {1: [0, 1]}), (7, {2: [0]})]
    for name in ("zb_h1", "zbv", "interleaved"):
        trace = traced(name, 3, 6, Costs(activation=7.0))
        assert all(
            one and one.saved == one.bytes for part in trace.steps[0].parts for one in [memory_peak(part, trace.saved)]
        )
    again = simulated_trace(simulate(with_recompute(build("gpipe", 2, 3), ["always"] * 2), Costs(activation=5.0)))
    assert [one.bytes for part in again.steps[0].parts for one in [memory_peak(part, again.saved)] if one] == [5, 5]
    turns = zip(("0F0", "0I0", "0W0", "0F1"), (10, 9, 3, 20), strict=True)
    split = tuple(ActionRecord(ps.Action.parse(name), 0.0, 1.0, memory=memory) for name, memory in turns)
    late = memory_peak(RankRecord(0, 0.0, 1.0, split), {0: 7})
    assert late is not None
    assert (late.flight, late.rest) == ({0: [1]}, 13)
    device = replace(trace.steps[0].parts[0], actions=(replace(trace.steps[0].parts[0].actions[0], memory=100),))
    one = memory_peak(device, trace.saved)
    assert one is not None
    assert (one.saved, one.rest) == (7, 93)
    assert memory_peak(RankRecord(0, 0.0, 1.0, (ActionRecord(ps.Action(0, "F", 0), 0.0, 1.0),)), {}) is None


# ── of what ran ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_real_run(schedule: str) -> None:
    with pipeline(4, schedule=schedule) as pipe, pipe.trace() as trace:
        for _ in range(3):
            pipe.step(batch(), labels())
    findings = analyze(trace)
    assert sorted(step.seconds for step in trace.steps)[1] == findings.step.seconds
    assert len(findings.idle) == len(trace.tracks) == len(findings.peaks)
    for idle in findings.idle:
        assert sum(idle.causes.values()) == pytest.approx(idle.idle)
        assert all(seconds >= -1e-9 for seconds in idle.causes.values())
    assert set(findings.causes) == set(CAUSES)
    assert findings.simulation is not None


def test_a_trace_without_steps() -> None:
    with pytest.raises(ps.PlanError, match="no complete step to report on"):
        analyze(ps.Trace(build("gpipe", 2, 2), ((0, 1),)))
