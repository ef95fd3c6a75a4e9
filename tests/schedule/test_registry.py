"""Schedules by name, and the facts that they are registered with."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import penstock.schedule
from penstock.errors import ScheduleError
from penstock.schedule import SCHEDULES, Schedule, build, canonical_name, loop, register
from tests.schedule.interpreter import peak_activations

ROOT = Path(__file__).parents[2]
NAMES = ["1f1b", "interleaved", "zb_h1", "zb_h2", "zbv", "v_half", "v_min", "dualpipev", "gpipe", "looped_bfs"]
NAMES += ["sharded", "forward_only"]


def test_names() -> None:
    assert list(SCHEDULES) == NAMES


def test_public_names_of_the_package() -> None:
    functions = {"auto", "build", "canonical_name", "loop", "recompute_modes", "register", "simulate", "vee", "verify"}
    functions |= {"from_csv", "from_text", "to_csv", "to_text", "with_recompute"}
    classes = {"Action", "Costs", "MemoryReport", "Schedule", "ScheduleKind", "SearchResult", "Simulation"}
    assert set(penstock.schedule.__all__) == functions | classes | {"SCHEDULES"}
    assert all(hasattr(penstock.schedule, name) for name in penstock.schedule.__all__)


def test_a_decorated_function_is_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.schedule.registry._kinds", kinds := {})

    @register("reversed", "for this test", v=None, default_v=3, memory="m")
    def reversed_(p: int, m: int, v: int = 3) -> Schedule:
        return Schedule.of("reversed", loop(p, v), [()] * p, m)

    kind = kinds["reversed"]
    assert (kind.make, kind.description, kind.takes_v, kind.default_v) == (reversed_, "for this test", True, 3)


def test_peak_memory_is_as_registered() -> None:
    for name, kind in SCHEDULES.items():
        for p in (1, 2, 3, 4, 8):
            for m in (2 * p, 4 * p):
                for v in (2, 3) if kind.takes_v else (kind.stages_per_rank,):
                    schedule = build(name, p, m, v)
                    peak = peak_activations(schedule) if schedule.trains else 0
                    assert peak <= eval(kind.memory, {"p": p, "m": m, "v": v}) + 1e-9, (name, p, m, v)
                    if p > 1 and m == 4 * p:
                        assert peak == pytest.approx(eval(kind.memory, {"p": p, "m": m, "v": v})), (name, p, m, v)


@pytest.mark.parametrize("file", ["README.md", "docs/choosing.md", "docs/reference/schedule.md"])
def test_generated_tables_are_current(file: str) -> None:
    """If not: ``python tools/schedule_tables.py``."""
    updated = runpy.run_path(str(ROOT / "tools" / "schedule_tables.py"))["updated"]
    text = (ROOT / file).read_text(encoding="utf-8")
    assert "<!-- schedules: " in text
    assert text == updated(text)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("1F1B", "1f1b"),
        ("GPipe", "gpipe"),
        ("ZB-H1", "zb_h1"),
        ("zb h2", "zb_h2"),
        ("ZBV", "zbv"),
        ("zb-v", "zbv"),
        ("DualPipeV", "dualpipev"),
        ("V-Half", "v_half"),
        ("vmin", "v_min"),
        ("LoopedBFS", "looped_bfs"),
        ("forward-only", "forward_only"),
    ],
)
def test_any_spelling_of_a_name(spelling: str, name: str) -> None:
    assert canonical_name(spelling) == name
    assert build(spelling, 2, 3) == build(name, 2, 3)


def test_stages_per_rank() -> None:
    for name, kind in SCHEDULES.items():
        for v in (1, 2, 3) if kind.takes_v else (kind.stages_per_rank,):
            assert build(name, 3, 4, v).num_stages == 3 * v
        assert build(name, 3, 4).num_stages == 3 * kind.default_v
        assert kind.description


def test_v_is_optional() -> None:
    assert build("interleaved", 2, 4) == build("interleaved", 2, 4, 2)
    assert build("looped_bfs", 2, 4) == build("looped_bfs", 2, 4, 2)
    assert build("sharded", 2, 4) == build("sharded", 2, 4, 1)
    assert build("zbv", 2, 4) == build("zbv", 2, 4, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", 2, 4), "there is no schedule '1f2b': did you mean '1f1b'?"),
        (("interleave", 2, 4), "there is no schedule 'interleave': did you mean 'interleaved'?"),
        (("zb_h3", 2, 4), "did you mean 'zb_h2' or 'zb_h1'?"),
        (("chimera", 2, 4), "there is no schedule 'chimera': there are '1f1b', 'interleaved', 'zb_h1',"),
        (("gpipe", 0, 4), "schedule 'gpipe' needs at least 1 rank (p), not 0"),
        (("gpipe", 2, -3), "schedule 'gpipe' needs at least 1 micro-batch (m), not -3"),
        (("interleaved", 2, 4, 0), "schedule 'interleaved' needs at least 1 stage per rank (v), not 0"),
        (("1f1b", 2, 4, 2), "v=2 does not fit schedule '1f1b', whose number of stages per rank is 1"),
        (("zbv", 2, 4, 3), "v=3 does not fit schedule 'zbv', whose number of stages per rank is 2"),
        (("zbv", 2, 4, 3), "leave v out, or choose one that takes any v ('interleaved', 'looped_bfs'"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        build(*arguments)
    assert message in str(error.value)
