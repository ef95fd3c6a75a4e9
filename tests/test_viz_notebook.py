"""HTML of plans, schedules, simulations and traces in notebooks: well-formed, escaped and of limited size."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.profile.planner.result import Candidate, Configuration, Rejection
from penstock.schedule import SCHEDULES, Costs, build, from_text, simulate
from penstock.split.plan import Edge, Plan, StageSpec, Tie

SVG = "{http://www.w3.org/2000/svg}"
HTML_TEXT = "<script>alert('1')</script>&\x00\"]]>"
LARGEST = 1_200_000  # characters of HTML


def tree(html: str | None) -> ElementTree.Element:
    """The parsed HTML, which must be well-formed and contain no script."""
    assert html is not None
    assert len(html) < LARGEST
    root = ElementTree.fromstring(html)
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]
    return root


def text(root: ElementTree.Element) -> str:
    return " ".join(" ".join(root.itertext()).split())


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = ps.cut(self.first(x))
        late = ps.cut(self.second(early))
        return self.third(early + late)


# ── schedules ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str) -> None:
    schedule = build(name, 4, 8)
    picture = tree(schedule._repr_html_()).find(f"{SVG}svg")
    assert picture is not None
    tips = [element.text for element in picture.iter(f"{SVG}title")]
    assert {str(action) for order in schedule.orders for action in order} <= set(tips)


def test_names_are_escaped() -> None:
    schedule = replace(build("1f1b", 2, 2), name=HTML_TEXT)
    for page in (schedule._repr_html_(), simulate(schedule)._repr_html_()):
        assert "<script>alert('1')</script>&" in text(tree(page))
    large = replace(build("1f1b", 100, 100), name=HTML_TEXT)
    assert "<script>alert('1')</script>&" in text(tree(large._repr_html_()))


def test_invalid_schedule_shows_the_reason() -> None:
    """A notebook shows the reason instead of a traceback."""
    schedule = from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    assert "deadlock: rank 0 waits at 0B0" in text(tree(schedule._repr_html_()))
    assert "is empty" not in text(tree(replace(schedule, name=HTML_TEXT, orders=((), ()))._repr_html_()))


@pytest.mark.slow
def test_many_stages_and_micro_batches() -> None:
    schedule = build("1f1b", 200, 1000)
    start = time.monotonic()
    page = tree(schedule._repr_html_())
    assert time.monotonic() - start < 5  # it is not simulated
    assert text(page) == ("1f1b: 200 ranks, 200 stages, 1000 micro-batches 400,000 actions: too many for a picture")
    assert len(ElementTree.tostring(page)) < 1000
    for ranks, microbatches in ((6, 4000), (60, 50)):  # the most that is drawn
        drawn = build("1f1b", ranks, microbatches)
        assert tree(drawn._repr_html_()).find(f"{SVG}svg") is not None
        assert tree(build("1f1b", ranks + 1, microbatches)._repr_html_()).find(f"{SVG}svg") is None


def test_simulations() -> None:
    simulation = simulate(build("zbv", 2, 4))
    page = tree(simulation._repr_html_())
    assert page.find(f"{SVG}svg") is not None
    assert "rank stages busy idle in flight activations deferred W 0 0 3 " in text(page)
    assert text(page).endswith(f"simulated time {simulation.makespan:g}")
    large = simulate(build("1f1b", 70, 50))
    assert f"bubble {large.bubble:.1%}" in text(tree(large._repr_html_()))


# ── traces ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_traces() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = ps.Pipeline(ps.split(model, stages=2), nn.MSELoss(), microbatches=2, devices=["cpu"] * 2)
    with pipe, pipe.trace() as trace:
        empty = tree(trace._repr_html_())
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))
    page = tree(trace._repr_html_())
    assert "trace of 1 step: 1f1b, 2 stages on 2 ranks, 2 micro-batches step " in text(page)
    tips = {element.text for element in page.iter(f"{SVG}title")}
    assert {"0F0", "0F1", "0B0", "0B1", "1F0", "1F1", "1B0", "1B1"} <= tips
    assert "no complete step" in text(empty)  # not available while the trace is recorded
    assert empty.find(f"{SVG}svg") is None
    evil = replace(trace, schedule=replace(trace.schedule, name=HTML_TEXT))
    assert "<script>alert('1')</script>&" in text(tree(evil._repr_html_()))


# ── planner results ────────────────────────────────────────────────────────────────────────────────────────────────


def plan_result(layer: str = "c", stages: int = 3, microbatches: int = 4) -> ps.PlanResult:
    """A first stage of two layers, then stages of one layer; every message takes a quarter of a second."""
    schedule = build("1f1b", stages, microbatches)
    names = ("a", "b", layer, *(f"layer{i}" for i in range(3, stages + 1)))
    edges = {(i, i + 1): 1.0 for i in range(stages - 1)}
    costs = Costs((2.0,) + (1.0,) * (stages - 1), 1.0, 1.0, latency=0.25, bytes=edges)
    simulation = simulate(schedule, costs, tuple(edges))
    memory = tuple(2.0**20 * (stages - rank) for rank in range(stages))
    configuration = Configuration(1, stages, "straight", 1, 8, microbatches)
    cuts = tuple(range(2, stages + 2))
    best = Candidate(configuration, cuts, schedule, simulation.makespan, 20.0, memory, simulation.bubble, costs)
    others = tuple(Rejection(replace(configuration, samples=n), f"{n}% slower", 30.0 + n) for n in range(1, 12))
    return ps.PlanResult(best, (*others, Rejection(configuration, HTML_TEXT)), names)


def test_plan_result() -> None:
    found = plan_result()
    page = tree(found._repr_html_())
    tips = {element.text for element in page.iter(f"{SVG}title")}
    assert {str(action) for order in found.schedule.orders for action in order} <= tips
    said = text(page)
    assert said.endswith(" ".join(str(found).split()))
    assert f"a step of {found.seconds:.3g} s, {found.best.bubble:.1%} of it idle" in said
    assert "3 ranks, 4 micro-batches of 1 31 s 1% slower" in said
    assert f"bubble {found.best.bubble:.1%}" in said  # the drawing simulates it again with the same costs


def test_plan_result_from_a_file(tmp_path: Path) -> None:
    found = plan_result()
    found.save(tmp_path / "planned.json")
    assert ps.PlanResult.load(tmp_path / "planned.json") == found
    assert ps.PlanResult.load(tmp_path / "planned.json")._repr_html_() == found._repr_html_()
    data = json.loads(found.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    for wrong in ({"g": 1.0}, {"bytes": [[0, 1]]}, []):
        with pytest.raises(ps.PlanError, match="not a saved PlanResult"):
            ps.PlanResult.from_json(json.dumps({**data, "costs": wrong}))


def test_plan_result_sizes_and_escaping() -> None:
    assert "<script>alert('1')</script>&" in text(tree(plan_result(HTML_TEXT)._repr_html_()))
    evil = replace(plan_result(), others=plan_result().others[-1:])
    assert "<script>alert('1')</script>&" in text(tree(evil._repr_html_()))
    large = plan_result(stages=200, microbatches=100)
    assert tree(large._repr_html_()).find(f"{SVG}svg") is None
    alone = tree(plan_result(stages=1)._repr_html_())
    assert alone.find(f"{SVG}svg") is not None


# ── plans ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_plans() -> None:
    plan = ps.split(Skips(), stages=3)
    assert text(tree(plan._repr_html_())) == " ".join(str(plan).split())


def test_names_of_layers_are_escaped() -> None:
    stage = StageSpec((HTML_TEXT,), 1, 4)
    plan = Plan(
        (stage, stage),
        (Edge(0, 1, (HTML_TEXT,)),),
        (Tie((HTML_TEXT, "b"), (0, 1)),),
        devices=(HTML_TEXT, HTML_TEXT),
        ranks=(0, 1),
    )
    page = plan._repr_html_()
    assert text(tree(page)).count("<script>alert('1')</script>&") == 5
