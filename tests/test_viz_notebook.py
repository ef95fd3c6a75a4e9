"""What notebooks show of plans, schedules, simulations and traces: well-formed, escaped, and of a sane size."""

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
LARGEST = 1_200_000  # letters, of what is shown


def tree(html: str | None) -> ElementTree.Element:
    """A page as its elements; an error where it is not well-formed, or where it holds a script."""
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


# Schedules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str) -> None:
    schedule = build(name, 4, 8)
    page, picture = tree(schedule._repr_html_()), tree(schedule._repr_svg_())
    assert picture.tag == f"{SVG}svg"
    assert page.find(f"{SVG}svg") is not None
    tips = [element.text for element in picture.iter(f"{SVG}title")]
    assert {str(action) for order in schedule.orders for action in order} <= set(tips)


def test_names_are_escaped() -> None:
    schedule = replace(build("1f1b", 2, 2), name=HTML_TEXT)
    for page in (schedule._repr_html_(), schedule._repr_svg_(), simulate(schedule)._repr_html_()):
        assert "<script>alert('1')</script>&" in text(tree(page))
    large = replace(build("1f1b", 100, 100), name=HTML_TEXT)
    assert "<script>alert('1')</script>&" in text(tree(large._repr_html_()))


def test_invalid_schedule_shows_the_reason() -> None:
    """A notebook shows whatever a cell ends with: the reason, and no traceback."""
    schedule = from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    assert "deadlock: rank 0 waits at 0B0" in text(tree(schedule._repr_html_()))
    assert schedule._repr_svg_() is None
    assert "is empty" not in text(tree(replace(schedule, name=HTML_TEXT, orders=((), ()))._repr_html_()))


@pytest.mark.slow
def test_many_stages_and_micro_batches() -> None:
    schedule = build("1f1b", 200, 1000)
    start = time.monotonic()
    page = tree(schedule._repr_html_())
    assert time.monotonic() - start < 5  # it is not simulated
    assert text(page) == (
        "1f1b: 200 ranks, 200 stages, 1000 micro-batches actions 400,000: too many for a picture kinds B F"
    )
    assert len(ElementTree.tostring(page)) < 1000
    assert schedule._repr_svg_() is None
    for ranks, microbatches in ((6, 4000), (60, 50)):  # the most that is drawn
        drawn = build("1f1b", ranks, microbatches)
        assert tree(drawn._repr_html_()).find(f"{SVG}svg") is not None
        assert build("1f1b", ranks + 1, microbatches)._repr_svg_() is None


def test_simulations() -> None:
    simulation = simulate(build("zbv", 2, 4))
    page = tree(simulation._repr_html_())
    assert page.find(f"{SVG}svg") is not None
    assert [cell.text for cell in page.iter("th")][:4] == ["rank", "stages", "busy", "idle"]
    assert [row[1].text for row in page.iter("tr")][1:] == ["0 3", "1 2"]
    assert text(page).endswith(f"simulated time {simulation.makespan:g}")
    assert tree(simulation._repr_svg_()).tag == f"{SVG}svg"
    large = simulate(build("1f1b", 70, 50))
    assert f"bubble {large.bubble:.1%}" in text(tree(large._repr_html_()))
    assert large._repr_svg_() is None


# Traces -----------------------------------------------------------------------------------------------------


def test_traces() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = ps.Pipeline(ps.split(model, stages=2), nn.MSELoss(), microbatches=2, devices=["cpu"] * 2)
    with pipe, pipe.trace() as trace:
        empty = tree(trace._repr_html_())
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))
    page = tree(trace._repr_html_())
    assert text(page).startswith("trace of 1 step: 1f1b, 2 stages on 2 ranks, 2 micro-batches step ")
    tips = {element.text for element in page.iter(f"{SVG}title")}
    assert {"0F0", "0F1", "0B0", "0B1", "1F0", "1F1", "1B0", "1B1"} <= tips
    assert "no whole step" in text(empty)  # while it is recorded, it is not there
    assert empty.find(f"{SVG}svg") is None
    evil = replace(trace, schedule=replace(trace.schedule, name=HTML_TEXT))
    assert "<script>alert('1')</script>&" in text(tree(evil._repr_html_()))


# What a planner found ---------------------------------------------------------------------------------------


def plan_result(layer: str = "c", stages: int = 3, microbatches: int = 4) -> ps.PlanResult:
    """A stage of two layers, and of one layer each after it; every message takes a quarter of a second."""
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
    assert said.startswith(" ".join(str(found).split()))
    assert f"a step of {found.seconds:.3g} s, {found.best.bubble:.1%} of it idle" in said
    assert "3 ranks, 4 micro-batches of 1 31 s 1% slower" in said
    assert f"bubble {found.best.bubble:.1%}" in said  # of the picture: it is simulated again with the same costs
    rows = [[cell.text for cell in row] for row in page.iter("tr")]
    assert rows[1][:4] == ["0", "0", "2,000", "2,000"]
    assert rows[3][:4] == ["2", "2", "1,000", "2,000"]
    assert rows[5][:2] == ["0", "3"]
    bars = [float(rect.attrib["width"]) for row in page.iter("tr") for rect in row.iter(f"{SVG}rect")]
    assert bars == [120, 90, 90, 120, 80, 40]


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
    full = plan_result()
    full = replace(full, best=replace(full.best, memory=(2.0**36, 2.0**20, 0.0)))
    assert "0 65,536 1 1 2 0" in text(tree(full._repr_html_()))
    large = plan_result(stages=200, microbatches=100)
    assert "… 100 more" in text(tree(large._repr_html_()))
    alone = tree(plan_result(stages=1)._repr_html_())
    assert alone.find(f"{SVG}svg") is not None


# Plans ------------------------------------------------------------------------------------------------------


def test_plans() -> None:
    plan = ps.split(Skips(), stages=3)
    page = tree(plan._repr_html_())
    rows = [[cell.text for cell in row] for row in page.iter("tr")]
    assert rows[0] == ["stage", "rank", "layers", "parameters", "bytes", "sends to"]
    assert rows[1][:2] + rows[1][3:] == ["0", "-", f"{plan.stages[0].parameters}", f"{plan.stages[0].bytes}", "1 2"]
    drawn = sorted(title.text or "" for title in page.iter(f"{SVG}title"))
    edges = ["stage 0 to stage 1", "stage 0 to stage 2", "stage 1 to stage 2"]
    assert drawn == [*edges, "tied: stages 0 and 2"]
    assert "tie: first.weight = third.weight (stages 0, 2)" in text(page)
    placed = tree(plan.placed([0, 1, 0], ["cuda:0", "cuda:1", "cuda:0"])._repr_html_())
    assert [row[1].text for row in placed.iter("tr")][1:] == ["0 cuda:0", "1 cuda:1", "0 cuda:0"]


def test_drawing_stays_inside_the_view_box() -> None:
    stages = tuple(StageSpec((f"l{i}",), 1, 4) for i in range(40))
    edges = (*(Edge(i, i + 1) for i in range(39)), Edge(0, 39), Edge(3, 9))
    plan = Plan(stages, edges, (Tie(("a", "b", "c"), (0, 20, 39)), Tie(("d", "e"), (1, 2))))
    picture = tree(plan._repr_html_()).find(f"{SVG}svg")
    assert picture is not None
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    assert height < 250
    paths = [element.attrib["d"] for element in picture.iter(f"{SVG}path")]
    assert len(paths) == 41 + 3
    for path in paths:
        numbers = [float(n) for n in path.replace("M", " ").replace("C", " ").replace("L", " ").split()]
        xs, ys = numbers[::2], numbers[1::2]
        assert 0 <= min(xs) <= max(xs) <= width
        if "C" in path:  # a curve goes three quarters of the way to its handles
            ys = [y if n not in (1, 2) else ys[0] + (y - ys[0]) * 3 / 4 for n, y in enumerate(ys)]
        assert 0 <= min(ys) <= max(ys) <= height


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


def test_plans_of_many_stages() -> None:
    stages = tuple(StageSpec(tuple(f"layer{i}.{j}" for j in range(100)), 10**9, 4 * 10**9) for i in range(1000))
    ties = tuple(Tie((f"a{i}", f"b{i}"), (i, i + 1)) for i in range(900))
    plan = Plan(stages, tuple(Edge(i, i + 1) for i in range(999)), ties)
    page = tree(plan._repr_html_())
    assert page.find(f"{SVG}svg") is None
    shown = [row[0].text for row in page.iter("tr")]
    assert shown[:3] + shown[-2:] == ["stage", "0", "1", "998", "999"]
    assert "… 900 more" in text(page)
    assert "layer0.0 … layer0.99 (100 layers)" in text(page)
    assert text(page).endswith("and 800 more ties")
