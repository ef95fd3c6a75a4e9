"""Comparison of predicted and traced times: the source of the prediction, its validity, and its output."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.cli import main
from penstock.profile import links
from penstock.profile.costs import Crossing, LayerCosts, ModelCosts, Profile
from penstock.schedule import Costs, build, simulate
from penstock.schedule.simulate import Prediction
from tests.support.models import batch, labels, mlp
from tests.support.ranks import Ranks
from tests.support.simulated_trace import simulated_trace
from tests.train.test_bubble import UNIT, Sleeper


def sleepers(stages: int = 2) -> tuple[nn.Sequential, Profile]:
    """A model that sleeps, and what it costs."""
    layers = tuple(
        LayerCosts(f"{s}", UNIT, UNIT, UNIT, UNIT, 16.0, 4.0, 4.0, 8.0, backward=2 * UNIT) for s in range(stages)
    )
    crossings = tuple(Crossing(s, s + 1, 4.0) for s in range(stages - 1))
    return nn.Sequential(*(Sleeper() for _ in range(stages))), Profile((ModelCosts(layers, crossings, samples=1),))


def planned(stages: int = 2, **options: Any) -> ps.PlanResult:
    model, costs = sleepers(stages)
    given = {"devices": stages, "batch": 4, "microbatches": 4, "costs": costs, "seconds": 0.3, **options}
    return ps.plan(model, torch.ones(4, 1), **given)


@pytest.mark.slow
def test_a_plan_says_what_a_step_takes_and_a_trace_whether_it_did(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = planned()
    with plan.pipeline(nn.MSELoss()) as pipe:
        capsys.readouterr()
        with pipe.trace(skip=1) as trace:
            for _ in range(4):
                pipe.step(torch.ones(4, 1), torch.ones(4, 1))
    said = capsys.readouterr().out
    assert trace.prediction == trace.predicted == plan.prediction
    saved = tuple(simulate(plan.schedule, Costs(activation=16.0)).peak_memory)
    assert plan.memory == tuple(16.0 + size for size in saved)  # a parameter, its gradient, two states
    assert plan.prediction == Prediction(plan.seconds, "plan", plan.memory, saved, 1)
    assert trace.seconds == pytest.approx(plan.seconds, rel=0.5)
    assert said == f"{trace.comparison}\n"
    assert "ms measured, " in said
    assert "predicted by the plan (" in said
    assert "saved for backwards " in said
    assert said.strip().partition(" measured, ")[2] in str(trace)
    assert said.strip() in repr(trace)
    trace.save(tmp_path / "run.json")
    assert ps.Trace.load(tmp_path / "run.json") == trace
    assert main(["report", str(tmp_path / "run.json")]) == 0
    assert said in capsys.readouterr().out
    assert "predicted by the plan (" in (tmp_path / "run.html").read_text()


@pytest.mark.slow
def test_it_holds_for_mini_batches_as_they_were_planned(capsys: pytest.CaptureFixture[str]) -> None:
    with planned().pipeline(nn.MSELoss()) as pipe:
        for samples, by in ((4, "plan"), (3, "trace"), (8, "trace"), (4, "plan")):
            with pipe.trace() as trace:
                pipe.step(torch.ones(samples, 1), torch.ones(samples, 1))
            assert trace.predicted is not None
            assert trace.predicted.by == by, samples
    lines = capsys.readouterr().out.splitlines()
    assert ["by the plan" in line for line in lines] == [True, False, False, True]
    assert ["simulated with the times of this trace" in line for line in lines] == [False, True, True, False]


def pipeline(stages: int = 4, **options: Any) -> ps.Pipeline:
    given = {"microbatches": 4, **options}
    return ps.Pipeline(ps.split(mlp(stages), stages=stages), nn.CrossEntropyLoss(), **given)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "gpipe", "auto", "sharded"])
def test_without_a_plan_the_trace_is_simulated(schedule: str) -> None:
    with pipeline(schedule=schedule) as pipe, pipe.trace() as trace:
        pipe.step(batch(), labels())
        pipe.step(batch(), labels())
    assert trace.prediction is None
    assert trace.predicted == Prediction(trace.simulation().makespan, "trace")
    assert "saved for" not in str(trace.comparison)  # what the simulator keeps is counted in the same way


def test_costs_predict_too_and_so_does_replan(capsys: pytest.CaptureFixture[str]) -> None:
    costs = Costs(f=0.25, i=0.25, w=0.25, activation=2048.0)
    with pipeline(schedule=costs) as pipe:
        with pipe.trace() as trace:
            pipe.step(batch(), labels())
        found = simulate(pipe.schedule, costs, trace.edges)
        assert trace.predicted == Prediction(found.makespan, "costs", saved=tuple(found.peak_memory))
        again = replace(costs, f=0.5, activation=1.0)
        pipe.replan(again)
        with pipe.trace() as trace:
            pipe.step(batch(), labels())
        assert trace.predicted == Prediction(simulate(pipe.schedule, again, trace.edges).makespan, "replan")
    first, second = capsys.readouterr().out.splitlines()
    assert "predicted from the pipeline's costs" in first
    assert " KiB predicted on rank " in first
    assert "predicted by replan" in second
    assert "saved" not in second  # nobody said how many bytes


def test_who_is_told_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pipeline() as pipe:
        with pipe.trace(quiet=True) as trace:
            pipe.step(batch(), labels())
        assert trace.comparison is not None
        with pipe.trace() as trace:
            pipe.evaluate(batch(), labels())
        assert trace.predicted is None
        with pipe.trace() as trace:
            pipe(batch()).sum().backward()
        assert trace.predicted is None
        with pipe.trace() as trace:
            pass
        assert trace.predicted is None
        with contextlib.suppress(ZeroDivisionError), pipe.trace() as trace:
            pipe.step(batch(), labels())
            raise ZeroDivisionError
        assert trace.predicted is not None
    assert capsys.readouterr().out == ""


def test_in_words() -> None:
    trace = simulated_trace(simulate(build("1f1b", 2, 2), Costs(f=1.0, b=2.0, activation=1024.0)))
    assert trace.seconds == 9.0
    for seconds, words in ((9.0, "the same"), (4.5, "50.0% less"), (18.0, "100.0% more")):
        trace.prediction = Prediction(seconds, "plan", (1.0, 1.0), (3072.0, 1024.0))
        assert trace.comparison == (
            f"step 9.00 s measured, {seconds:.2f} s predicted by the plan ({words}); "
            "saved for backwards 2.00 KiB measured, 3.00 KiB predicted on rank 0 (50.0% more)"
        )
    trace.memory = "allocated"
    trace.prediction = Prediction(9.0, "plan", (1024.0, 1.0), (1.0, 1.0))
    assert "; memory 2.00 KiB measured, 1.00 KiB predicted on rank 0 (50.0% less)" in str(trace.comparison)
    trace.prediction = Prediction(9.0, "plan", None, (1.0, 1.0))
    assert ";" not in str(trace.comparison)
    trace.missing = "rank 1 left it"
    assert trace.comparison is None


def test_files_of_before_and_files_that_are_none(tmp_path: Path) -> None:
    trace = simulated_trace(simulate(build("1f1b", 2, 2), Costs()))
    trace.prediction = Prediction(1.0, "costs")
    data = trace.to_data()
    assert ps.Trace.from_data(json.loads(json.dumps(data))).prediction == trace.prediction
    before = {key: value for key, value in data.items() if key != "prediction"}
    assert ps.Trace.from_data(before).prediction is None
    (tmp_path / "run.json").write_text(json.dumps({**data, "prediction": {**data["prediction"], "by": "hearsay"}}))
    with pytest.raises(ps.PlanError, match="a prediction by 'hearsay'"):
        ps.Trace.load(tmp_path / "run.json")


def in_processes(rank: int) -> tuple[str, str | None, Any]:
    said = io.StringIO()
    with mock.patch.object(links, "ROUNDS", 8):  # not as exact as by default
        plan = planned(2, devices=None, mesh=ps.Mesh(pipe=2))
    pipe = plan.pipeline(nn.MSELoss(), mesh=ps.Mesh(pipe=2))
    with contextlib.redirect_stdout(said), pipe, pipe.trace(skip=1) as trace:
        for _ in range(3):
            pipe.step(torch.ones(4, 1), torch.ones(4, 1))
    return said.getvalue(), trace.comparison, trace.predicted


def test_under_a_mesh_all_know_and_the_first_rank_says(two: Ranks) -> None:
    (said, first, predicted), (silence, second, same) = two.check(in_processes)
    assert predicted == same
    assert predicted.by == "plan"
    assert first == second
    assert said == f"{first}\n"
    assert silence == ""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_threads_that_share_a_gpu_have_no_memory_of_their_own() -> None:
    plan = planned(2, devices=["cuda:0", "cuda:0"])
    with plan.pipeline(nn.MSELoss()) as pipe, pipe.trace() as trace:
        pipe.step(torch.ones(4, 1), torch.ones(4, 1))
    assert trace.predicted is not None
    assert trace.predicted.memory is None
    assert "memory" not in str(trace.comparison)
