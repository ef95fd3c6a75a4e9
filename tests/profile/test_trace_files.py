"""A trace's files: JSON that is read again, what Perfetto shows, and tables."""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.profile.trace.records import ActionRecord, RankRecord, SendRecord, StepRecord, Track, WaitRecord
from penstock.schedule import build
from tests.profile.test_trace import pipeline
from tests.support.models import batch, labels


@pytest.fixture(scope="module")
def trace() -> ps.Trace:
    with pipeline(4, schedule="zbv") as pipe, pipe.trace() as found:
        pipe.step(batch(), labels())
        pipe.step(batch(7), labels(7))
        with torch.no_grad():
            pipe(batch())
    return found


def example() -> ps.Trace:
    """Two ranks, one micro-batch: every number is known, in units of a second.

    rank 0  ▕0F0▏ ····w···· ▕0B0▏         0F0 0…1, sent until 1.5; 0B0 4.5…6
    rank 1   ·w· ▕1F0▏▕1B0▏               1F0 1.5…3, 1B0 3…4, sent until 4.5
    """
    first = (
        ActionRecord(ps.Action(0, "F", 0), 0.0, 1.0, memory=100, sends=(SendRecord(1, 1.0, 1.25, 64),)),
        ActionRecord(ps.Action(0, "B", 0), 4.5, 6.0, memory=0, waits=(WaitRecord(1, 1.5, 4.5),)),
    )
    second = (
        ActionRecord(ps.Action(1, "F", 0), 1.5, 3.0, memory=200, waits=(WaitRecord(0, 0.0, 1.5),)),
        ActionRecord(ps.Action(1, "B", 0), 3.0, 4.0, memory=0, sends=(SendRecord(0, 4.0, 4.25, 32),)),
    )
    step = StepRecord(0, "step", (RankRecord(0, 0.0, 6.5, first), RankRecord(1, 0.0, 5.0, second)))
    tracks = (Track(0, 0, 0, "cpu"), Track(1, 0, 1, "cpu"))
    return ps.Trace(build("gpipe", 2, 1), ((0, 1),), tracks=tracks, steps=(step,), saved={0: 100, 1: 200})


def test_an_example_by_hand() -> None:
    trace = example()
    assert trace.seconds == 6.5
    assert trace.bubble == pytest.approx(1 - 5 / 12)
    costs = trace.costs()
    assert (costs.f, costs.b, costs.i, costs.w) == ((1.0, 1.5), (1.5, 1.0), (0.75, 0.5), (0.75, 0.5))
    assert costs.latency == {(0, 1): 0.5}
    assert costs.bytes == {(0, 1): 64.0}
    assert costs.activation == (100.0, 200.0)
    assert trace.simulation().makespan == 6.0
    assert trace.simulation().bubble == pytest.approx(trace.bubble)
    assert str(trace).splitlines() == [
        "trace of 1 step: gpipe, 2 stages on 2 ranks, 1 micro-batch",
        "step    6.50 s (median of 1; 6.50 s to 6.50 s)",
        "        6.00 s simulated with the times of this trace (7.7% less)",
        "bubble  58.3% measured, 58.3% simulated with the median time of each action",
        "",
        "rank  device  stages    busy   waits    spans   other",
        "────  ──────  ──────  ──────  ──────  ───────  ──────",
        "0     cpu     0       2.50 s  3.00 s  0.00 ms  1.00 s",
        "1     cpu     1       2.50 s  1.50 s  0.00 ms  1.00 s",
    ]


def test_how_long_a_message_takes_is_known_if_it_is_waited_for() -> None:
    data = example().to_data()
    data["steps"][0]["parts"][1]["actions"][0][5] = [[0, 1.25, 1.5, "message"]]  # its rank came when it was under way
    data["steps"][0]["parts"][0]["actions"][1][5] = [[1, 1.5, 4.5, "sent"]]  # and its rank waited for something else
    assert ps.Trace.from_data(data).costs().latency == {(0, 1): 0.0}
    data["steps"][0]["parts"][1]["actions"][0][5] = [[0, 0.75, 1.5, "message"]]
    assert ps.Trace.from_data(data).costs().latency == {(0, 1): 0.5}


def test_json_round_trip(trace: ps.Trace, tmp_path: Path) -> None:
    for one in (trace, example()):
        one.save(tmp_path / "run.json")
        again = ps.Trace.load(tmp_path / "run.json")
        assert again == one
        assert again.costs() == one.costs()
        assert str(again) == str(one)
    (tmp_path / "plan.json").write_text(json.dumps(trace.plan))
    assert ps.Plan.load(tmp_path / "plan.json").num_stages == 4
    assert set(trace.versions) == {"penstock", "torch", "python"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"wrong\.json is not a saved trace, nor JSON at all: Expecting value: line 1"),
        ("\ufeff{", "is not a saved trace, nor JSON at all"),
        ("[]", "is not a saved trace: load a file written by trace.save"),
        ("{}", "is not a saved trace: load a file written by trace.save"),
        ('{"penstock_plan": 1}', "is not a saved trace: load a file written by trace.save"),
        ('{"traceEvents": []}', "not by trace.chrome"),
        ('{"penstock_trace": 2}', r"wrong\.json: trace format 2 is not supported: expected 1\. Read it with"),
        ('{"penstock_trace": 1}', "is not a saved trace: the trace has no 'schedule'"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "wrong.json").write_text(text)
    with pytest.raises(ps.PlanError, match=says):
        ps.Trace.load(tmp_path / "wrong.json")


EMPTY_PLAN = {"penstock_plan": 1, "stages": [], "edges": [], "ties": [], "recipe": {"front": "sequential"}}


def test_parts_that_belong_to_nobody(tmp_path: Path) -> None:
    for change, says in (
        (lambda data: data["tracks"].pop(), "parts of tracks that do not exist: there are 1"),
        (
            lambda data: data["steps"][0]["parts"][0]["actions"][0].__setitem__(0, "7F0"),
            "actions of stages that do not",
        ),
        (lambda data: data["steps"][0]["parts"][0]["actions"][0].pop(), "is not a saved trace"),
        (lambda data: data["schedule"].update(orders=["x"]), "'x' is not an action"),
        (lambda data: data["steps"][0]["parts"][0].update(begin=float("nan")), r"\['begin'\] must be a number, .* nan"),
        (lambda data: data["tracks"][1].update(place=2), "stages or tracks of ranks that do not exist: there are 2"),
        (lambda data: data["schedule"].update(placement=[0, 0]), "tracks of ranks that do not exist: there are 1"),
        (lambda data: data["edges"].append([1, 2]), "edges of stages that do not exist: there are 2"),
        (lambda data: data.update(plan={"stages": [{}]}), "is not a saved trace: the plan has no 'penstock_plan'"),
        (
            lambda data: data.update(plan={**EMPTY_PLAN, "devices": ["cpu"]}),
            "the plan has 0 stages, but 1 devices",
        ),
    ):
        data = example().to_data()
        change(data)
        (tmp_path / "wrong.json").write_text(json.dumps(data))
        with pytest.raises(ps.PlanError, match=says):
            ps.Trace.load(tmp_path / "wrong.json")


def events_of(trace: ps.Trace, path: Path) -> list[dict[str, Any]]:
    trace.chrome(path)
    data = json.loads(path.read_text())
    assert set(data) == {"traceEvents", "displayTimeUnit", "otherData"}
    return data["traceEvents"]


def check_chrome(trace: ps.Trace, events: list[dict[str, Any]]) -> None:
    """The format, as Google's "Trace Event Format" says it, and what a viewer makes of it."""
    assert {event["ph"] for event in events} <= set("MXsfC")
    body = [event for event in events if event["ph"] != "M"]
    times = [event["ts"] for event in body]
    assert times == sorted(times)
    assert min(times) >= 0
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert len({tid for _, tid in named}) == len(named), "a thread belongs to one process"
    assert min(min(pair) for pair in named) > 0
    slices: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in body:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert (event["pid"], event["tid"]) in named
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices.setdefault((event["pid"], event["tid"]), []).append(event)
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    for row in slices.values():  # on one track they follow each other; a thousandth of a microsecond is rounded away
        for before, after in pairwise(row):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.002, (before, after)
    # arrows: two ends each, forward in time, inside of the actions that they belong to
    starts = {e["id"]: e for e in body if e["ph"] == "s"}
    ends = {e["id"]: e for e in body if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(e["ph"] == "s" for e in body) == sum(e["ph"] == "f" for e in body)
    arrows = Counter()
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        arrows[start["args"]["step"]] += 1
        if all(track.clock_error == 0 for track in trace.tracks):
            maker, taker = (_around(slices, event) for event in (start, end))
            (src, kind, k), (dst, back, j) = ps.Action.parse(maker), ps.Action.parse(taker)
            assert j == k
            assert (kind == "F") == (back == "F")
            assert ((src, dst) if kind == "F" else (dst, src)) in trace.edges
    actions = [e for row in slices.values() for e in row if e["cat"] not in ("wait", "outside", "step")]
    assert len(actions) == sum(len(part.actions) for step in trace.steps for part in step.parts)
    for step in trace.steps:
        counts = Counter(d.action.kind for p in step.parts for d in p.actions)
        forwards, backwards = counts["F"], counts["B"] + counts["I"]
        share = len(trace.edges) / trace.schedule.num_stages
        assert arrows[step.number] == share * (forwards + backwards)


def _around(slices: dict[tuple[int, int], list[dict[str, Any]]], event: dict[str, Any]) -> str:
    row = slices[event["pid"], event["tid"]]
    (found,) = [e for e in row if e["cat"] != "wait" and e["ts"] < event["ts"] < e["ts"] + e["dur"]]
    return str(found["name"])


def test_chrome(trace: ps.Trace, tmp_path: Path) -> None:
    events = events_of(trace, tmp_path / "run.trace.json")
    check_chrome(trace, events)
    titles = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert titles == {(1, 2): "rank 0: stages 0, 3 on cpu", (1, 3): "rank 1: stages 1, 2 on cpu", (1, 4): "steps"}
    steps = [e["name"] for e in events if e.get("cat") == "step"]
    assert steps == ["step 0", "step 1", "evaluate 2"]
    assert {e["cat"] for e in events if e["ph"] == "X"} == {
        "forward", "input gradient", "weight gradient", "wait", "step"
    }  # fmt: skip
    assert any(e["ph"] == "C" and e["args"]["bytes"] > 0 for e in events)


def test_chrome_of_the_example(tmp_path: Path) -> None:
    events = events_of(example(), tmp_path / "run.trace.json")
    check_chrome(example(), events)
    shown = {e["name"]: (e["ts"], e["dur"], e["tid"]) for e in events if e["ph"] == "X" and e["cat"] != "wait"}
    assert shown["1F0"] == (1.5e6, 1.5e6, 3)
    assert shown["step 0"] == (0.0, 6.5e6, 4)


def test_chrome_of_clocks_that_disagree(tmp_path: Path) -> None:
    """A message that seems to come before it was sent: its arrow does not go back, and no time is negative."""
    data = example().to_data()
    for row in data["steps"][0]["parts"][1]["actions"]:
        row[1], row[2] = row[1] - 2.0, row[2] - 2.0
    trace = ps.Trace.from_data(data)
    events = events_of(trace, tmp_path / "run.trace.json")
    body = [e for e in events if e["ph"] != "M"]
    assert min(e["ts"] for e in body) >= 0
    starts = {e["id"]: e["ts"] for e in body if e["ph"] == "s"}
    assert all(starts[e["id"]] <= e["ts"] for e in body if e["ph"] == "f")
    assert all(latency >= 0 for latency in trace.costs().latency.values())  # type: ignore[union-attr]


def test_tables(trace: ps.Trace, tmp_path: Path) -> None:
    rows = trace.table(tmp_path / "table.json")
    assert json.loads((tmp_path / "table.json").read_text()) == list(rows)
    assert len(rows) == sum(len(part.actions) for step in trace.steps for part in step.parts)
    assert all(row["seconds"] == row["end"] - row["start"] for row in rows)
    by_hand = {row["action"]: row for row in example().table()}
    assert (by_hand["1F0"]["waited"], by_hand["1F0"]["waited_for"], by_hand["1F0"]["received"]) == (1.5, 0, 64)
    assert (by_hand["0B0"]["received"], by_hand["0F0"]["waited_for"]) == (32, None)
    with pytest.raises(ps.PlanError, match=r"not to 'table.csv'"):
        trace.table(tmp_path / "table.csv")


def test_parquet(trace: ps.Trace, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = trace.table(tmp_path / "table.parquet")
    table = parquet.read_table(tmp_path / "table.parquet")
    assert table.to_pylist() == list(rows)
    assert table.column_names == list(rows[0])


def test_parquet_without_pyarrow(trace: ps.Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ps.PlanError, match=r"\.parquet files need pyarrow: pip install pyarrow, or write \.json"):
        trace.table(tmp_path / "table.parquet")
