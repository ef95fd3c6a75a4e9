"""``pipe.trace()`` under a mesh: every rank gets what all did, on one clock, and none waits for one that failed."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.engine.recorder import AlignedClock, ClockOffset
from penstock.profile.trace import recording
from tests.profile.test_trace import check_consistent, orders
from tests.profile.test_trace_files import check_chrome, events_of
from tests.support.models import batch, gradients, labels, mlp
from tests.support.ranks import RankExited, Ranks, run_ranks


def pipeline(stages: int, data: int = 1, **options: Any) -> ps.Pipeline:
    plan = ps.split(mlp(stages), stages=stages)
    given = {"microbatches": 4, "mesh": ps.Mesh(data=data), **options}
    return ps.Pipeline(plan, nn.CrossEntropyLoss(), **given)


def traced(rank: int, stages: int, data: int, shift: float, options: dict[str, Any]) -> ps.Trace:
    """Three steps, of which the last two are recorded.

    Every rank's clock is ``shift`` seconds off the one before, and it begins its trace as much earlier, or seems to.
    """
    before = recording.clock
    early = [-round(rank * shift * 1e9)]

    def clock() -> int:
        return time.perf_counter_ns() + round(rank * shift * 1e9) + (early.pop() if early else 0)

    recording.clock = clock
    try:
        with pipeline(stages, data, **options) as pipe:
            with pipe.trace(steps=2, skip=1) as trace:
                for _ in range(3):
                    pipe.step(batch(), labels())
            assert tuple(map(tuple, orders(trace.steps[0])))[: pipe.mesh.pipe] == pipe.schedule.orders
            return trace
    finally:
        recording.clock = before


def check_report(trace: ps.Trace, folder: Path) -> None:
    """A page of it can be made, and the causes of idle time add up to the bubble of the step that it shows."""
    findings = trace.report(folder / "run.html")
    assert len(findings.idle) == len(trace.tracks)
    assert sum(findings.causes.values()) == pytest.approx(trace.step_bubble(findings.step))
    assert min(min(idle.causes.values()) for idle in findings.idle) >= -1e-9
    assert (folder / "run.html").stat().st_size > 10_000


@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"schedule": "1f1b", "dynamic": True}])
def test_every_rank_has_the_whole(four: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    traces = four.check(traced, 4, 1, 0.0, options)
    trace = traces[0]
    assert all(other == trace for other in traces)
    assert trace.missing is None
    assert [(t.rank, t.replica, t.place) for t in trace.tracks] == [(r, 0, r) for r in range(4)]
    assert [step.kind for step in trace.steps] == ["step"] * 2
    assert trace.saved.keys() == {0, 1, 2, 3}
    check_consistent(trace)
    check_chrome(trace, events_of(trace, tmp_path / "run.trace.json"))
    names = [[span.name for span in part.spans] for part in trace.steps[0].parts]
    assert all(row[0] == "announce" and row[-1] == "loss" for row in names)
    waits = [wait for part in trace.steps[0].parts for done in part.actions for wait in done.waits]
    assert {wait.what for wait in waits} == {"message", "sent"}
    rows = {row["action"]: row for row in trace.table() if row["step"] == 0}
    assert rows["0F0"]["sent"] == rows["1F0"]["received"] == rows["1B0"]["sent"] == rows["0B0"]["received"] == 32
    assert all(b == 32.0 for b in trace.costs().bytes.values())  # type: ignore[union-attr]
    assert trace.simulation().makespan > 0
    check_report(trace, tmp_path)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv", "looped_bfs", "dualpipev"])
def test_several_stages_on_a_rank(two: Ranks, schedule: str) -> None:
    traces = two.check(traced, 4, 1, 0.0, {"schedule": schedule})
    assert traces[0] == traces[1]
    assert traces[0].order == traces[0].schedule
    check_consistent(traces[0])


def test_replicas_have_tracks_of_their_own(four: Ranks, tmp_path: Path) -> None:
    traces = four.check(traced, 2, 2, 9.0, {"schedule": "gpipe"})
    trace = traces[0]
    assert all(other == trace for other in traces)
    assert [(t.rank, t.replica, t.place) for t in trace.tracks] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert "2 replicas" in str(trace)
    assert all("reduce" in [span.name for span in part.spans] for part in trace.steps[0].parts)
    events = events_of(trace, tmp_path / "run.trace.json")
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"replica 0", "replica 1"}
    check_causal(trace)
    check_report(trace, tmp_path)
    begins = [part.begin for part in trace.steps[0].parts]
    assert max(begins) - min(begins) < 3.0, "they begin a step together, and their clocks are 9 seconds apart"


@pytest.mark.parametrize("shift", [0.0, 3.0, -3.0])
def test_clocks_are_aligned(two: Ranks, shift: float) -> None:
    """Processes of one machine have one clock. Where it is made to look different, it comes out as one again."""
    trace, other = two.check(traced, 2, 1, shift, {"schedule": "gpipe"})
    assert trace == other
    check_causal(trace)
    for step in trace.steps:
        first, second = step.parts
        assert abs(first.begin - second.begin) < 1.0, "they begin a step together, and their clocks are 3 seconds apart"


def check_causal(trace: ps.Trace) -> None:
    """Nothing is taken before it is sent, as far as the clocks can tell."""
    error = 2 * sum(track.clock_error for track in trace.tracks) + 1e-6
    found = [crossing for step in trace.steps for crossing in trace.messages(step)]
    assert found
    for crossing in found:
        assert crossing.target.start >= crossing.source.end - error
    for crossing in found:
        assert crossing.seconds is None or crossing.seconds < 1.0


def test_a_clock_that_drifts() -> None:
    aligned = AlignedClock(1_000, ClockOffset(500.0, 10.0))
    assert aligned(2_000) == 2_500 / 1e9
    aligned.end = (3_000, ClockOffset(700.0, 30.0))
    assert [aligned(at) for at in (1_000, 2_000, 3_000)] == [1_500 / 1e9, 2_600 / 1e9, 3_700 / 1e9]
    assert aligned.error == 30 / 1e9


def stepped(rank: int, traced: bool) -> Any:
    with pipeline(2, schedule="zb_h1") as pipe:
        with pipe.trace() if traced else contextlib.nullcontext():
            losses = [pipe.step(batch(), labels()).loss for _ in range(2)]
        return losses, gradients(pipe.named_parameters())


def test_numbers_are_those_of_a_step_without_a_trace(two: Ranks) -> None:
    for plain, traced in zip(two.check(stepped, False), two.check(stepped, True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain[0], traced[0], strict=True))
        assert plain[1].keys() == traced[1].keys()
        assert all(torch.equal(grad, traced[1][name]) for name, grad in plain[1].items())


def evaluated(rank: int) -> ps.Trace:
    with pipeline(2) as pipe, pipe.trace() as trace:
        with torch.no_grad():
            pipe(batch())
        pipe.evaluate(batch(), labels())
        output = pipe.forward(batch())
        if output is not None:
            output.sum().backward()
        for _ in pipe.stream([batch(), batch()]):
            pass
    return trace


def test_other_calls(two: Ranks) -> None:
    trace, other = two.check(evaluated)
    assert trace == other
    kinds = ["evaluate", "evaluate", "call", "backward", "evaluate", "evaluate"]
    assert [step.kind for step in trace.steps] == kinds
    assert {a.kind for order in orders(trace.steps[2]) for a in order} == {"F"}
    assert {a.kind for order in orders(trace.steps[3]) for a in order} == {"B"}
    check_consistent(trace)


class Accident(RuntimeError):
    pass


def one_leaves(rank: int, caught: bool) -> Any:
    """Rank 1 leaves its trace by an error, and catches it, and both go on."""
    with pipeline(2) as pipe:
        try:
            with pipe.trace() as trace:
                pipe.step(batch(), labels())
                if rank == 1:
                    raise Accident("here")
        except Accident:
            if not caught:
                raise
        pipe.step(batch(), labels())
        with pipe.trace() as again:
            pipe.step(batch(), labels())
            time.sleep(0.3 * rank)
        return trace, again


def test_a_rank_that_leaves_its_trace_by_an_error_is_not_waited_for(two: Ranks) -> None:
    (first, again), (second, other) = two.check(one_leaves, True)
    assert first.missing == "rank 1 left the trace by an error"
    assert second.missing == "rank 1 left the trace by Accident: here"
    for rank, trace in enumerate((first, second)):
        assert [track.rank for track in trace.tracks] == [rank]
        assert len(trace.steps) == 1
        assert len(trace.table()) == 8
        assert "records of one rank only: rank 1 left the trace" in str(trace)
        with pytest.raises(ps.PlanError, match=r"no forward of stages \[\d\], because it has the records of one"):
            trace.costs()
    assert again == other
    assert again.missing is None


def test_a_rank_that_leaves_the_pipeline_by_an_error() -> None:
    first, second = run_ranks(one_leaves, 2, False)
    assert isinstance(second, Accident)
    assert isinstance(first, ps.PipelineError)
    assert "here" in str(first)


class FailsOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == 7:
            raise RuntimeError("an accident")
        return self.layer(x)


def step_fails(rank: int) -> Any:
    plan = ps.split(nn.Sequential(nn.Linear(4, 4), FailsOnce()), stages=2)
    error = None
    options: dict[str, Any] = {"microbatches": 4, "schedule": "gpipe", "dynamic": True}
    with ps.Pipeline(plan, nn.CrossEntropyLoss(), mesh=ps.Mesh(), **options) as pipe:
        try:
            with pipe.trace() as trace:
                pipe.step(batch(), labels())
                pipe.step(batch(), labels())
        except ps.PipelineError as raised:
            error = str(raised)
    return error, trace


def test_a_step_that_fails_in_it(two: Ranks) -> None:
    for rank, (error, trace) in enumerate(two.check(step_fails)):
        assert "an accident" in error
        assert [step.failed for step in trace.steps] == [False, True]
        assert f"rank {rank} left the trace by PipelineError" in trace.missing
        assert len(trace.table()) >= 8
    assert [str(d.action) for d in trace.steps[1].parts[0].actions] == ["1F0", "1F1"]


def one_is_gone(rank: int) -> Any:
    with contextlib.suppress(ps.PipelineError), pipeline(2) as pipe, pipe.trace() as trace:
        pipe.step(batch(), labels())
        if rank == 1:
            os._exit(3)
    return pipe._executor.ended, trace


def test_a_rank_that_dies_in_it() -> None:
    (error, trace), second = run_ranks(one_is_gone, 2)
    assert isinstance(second, RankExited)
    assert "rank 1" in str(error)
    assert trace.missing == "the records of other ranks could not be collected"
    assert len(trace.table()) == 8


def closed_in_it(rank: int) -> Any:
    pipe = pipeline(2)
    with pipe.trace() as trace:
        pipe.step(batch(), labels())
        pipe.close()
    return trace


def test_a_pipeline_that_is_closed_in_it(two: Ranks) -> None:
    for trace in two.check(closed_in_it):
        assert trace.missing == "the pipeline was closed in the trace"
        assert len(trace.steps) == 1


def in_tensor_parallel(rank: int) -> ps.Trace:
    plan = ps.split(mlp(2), stages=2)
    options: dict[str, Any] = {"mesh": ps.Mesh(pipe=2, tensor=2), "parallelize": lambda stage, mesh: None}
    with ps.Pipeline(plan, nn.CrossEntropyLoss(), microbatches=2, **options) as pipe:
        with pipe.trace(steps=1, skip=1) as trace:
            pipe.step(batch(), labels())
            pipe.step(batch(), labels())
        return trace


def test_ranks_that_share_a_stage(four: Ranks) -> None:
    traces = four.check(in_tensor_parallel)
    assert all(other == traces[0] for other in traces)
    places = [(t.rank, t.replica, t.place) for t in traces[0].tracks]
    assert places == [(0, 0, 0), (2, 0, 1), (1, 1, 0), (3, 1, 1)]
    check_causal(traces[0])
