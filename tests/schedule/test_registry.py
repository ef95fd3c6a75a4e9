"""Schedules by name: what is found, and what is said about what is not."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.registry import SCHEDULES, build, canonical_name

NAMES = ["gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "zbv", "dualpipev", "v_half", "v_min"]
NAMES += ["sharded", "forward_only"]


def test_the_names() -> None:
    assert list(SCHEDULES) == NAMES


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
def test_any_spelling_of_a_name_will_do(spelling: str, name: str) -> None:
    assert canonical_name(spelling) == name
    assert build(spelling, 2, 3) == build(name, 2, 3)


@pytest.mark.parametrize("name", NAMES)
def test_a_kind_says_how_many_stages_a_rank_holds(name: str) -> None:
    kind = SCHEDULES[name]
    for v in (1, 2, 3) if kind.takes_v else (kind.stages_per_rank,):
        assert build(name, 3, 4, v).num_stages == 3 * v
    assert kind.description


def test_v_may_be_left_out() -> None:
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
        (("chimera", 2, 4), "there is no schedule 'chimera': there are 'gpipe', '1f1b', 'interleaved',"),
        (("gpipe", 0, 4), "schedule 'gpipe' needs at least 1 rank (p), not 0"),
        (("gpipe", 2, -3), "schedule 'gpipe' needs at least 1 micro-batch (m), not -3"),
        (("interleaved", 2, 4, 0), "schedule 'interleaved' needs at least 1 stage per rank (v), not 0"),
        (("1f1b", 2, 4, 2), "v=2 does not fit schedule '1f1b', whose number of stages per rank is 1"),
        (("zbv", 2, 4, 3), "v=3 does not fit schedule 'zbv', whose number of stages per rank is 2"),
        (("zbv", 2, 4, 3), "leave v out, or choose one that takes any v ('interleaved', 'looped_bfs'"),
    ],
)
def test_errors(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        build(*arguments)
    assert message in str(error.value)
