"""SVG drawings of schedules: their content, and that the documents' pictures are up to date."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from penstock.schedule import Costs, Simulation, build, from_text, simulate
from penstock.viz import to_svg
from tests.schedule.samples import VARIANTS, label

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


def parsed(simulation: Simulation) -> ElementTree.Element:
    return ElementTree.fromstring(to_svg(simulation))


def boxes(svg: ElementTree.Element) -> list[tuple[str, float, float, int, str]]:
    """(action, left, width, row, colour) of every action."""
    found = []
    for rect in svg.iter(f"{SVG}rect"):
        tip = rect.find(f"{SVG}title")
        if tip is not None:
            x, y, width = (float(rect.attrib[name]) for name in ("x", "y", "width"))
            found.append((str(tip.text), x, width, round(y / 26), rect.attrib["fill"]))
    return found


def texts(svg: ElementTree.Element) -> list[str]:
    return [str(element.text) for element in svg.iter(f"{SVG}text")]


@pytest.mark.parametrize(("name", "v"), VARIANTS, ids=label)
def test_actions_are_drawn_at_their_times(name: str, v: int | None) -> None:
    simulation = simulate(build(name, 3, 5, v))
    found = boxes(parsed(simulation))
    expected = [
        (str(action), start, end - start, rank)
        for rank, order in enumerate(simulation.schedule.orders)
        for action, start, end in zip(order, simulation.starts[rank], simulation.ends[rank], strict=True)
    ]
    assert [(box[0], box[3]) for box in found] == [(action, rank) for action, _, _, rank in expected]
    left = min(x for _, x, *_ in found)
    unit = max(x for _, x, *_ in found) - left
    last = max(start for _, start, *_ in expected)
    for (_, x, width, *_), (_, start, time, _) in zip(found, expected, strict=True):
        assert (x - left) * last == pytest.approx(start * unit, abs=0.02 * last)
        assert 0 <= time / last * unit - width <= 0.52  # a small gap between two actions


def test_svg_texts() -> None:
    svg = parsed(simulate(build("zb_h1", 2, 3)))
    assert svg.attrib["role"] == "img"
    assert svg.attrib["aria-label"] == "zb_h1: 2 ranks, 2 stages, 3 micro-batches"
    assert [child.tag.removeprefix(SVG) for child in svg][:2] == ["title", "desc"]
    assert svg[0].text == svg.attrib["aria-label"]
    shown = texts(svg)
    assert [text for text in shown if text.startswith("rank")] == ["rank 0", "rank 1"]
    assert shown[-4:] == ["F forward", "I input gradient", "W weight gradient", "bubble 10.0%"]
    assert "F0" in shown
    assert "of the ranks' time is idle" in str(svg[1].text)


def test_stages_of_a_rank_have_shades() -> None:
    colours = {action[:2]: colour for action, *_, colour in boxes(parsed(simulate(build("interleaved", 2, 2, 2))))}
    assert colours["0F"] == colours["1F"] != colours["2F"] == colours["3F"]
    assert len({colours[key] for key in ("0F", "2F", "0B", "2B")}) == 4


def test_light_and_dark_colour_schemes() -> None:
    text = to_svg(simulate(build("1f1b", 2, 2)))
    assert "prefers-color-scheme:dark" in text
    assert "fill:currentColor" in text
    for selector in re.findall(r"[}>]([^{}<>@]+)\{", text):  # its styles do not affect the rest of a page
        assert ".penstock" in selector
    assert " id=" not in text  # its ids differ from those of other pictures


def test_edge_cases() -> None:
    name = 'a <b> & "c"\x07'
    schedule = from_text("0F0 0B0")
    svg = parsed(simulate(type(schedule)(name, schedule.placement, schedule.orders, 1)))
    assert svg.attrib["aria-label"] == 'a <b> & "c"�: 1 rank, 1 stage, 1 micro-batch'
    nothing = parsed(simulate(schedule, Costs(f=0, i=0, w=0)))
    assert boxes(nothing) == []
    tiny = boxes(parsed(simulate(build("1f1b", 2, 4), Costs(f=(1e-6, 1), i=1e6))))
    assert len(tiny) == 16
    assert max(x + width for _, x, width, *_ in tiny) < 1100


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_size_of_large_schedules(name: str) -> None:
    simulation = simulate(build(name, 8, 2000))
    text = to_svg(simulation)
    assert len(text) < 1_000_000
    svg = ElementTree.fromstring(text)
    assert not boxes(svg)
    filled = [0.0] * 8
    for rect in svg.iter(f"{SVG}rect"):
        if rect.attrib["height"] == "22":
            filled[int(rect.attrib["y"]) // 26] += float(rect.attrib["width"])
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= 54 + 960
    for width, bubble in zip(filled, simulation.bubbles, strict=True):
        assert width / 960 == pytest.approx(1 - bubble, abs=0.01)


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("draw_pictures", ROOT / "tools" / "draw_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_document_pictures_are_up_to_date() -> None:
    there = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert there == generator().pictures(), "run python tools/draw_pictures.py"
