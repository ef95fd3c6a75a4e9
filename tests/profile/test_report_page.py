"""The page of a report: one file, nothing loaded, nothing in it but what was meant; and the command that writes it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.profile.report.findings import look
from penstock.profile.report.page import page
from penstock.profile.trace.steps import Span, Track
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


def test_well_formed_and_alone() -> None:
    text = page(look(uneven()))
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
    findings = look(uneven())
    text = page(findings)
    assert all(f"{advice.saved:.0%}</b>" in text for advice in findings.advice)
    cells = "".join(read(text).texts["li"])
    for advice in findings.advice:
        assert advice.text in cells
    assert "a cut into stages of 3, 3, 3 layers, not 6, 2, 1," in cells
    assert f"{findings.bubble:.1%}" in text
    assert "stage 0: 3 micro-batches (0, 1, 2) of 5.722 MiB" in text
    assert "39.06 MiB/s" in text  # 4096 bytes in 0.1 ms


def test_the_data_of_the_charts() -> None:
    trace = example()
    data = json.loads("".join(read(page(look(trace))).texts["script"][:1]))
    assert data["seconds"] == 6.0
    assert [row["name"] for row in data["rows"]] == ["rank 0", "rank 1"]
    assert data["rows"][0]["actions"] == [
        [0, "F", 0, 0.0, 1.0, 100, 64, []],
        [0, "B", 0, 4.5, 6.0, 0, 0, [[1, 1.5, 4.5, "message"]]],
    ]
    assert data["simulated"]["0"] == [[0, "F", 0, 0.0, 1.0], [0, "B", 0, 4.5, 6.0]]


def test_names_are_texts_and_nothing_else() -> None:
    trace = uneven(versions={HOSTILE: HOSTILE})
    names = plan([HOSTILE, "b", "c", "d", "e", "f"], ["g", "h"], ["i"])
    names["ties"] = [{"names": [HOSTILE, "i.weight"], "stages": [0, 2]}]
    tracks = tuple(replace(track, device=HOSTILE) for track in trace.tracks)
    schedule = replace(trace.schedule, name=HOSTILE)
    parts = [replace(part, spans=(Span(HOSTILE, 0.0, 0.1),)) for part in trace.steps[0].parts]
    steps = (replace(trace.steps[0], parts=tuple(parts)),)
    hostile = replace(trace, plan=names, tracks=tracks, schedule=schedule, steps=steps, missing=HOSTILE)
    text = page(look(hostile))
    reader = read(text)
    plain = read(page(look(replace(trace, missing="")))).tags
    assert [tag for tag, _ in reader.tags if tag in ("img", "script")] == ["script", "script"]
    assert {tag for tag, _ in reader.tags} == {tag for tag, _ in plain}
    assert any(HOSTILE in data for data in reader.texts["td"])
    assert any(HOSTILE in data for data in reader.texts["h1"])
    assert json.loads("".join(reader.texts["script"][:1]))["rows"][0]["spans"][0][0] == HOSTILE


def test_names_in_advice_are_texts() -> None:
    costs = Costs(*[(5.0, 3.0)] * 3, activation=(50.0, 30.0))
    trace = traced("1f1b", 2, 8, costs, plan=plan([*"abcd", HOSTILE], list("fgh")))
    reader = read(page(look(trace)))
    assert any(f"moving layer {HOSTILE} from stage 0" in text for text in reader.texts["li"])
    assert any(f"Moving layer {HOSTILE} from stage 0" in text for text in reader.texts["p"])
    data = json.loads("".join(reader.texts["script"][:1]))
    waits = [wait for row in data["rows"] for action in row["actions"] for wait in action[7]]
    assert waits
    assert all(wait[2] > wait[1] for wait in waits)


@pytest.mark.parametrize("kind", ["html", "css", "words.js", "chart.js", "js"])
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
    assert both.bubble == pytest.approx(look(both).bubble)


def test_a_part_alone_has_a_page() -> None:
    trace = example()
    alone = replace(trace, steps=(replace(trace.steps[0], parts=trace.steps[0].parts[:1]),), missing="rank 1 is gone")
    text = page(look(alone))
    read(text)
    assert "One rank&#x27;s part only: rank 1 is gone." in text
    assert "Not known: the trace has not all stages" in text


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
    for wrong, words in (
        ([str(saved), "-o", str(saved)], "over the trace"),
        ([str(saved), "-o", str(saved.parent / "no" / "x.html")], "No such file or directory"),
        ([str(saved.parent)], "Is a directory"),
        ([str(saved.parent / "none.json")], "No such file or directory"),
        ([], "required: TRACE"),
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
    assert "no whole step to report on" in capsys.readouterr().err
