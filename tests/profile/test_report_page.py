"""The page of a report: one file, nothing loaded, nothing in it but what was meant; and the command that writes it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.profile.report.findings import analyze
from penstock.profile.report.page import MAX_ACTIONS, page, steps_shown
from penstock.profile.trace.records import ActionRecord, RankRecord, Span, StepRecord, Track
from penstock.schedule import Costs
from tests.profile.test_report import plan, traced
from tests.profile.test_trace import pipeline
from tests.profile.test_trace_files import example
from tests.support.models import batch, labels

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&${title}\u2028"
VOID = {"meta", "link", "br", "img", "input"}


class Reader(HTMLParser):
    """Checks that tags are closed in their order, and keeps what there is."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in {tag}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def uneven(**more: Any) -> ps.Trace:
    """Three stages of 6, 2 and 1 layers."""
    costs = Costs(*[(6e-3, 2e-3, 1e-3)] * 3, latency=1e-4, bytes=4096.0, activation=(6e6, 2e6, 1e6))
    return traced("1f1b", 3, 8, costs, plan=plan(list("abcdef"), ["g", "h"], ["i"]), **more)


def several() -> ps.Trace:
    """The example; the same at half the speed; a bit faster; and a forward without gradients at twice the speed."""
    trace = example()
    (step,) = trace.steps
    later = [_again(step, 1, 10.0, 2.0), _again(step, 2, 30.0, 0.9), _again(step, 3, 40.0, 0.5)]
    parts = [replace(part, actions=part.actions[:1]) for part in later[2].parts]
    later[2] = replace(later[2], kind="evaluate", parts=tuple(parts))
    return replace(trace, steps=(step, *later))


def _again(step: StepRecord, number: int, begin: float, factor: float) -> StepRecord:
    """The same step, at another time, so many times as long."""

    def then(thing: Any) -> Any:
        return replace(thing, start=begin + factor * thing.start, end=begin + factor * thing.end)

    def done(one: ActionRecord) -> ActionRecord:
        return replace(then(one), waits=tuple(map(then, one.waits)), sends=tuple(map(then, one.sends)))

    parts = [
        RankRecord(p.track, begin + factor * p.begin, begin + factor * p.end, tuple(map(done, p.actions)))
        for p in step.parts
    ]
    return StepRecord(number, step.kind, tuple(parts))


def test_well_formed_and_alone() -> None:
    text = page(analyze(uneven()))
    reader = read(text)
    ids = [attrs["id"] for _, attrs in reader.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {"advice", "timeline", "bubble", "memory", "stages", "edges", "plan"} <= set(ids)
    for _, attrs in reader.tags:
        for name in ("src", "href", "data", "action", "poster", "srcset"):
            if name in attrs:
                assert str(attrs[name]).startswith(("#", "data:"))
        for name in ("aria-labelledby", "aria-describedby"):
            assert attrs.get(name) in (None, *ids)
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    assert "default-src 'none'" in text
    assert "$" not in text.split("<script>")[0].split('id="data"')[0]  # no place in the page is left empty


def test_what_it_says() -> None:
    findings = analyze(uneven())
    text = page(findings)
    assert all(f"{advice.saved:.0%}</b>" in text for advice in findings.advice)
    cells = "".join(read(text).texts["li"])
    for advice in findings.advice:
        assert advice.text in cells
    assert "a cut into stages of 3, 3, 3 layers, not 6, 2, 1," in cells
    assert f"{findings.bubble:.1%}" in text
    assert "stage 0: 3 micro-batches (0, 1, 2) of 5.72 MiB" in text
    assert "39.06 MiB/s" in text  # 4096 bytes in 0.1 ms


def test_the_data_of_the_charts() -> None:
    trace = example()
    data = json.loads("".join(read(page(analyze(trace))).texts["script"][:1]))
    (step,) = data["steps"]
    assert step["seconds"] == 6.0
    assert [row["name"] for row in step["rows"]] == ["rank 0", "rank 1"]
    assert step["rows"][0]["actions"] == [
        [0, "F", 0, 0.0, 1.0, 100, 64, []],
        [0, "B", 0, 4.5, 6.0, 0, 0, [[1, 1.5, 4.5, "message"]]],
    ]
    assert data["simulated"]["0"] == [[0, "F", 0, 0.0, 1.0], [0, "B", 0, 4.5, 6.0]]


def test_steps_to_choose_from() -> None:
    text = page(analyze(several()))
    reader = read(text)
    data = json.loads("".join(reader.texts["script"][:1]))
    assert [(step["name"], round(step["seconds"], 6), step["has_simulation"]) for step in data["steps"]] == [
        ("step 0", 6.0, True),
        ("step 1", 12.0, True),
        ("step 2", 5.875, True),  # as long as the simulated one
        ("evaluate 3", 1.5, False),
    ]
    assert data["step"] == 0
    assert "Each bar is a step: 4 steps of 3.25 s to 13.00 s. The rest of this page is of step 0." in text
    assert 'id="step"' not in page(analyze(example()))


@pytest.mark.slow
def test_of_many_steps_some_have_timelines() -> None:
    """A page of a long run stays small: all times of steps are in it, and some timelines."""
    trace = uneven()
    (step,) = trace.steps
    steps = [_again(step, n, 10.0 * n, 3.0 if n == 777 else 0.1 if n == 20 else 1 + n / 1e4) for n in range(1500)]
    steps[333] = replace(steps[333], failed=True)
    found = analyze(replace(trace, steps=tuple(steps)))
    shown = steps_shown(found)
    size = sum(len(part.actions) for part in step.parts)
    assert len(shown) == MAX_ACTIONS // size == 208
    assert {step.number for step in shown} >= {20, 333, 777, found.step.number, 0, 1024, 512, 256, 1280}
    assert [step.number for step in shown] == sorted(step.number for step in shown)
    gaps = [b.number - a.number for a, b in pairwise(shown)]
    assert max(gaps) <= 8 + 1
    text = page(found)
    read(text)
    assert len(text) < 1_500_000
    assert f"{len(shown)} of them, in colour, have a timeline" in text
    assert text.count("<rect ") == 1500
    assert "Each bar is a step: 1500 steps of" in text
    assert "failed" in page(analyze(replace(trace, steps=(*steps[:5], replace(steps[5], failed=True)))))


@pytest.mark.slow
def test_a_step_of_very_many_actions_is_shown_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.profile.report.page.MAX_ACTIONS", 1000)
    trace = traced("1f1b", 4, 150, Costs(f=1e-3, i=1e-3, w=1e-3))
    (step,) = trace.steps
    found = analyze(replace(trace, steps=(step, _again(step, 1, 10.0, 1.1))))
    assert [step.number for step in steps_shown(found)] == [0]
    assert "1 of them, in colour, have a timeline" in page(found)


def test_texts_can_be_read_on_what_is_behind_them() -> None:
    """The contrast that the Web Content Accessibility Guidelines ask of texts, at least; and of lines, less."""
    style = files("penstock.profile.report").joinpath("page.css").read_text("utf-8")
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part)) for part in style.split("@media")[:2])
    for colours in (light, {**light, **dark}):
        for text, behind in (
            *((text, behind) for text in ("ink", "soft") for behind in ("paper", "raised")),
            *(("mark", "paper"), ("on", "F"), *(("on-light", kind) for kind in "BIWR")),
        ):
            assert contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
        assert contrast(colours["wait"], colours["paper"]) >= 3


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)


def test_names_are_texts_and_nothing_else() -> None:
    trace = uneven(versions={HOSTILE: HOSTILE})
    names = plan([HOSTILE, "b", "c", "d", "e", "f"], ["g", "h"], ["i"])
    names["ties"] = [{"names": [HOSTILE, "i.weight"], "stages": [0, 2]}]
    tracks = tuple(replace(track, device=HOSTILE) for track in trace.tracks)
    schedule = replace(trace.schedule, name=HOSTILE)
    parts = [replace(part, spans=(Span(HOSTILE, 0.0, 0.1),)) for part in trace.steps[0].parts]
    steps = (replace(trace.steps[0], parts=tuple(parts)),)
    hostile = replace(trace, plan=names, tracks=tracks, schedule=schedule, steps=steps, missing=HOSTILE)
    text = page(analyze(hostile))
    reader = read(text)
    plain = read(page(analyze(replace(trace, missing="")))).tags
    assert [tag for tag, _ in reader.tags if tag in ("img", "script")] == ["script", "script"]
    assert {tag for tag, _ in reader.tags} == {tag for tag, _ in plain}
    assert any(HOSTILE in data for data in reader.texts["td"])
    assert any(HOSTILE in data for data in reader.texts["h1"])
    assert json.loads("".join(reader.texts["script"][:1]))["steps"][0]["rows"][0]["spans"][0][0] == HOSTILE


def test_waits_take_time() -> None:
    costs = Costs(*[(5.0, 3.0)] * 3, activation=(50.0, 30.0))
    reader = read(page(analyze(traced("1f1b", 2, 8, costs))))
    data = json.loads("".join(reader.texts["script"][:1]))
    waits = [wait for row in data["steps"][0]["rows"] for action in row["actions"] for wait in action[7]]
    assert waits
    assert all(wait[2] > wait[1] for wait in waits)


@pytest.mark.parametrize("kind", ["html", "css", "text.js", "chart.js", "js"])
def test_the_files_are_in_the_package(kind: str) -> None:
    assert files("penstock.profile.report").joinpath(f"page.{kind}").is_file()
    assert "profile/report/page.*" in (Path(__file__).parents[2] / "pyproject.toml").read_text()


def test_replicas_have_rows_of_their_own(tmp_path: Path) -> None:
    trace = example()
    parts = [*trace.steps[0].parts, *(replace(part, track=part.track + 2) for part in trace.steps[0].parts)]
    tracks = (*trace.tracks, Track(2, 1, 0, "cpu"), Track(3, 1, 1, "cpu"))
    both = replace(trace, tracks=tracks, steps=(replace(trace.steps[0], parts=tuple(parts)),))
    both.report(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert '"name":"rank 3 (1)"' in text
    assert both.bubble == pytest.approx(analyze(both).bubble)


def test_a_part_alone_has_a_page() -> None:
    trace = example()
    alone = replace(trace, steps=(replace(trace.steps[0], parts=trace.steps[0].parts[:1]),), missing="rank 1 is gone")
    text = page(analyze(alone))
    read(text)
    assert "Records of one rank only: rank 1 is gone." in text
    assert "Unknown: the trace does not have all stages" in text


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with pipeline(2) as pipe, pipe.trace() as trace:
        pipe.step(batch(), labels())
    trace.save(tmp_path / "run.json")
    return tmp_path / "run.json"


def test_four_lines(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(saved)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("1f1b, 2 stages on 2 ranks, 4 micro-batches: a step takes ")
    assert lines[1].startswith("step ")
    assert "simulated with the times of this trace" in lines[1]
    assert lines[3] == f"{saved.with_suffix('.html')}: open it in a browser"
    assert err == ""
    read(saved.with_suffix(".html").read_text("utf-8"))


def test_another_file(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = saved.parent / "there.html"
    assert main(["report", str(saved), "-o", str(target)]) == 0
    assert target.is_file()
    assert not saved.with_suffix(".html").exists()
    (saved.parent / "link.html").symlink_to(saved)
    for wrong, words in (
        ([str(saved), "-o", str(saved)], "overwrite the trace"),
        ([str(saved), "-o", str(saved.parent / "link.html")], "overwrite the trace"),
        ([str(saved), "-o", str(saved.parent / "no" / "x.html")], "No such file or directory"),
        ([str(saved.parent)], "Is a directory"),
        ([str(saved.parent / "none.json")], "No such file or directory"),
        ([], "Missing argument 'TRACE'"),
    ):
        assert main(["report", *wrong]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"penstock_trace": 7}', b'{"penstock_plan": 1}']
)
def test_files_that_are_no_traces(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_bytes(data)
    assert main(["report", str(tmp_path / "run.json")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("penstock: ")
    assert not (tmp_path / "run.html").exists()


def test_a_trace_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace(example(), steps=()).save(tmp_path / "run.json")
    assert main(["report", str(tmp_path / "run.json")]) == 1
    assert "no complete step to report on" in capsys.readouterr().err
