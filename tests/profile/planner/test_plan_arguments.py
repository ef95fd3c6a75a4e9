"""The arguments of ``ps.plan``: all forms in which they may be given, and errors for those it cannot use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.profile.costs import Crossing, LayerCosts, Link, ModelCosts, Profile, SharedParameters
from penstock.profile.planner.cuts import Segments
from penstock.profile.planner.plan import plan_costs
from penstock.profile.planner.search import Cluster

LAYERS = 6
X = torch.zeros(4, 8)


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))


def costs(*, seconds: float = 1.0, parameters: float = 10.0, activation: float = 1.0, **more: Any) -> ModelCosts:
    times, stays = (seconds,) * 4, (parameters, parameters, 2 * parameters)
    layers = tuple(LayerCosts(str(i), *times, activation, *stays) for i in range(LAYERS))
    return ModelCosts(layers, tuple(Crossing(i, i + 1, 1.0) for i in range(LAYERS - 1)), **more)


def planned(**how: Any) -> ps.PlanResult:
    return ps.plan(net(), **{"devices": 2, "batch": 8, "costs": costs(), "seconds": 0.1, **how})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"devices": "cpu"}, "devices='cpu' must be a number of ranks, or a list"),
        ({"devices": torch.device("cpu")}, "must be a number of ranks, or a list"),
        ({"devices": 2.0}, "devices=2.0 must be a number of ranks"),
        ({"devices": True}, "devices=True must be a number of ranks"),
        ({"devices": ["gpu"]}, "'gpu' is not a device"),
        ({"devices": [None]}, "None is not a device"),
        ({"devices": ["meta"]}, "device meta cannot run a stage"),
        ({"devices": ["cuda:77", "cuda:78"]}, "device cuda:77 is not there"),
        ({"memory": [1e6, 1e6, 1e6]}, "memory has 3 numbers, but there are 2 devices"),
        ({"speeds": 2.0}, "speeds=2.0 must be a list of numbers, one for each device"),
        ({"speeds": ["a", "b"]}, "speeds must be numbers above 0"),
        ({"speeds": [1, 2, 3]}, "speeds has 3 numbers, but there are 2 devices"),
        ({"speeds": [1, float("inf")]}, "speeds finite"),
        ({"seconds": "x"}, "seconds='x': expected a search time above 0"),
        ({"seconds": None}, "seconds=None: expected a search time above 0"),
        ({"seed": "a"}, "seed='a' must be a whole number"),
        ({"measure_seconds": -1}, "measure_seconds=-1 must be the measuring time"),
        ({"recompute": "always"}, "recompute='always' must be True"),
        ({"link": 1e-3}, r"link must be a Link\(latency, bandwidth\)"),
        ({"mesh": 3, "devices": None}, r"mesh must be ps.Mesh\(pipe=…\), got int"),
        ({"mesh": 3, "devices": None, "hardware": "h100"}, "leave out devices= and hardware="),
        ({"costs": {}}, "costs must be a Profile, ModelCosts or the name of their file, got dict"),
        ({"hardware": "h100"}, "give costs= or hardware=, not both"),
        ({"costs": None, "sample": X, "hardware": "h100", "devices": ["cpu"]}, "must be the number of devices"),
        ({"costs": None, "sample": X, "hardware": "h101"}, "did you mean 'h100'"),
    ],
)
def test_wrong_use_says_what_is_wrong(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ps.PlanError, match=message):
        planned(**how)


def test_what_is_wrong_is_said_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.profile.planner.plan.measure_costs", lambda *args, **how: pytest.fail("measured"))
    for how in ({"batch": 0}, {"memory": "lots"}, {"speeds": [1]}, {"microbatches": 0}, {"seconds": 0}):
        with pytest.raises(ps.PlanError):
            planned(costs=None, sample=X, **how)


def test_costs_of_another_model_are_told_by_the_layer_that_differs() -> None:
    layers = [*costs().layers[:2], LayerCosts("other", *(1.0,) * 4, 1, 1, 1, 1), *costs().layers[3:]]
    with pytest.raises(ps.PlanError, match="layer 2 is 'other' in the costs and '2' in the model"):
        planned(costs=ModelCosts(tuple(layers), costs().crossings))


# As ps.split takes it, and as a loader gives it.
def test_a_sample_may_come_with_targets() -> None:
    asked = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        asked.append(target.shape)
        return F.mse_loss(output, target)

    how: dict[str, Any] = {"costs": None, "sample": (X, X), "batch": None, "measure_seconds": 0}
    assert planned(**how).configuration.samples <= 4
    planned(**how, loss_fn=loss)
    assert X.shape in asked


# A pipeline of fewer ranks than there are devices took the first ones: with a slow device in front, a single rank was
# there, however fast the second one was.
def test_of_devices_that_differ_the_fastest_are_taken() -> None:
    slow = Link(latency=10.0)  # so that one rank is best
    answer = planned(devices=["cpu", "cpu"], speeds=[1.0, 4.0], costs=costs(link=slow), microbatches=1)
    assert answer.configuration.pipe == 1
    assert answer.seconds == pytest.approx(8 * LAYERS * 3 / 4)
    cluster = Cluster((1.0, 4.0, 4.0, 2.0), (9.0, 1.0, 2.0, 9.0))
    assert [cluster.fastest(count) for count in (1, 2, 3, 4)] == [[2], [1, 2], [1, 2, 3], [0, 1, 2, 3]]


# ── costs that cannot be ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: costs(seconds=1e300), "layer '0': forward is 1e.300: it must be a number up to 1e.30"),
        (lambda: costs(seconds=10**400), "it must be a number up to 1e.30"),
        (lambda: costs(kept_together=((0, 1, 5.0),)), "1 bytes of activation, but 5 bytes are kept together"),
        (lambda: costs(shared=(SharedParameters((0, 5), 11.0),)), "10 bytes of parameters, but 11 bytes are shared"),
    ],
)
def test_costs_that_cannot_be_name_the_layer(wrong: Any, message: str) -> None:
    with pytest.raises(ps.PlanError, match=message):
        wrong()


# Beyond the sizes that were measured each line goes on by itself: that of what two layers keep may rise above that of
# what one of them keeps, which was an error of the simulator's.
def test_what_is_kept_together_is_never_more_than_what_is_kept() -> None:
    small, large = costs(samples=1, activation=8.0), costs(samples=2, activation=8.0)
    pair = replace(small, kept_together=((0, 1, 1.0),)), replace(large, kept_together=((0, 1, 5.0),))
    assert Profile(pair).at(16).kept_together == ((0, 1, 8.0),)
    plan_costs(Profile(pair), batch=16, microbatches=1, grids=[(1, 2)], seconds=0.1)


# A frozen embedding that is tied has no gradients and no states. It was taken to have those of the mean layer, and a
# stage with both ends of the tie was said to need less than its parameters.
def test_a_tie_weighs_what_its_own_layers_do() -> None:
    frozen, trained = LayerCosts("e", 1, 1, 1, 1, 0, 100, 0, 0), LayerCosts("l", 1, 1, 1, 1, 0, 100, 100, 200)
    layers = (frozen, trained, LayerCosts("h", 1, 1, 1, 1, 0, 100, 0, 0))
    segments = Segments(ModelCosts(layers, (), shared=(SharedParameters((0, 2), 100),)))
    assert segments.static_bytes(0, 3) == 100 + 400


# ── memory that is too small ─────────────────────────────────────────────────────────────────────────────────────


# The error named the least memory of the configurations with the largest micro-batches only.
def test_the_least_memory_is_that_of_the_smallest_micro_batches() -> None:
    profile = Profile((costs(parameters=1.0, activation=1000.0),))
    how: dict[str, Any] = {"batch": 16, "grids": [(1, 2)], "recompute": False, "seconds": 0.1}
    with pytest.raises(ps.PlanError, match=r"\(2 ranks, 16 micro-batches of 1\)") as caught:
        plan_costs(profile, memory=500.0, **how)
    assert "smaller micro-batches" not in str(caught.value)
    assert "recompute" in str(caught.value)
    with pytest.raises(ps.PlanError, match="smaller micro-batches"):
        plan_costs(profile, memory=500.0, microbatches=2, **how)


# ── what was planned ─────────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_planned_is_not_said_again(tmp_path: Path) -> None:
    answer = planned()
    for option in ("microbatches", "microbatch_size", "schedule"):
        with pytest.raises(ps.PlanError, match=f"{option} is part of the plan"):
            answer.pipeline(F.mse_loss, **{option: 1})
    with pytest.raises(ps.PlanError, match=r"nowhere.json cannot be read as a plan"):
        ps.PlanResult.load(tmp_path / "nowhere.json")
    without = json.loads(answer.to_json())
    with pytest.raises(ps.PlanError, match=r"use ps.PlanResult.load"):
        ps.PlanResult.from_json(json.dumps(without)).pipeline(F.mse_loss)


@pytest.mark.parametrize(
    ("what", "value"),
    [("cuts", "x"), ("cuts", [1, 2]), ("cuts", [6]), ("memory", [1.0]), ("seconds", "x"), ("layers", ["a"])],
)
def test_what_was_saved_and_changed_is_not_read(what: str, value: object) -> None:
    data = json.loads(planned(microbatches=8).to_json())
    assert len(data["memory"]) == 2
    with pytest.raises(ps.PlanError, match="the text is not a saved PlanResult"):
        ps.PlanResult.from_json(json.dumps({**data, what: value}))
