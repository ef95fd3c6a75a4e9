"""Advice: what each change saves is what the simulator says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import penstock as ps
from penstock.profile.report.findings import MIN_SAVING, Advice, analyze, better_cut, recut
from penstock.profile.trace.records import StepRecord, Track
from penstock.schedule import Costs, auto, build, simulate
from penstock.schedule.schedule import with_recompute
from tests.profile.test_report import plan, traced
from tests.profile.test_trace import pipeline
from tests.profile.test_trace_files import example
from tests.support.models import batch
from tests.support.simulated_trace import simulated_trace


def found(trace: ps.Trace, what: str) -> list[Advice]:
    return [advice for advice in analyze(trace).advice if advice.what == what]


@pytest.mark.slow
def test_schedules_save_what_the_simulator_says() -> None:
    costs = Costs(f=(1.0, 1.5, 1.0, 1.0), latency=0.05, activation=10.0)
    trace = traced("1f1b", 4, 8, costs)
    base = trace.simulation()
    gain = {name: 1 - simulate(build(name, 4, 8), base.costs).makespan / base.makespan for name in ("zb_h1", "zb_h2")}
    best = auto(base.costs, base.schedule.placement, 8, cap=max(base.peak_memory), edges=trace.edges).makespan
    assert [advice.text.split()[1] for advice in found(trace, "schedule")] == ["auto", "zb_h1"]
    texts = {advice.text.split()[1]: advice for advice in analyze(trace).advice if advice.text.startswith("schedule")}
    assert set(texts) == {"zb_h1", "zb_h2", "auto"}
    assert texts["zb_h1"].saved == pytest.approx(gain["zb_h1"])
    assert texts["zb_h2"].saved == pytest.approx(gain["zb_h2"])
    assert texts["auto"].saved == pytest.approx(1 - best / base.makespan, abs=0.02)
    assert f"saves {gain['zb_h1']:.0%} at the same memory (if a weight gradient" in texts["zb_h1"].text
    assert "with 1.8 times the memory" in texts["zb_h2"].text
    assert [advice.what for advice in analyze(trace).advice] == ["schedule", "schedule", "micro-batches", "more memory"]


def test_a_search_that_finds_next_to_nothing_is_not_told_of() -> None:
    trace = traced("1f1b", 4, 8, Costs())
    assert [advice.text.split()[1] for advice in found(trace, "schedule")] == ["zb_h1"]


def test_memory_that_is_not_known_is_counted_in_micro_batches() -> None:
    trace = replace(traced("1f1b", 4, 8, Costs(f=(1.0, 1.5, 1.0, 1.0), latency=0.05)), saved={})
    assert [advice.text.split()[1] for advice in found(trace, "schedule")] == ["auto", "zb_h1"]
    assert [advice.text.split()[1] for advice in found(trace, "more memory")] == ["zb_h2"]


def test_recomputes_stay_in_other_schedules() -> None:
    modes = ["always", "except_last", "never"]
    schedule = with_recompute(build("gpipe", 3, 6), modes)
    trace = simulated_trace(simulate(schedule, Costs(activation=10.0)))
    base = trace.simulation()
    texts = {advice.text.split()[1]: advice.saved for advice in found(trace, "schedule")}
    for name, saved in texts.items():
        other = simulate(with_recompute(build(name, 3, 6), modes), base.costs)
        assert saved == pytest.approx(1 - other.makespan / base.makespan)
    assert texts


def test_more_microbatches() -> None:
    trace = traced("gpipe", 4, 4, Costs(activation=10.0))
    (advice,) = found(trace, "micro-batches")
    # (m + 3) / m of the work: 7 quarters against 11 eighths.
    assert advice.saved == pytest.approx(1 - (11 / 8) / (7 / 4))
    assert advice.text.startswith("8 micro-batches, not 4, save 21%")
    own = replace(trace.schedule, name="my own")
    assert not found(replace(trace, schedule=own), "micro-batches")


def test_a_layer_moves() -> None:
    """Stages of 5 and 3 even layers: one to the right, and both have 4."""
    costs = Costs(f=(5.0, 3.0), i=(5.0, 3.0), w=(5.0, 3.0), activation=(50.0, 30.0))
    trace = traced("1f1b", 2, 8, costs, plan=plan(list("abcde"), list("fgh")))
    base = trace.simulation()
    cut = better_cut(trace, base)
    assert cut is not None
    assert (cut.before, cut.after, cut.text) == ((5, 3), (4, 4), "a cut into stages of 4, 4 layers, not 5, 3,")
    even = simulate(base.schedule, Costs(f=4.0, i=4.0, w=4.0), trace.edges)
    assert cut.saved == pytest.approx(1 - even.makespan / base.makespan)
    (advice,) = found(trace, "cut")
    assert advice.text == f"{cut.text} saves {cut.saved:.0%} (if the layers of a stage cost alike)"
    assert cut.costs.of_stages("activation", 2) == [40.0, 40.0]
    assert better_cut(replace(trace, plan={}), base) is None
    assert better_cut(replace(trace, plan=plan(["a"], ["b"])), base) is None


def test_several_layers_move() -> None:
    costs = Costs(f=(6.0, 2.0, 1.0), i=(6.0, 2.0, 1.0), w=(6.0, 2.0, 1.0), activation=(6.0, 2.0, 1.0))
    trace = traced("gpipe", 3, 8, costs, plan=plan(list("abcdef"), list("gh"), list("i")))
    (advice,) = found(trace, "cut")
    assert advice.text.startswith("a cut into stages of 3, 3, 3 layers, not 6, 2, 1, saves ")


def test_no_cut_that_needs_more_memory() -> None:
    """The second stage is light in time and heavy in what it keeps."""
    costs = Costs(f=(5.0, 3.0), i=(5.0, 3.0), w=(5.0, 3.0), activation=(1.0, 90.0))
    trace = traced("gpipe", 2, 8, costs, plan=plan(list("abcde"), list("fgh")))
    assert better_cut(trace, trace.simulation()) is None


def test_recut_keeps_the_sum() -> None:
    costs = recut(Costs(f=(6.0, 3.0), activation=(4.0, 9.0)), (2, 3), (4, 1))
    assert costs.f == (8.0, 1.0)
    assert costs.activation == (10.0, 3.0)


def test_a_slow_rank_of_the_same_work() -> None:
    costs = Costs(f=(1.0, 1.5, 1.0), i=(1.0, 1.5, 1.0), w=(1.0, 1.5, 1.0))
    trace = traced("1f1b", 3, 6, costs, plan=plan(["a"], ["b"], ["c"]))
    (advice,) = found(trace, "slow rank")
    even = simulate(build("1f1b", 3, 6), Costs())
    assert advice.saved == pytest.approx(1 - even.makespan / trace.simulation().makespan)
    assert advice.text.startswith("rank 1 takes 1.50 times as long as others")
    other = plan(["a"], ["b"], ["c"], parameters=[10, 15, 10])
    assert not found(replace(trace, plan=other), "slow rank")  # it has more to do
    assert not found(replace(trace, plan={}), "slow rank")


def test_a_slow_rank_of_a_replica() -> None:
    fast, slow = (
        simulated_trace(simulate(build("1f1b", 2, 4), Costs(f=(1.0, f), i=(1.0, f), w=(1.0, f)))) for f in (1.0, 2.0)
    )
    parts = [*fast.steps[0].parts]
    parts += [replace(part, track=part.track + 2) for part in slow.steps[0].parts]
    tracks = tuple(Track(2 * replica + rank, replica, rank, "cpu") for replica in (0, 1) for rank in (0, 1))
    trace = replace(fast, tracks=tracks, steps=(StepRecord(0, "step", tuple(parts)),))
    (advice,) = found(trace, "slow rank")
    assert advice.text.startswith("rank 3 takes 2.00 times as long")
    wanted = 1 - fast.simulation().makespan / slow.simulation().makespan
    assert advice.saved == pytest.approx(wanted)


def test_ranks_that_share_a_gpu_are_not_slow_by_themselves() -> None:
    costs = Costs(f=(1.0, 1.5, 1.0), i=(1.0, 1.5, 1.0), w=(1.0, 1.5, 1.0))
    trace = traced("1f1b", 3, 6, costs, plan=plan(["a"], ["b"], ["c"]))
    for gpus, shares in ((["x", "x", "y"], [[0, 1]]), (["x", "y", "z"], []), (["", "", ""], [])):
        tracks = tuple(replace(track, gpu=gpu) for track, gpu in zip(trace.tracks, gpus, strict=True))
        on_gpus = ps.Trace(**{**vars(trace), "tracks": tracks})
        assert on_gpus.shared_gpus == shares
        assert bool(found(on_gpus, "slow rank")) == (not shares)
        assert ("ranks 0, 1 share a GPU" in str(on_gpus)) == bool(shares)
        assert ps.Trace.from_data(on_gpus.to_data()).shared_gpus == shares


def test_edges_and_hosts_are_bounds() -> None:
    trace = traced("gpipe", 3, 2, Costs(latency={(0, 1): 4.0, (1, 2): 0.0}))
    (advice,) = found(trace, "edge")
    assert advice.bound
    without = simulate(build("gpipe", 3, 2), Costs()).makespan
    assert advice.saved == pytest.approx(1 - without / trace.simulation().makespan)
    assert advice.text.startswith("messages from stage 0 to stage 1 and back take 4.00 s each")
    host = [one for one in analyze(example()).advice if one.what == "host"]
    assert [(one.saved, one.bound) for one in host] == [(pytest.approx(0.5 / 6), True)]
    assert [one.bound for one in analyze(example()).advice] == sorted(one.bound for one in analyze(example()).advice)


def test_nothing_to_say() -> None:
    trace = traced("1f1b", 1, 4, Costs())
    assert analyze(trace).advice == []
    assert analyze(trace).best == f"no change was found that saves {MIN_SAVING:.0%} or more"


def test_a_forward_has_no_schedule_to_change() -> None:
    with pipeline(3) as pipe, pipe.trace() as trace, torch.no_grad():
        pipe(batch())
    findings = analyze(trace)
    assert findings.step.kind == "evaluate"
    assert not [advice for advice in findings.advice if advice.what in ("schedule", "micro-batches")]
