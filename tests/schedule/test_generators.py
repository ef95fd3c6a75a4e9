"""The generated schedules: their shapes, and that each is complete, ordered and free of deadlocks."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

import penstock.schedule
from penstock.schedule.one_f_one_b import interleaved, one_f_one_b
from penstock.schedule.registry import SCHEDULES, build
from penstock.schedule.schedule import Schedule, loop, vee
from penstock.schedule.verify import verify
from tests.schedule.interpreter import drawing, run

# A column is the time of one forward, I or W; a full backward takes two.
STAIRCASES = {
    ("gpipe", 2, 3): """
        rank 0: F0 F1 F2 .  .  .  B0 -- B1 -- B2 --
        rank 1: .  F0 F1 F2 B0 -- B1 -- B2 --
    """,
    ("1f1b", 2, 4): """
        rank 0: F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --
        rank 1: .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --
    """,
    # Fewer micro-batches than ranks.
    ("1f1b", 4, 2): """
        rank 0: F0 F1 .  .  .  .  .  .  .  .  B0 -- .  B1 --
        rank 1: .  F0 F1 .  .  .  .  .  B0 -- .  B1 --
        rank 2: .  .  F0 F1 .  .  B0 -- .  B1 --
        rank 3: .  .  .  F0 B0 -- F1 B1 --
    """,
    ("interleaved", 2, 2): """
        rank 0: 0F0 0F1 2F0 2F1 .   .   2B0 --- .   2B1 --- 0B0 --- 0B1 ---
        rank 1: .   1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1B0 --- 1B1 ---
    """,
    # A micro-batch that makes no group of its own joins the one there is: no time is lost.
    ("interleaved", 2, 3): """
        rank 0: 0F0 0F1 0F2 2F0 2F1 2F2 .   2B0 --- .   2B1 --- .   2B2 --- 0B0 --- 0B1 --- 0B2 ---
        rank 1: .   1F0 1F1 1F2 3F0 3B0 --- 3F1 3B1 --- 3F2 3B2 --- 1B0 --- 1B1 --- 1B2 ---
    """,
    ("looped_bfs", 2, 3): """
        rank 0: 0F0 0F1 0F2 2F0 2F1 2F2 .   .   .   2B0 --- 2B1 --- 2B2 --- 0B0 --- 0B1 --- 0B2 ---
        rank 1: .   1F0 1F1 1F2 3F0 3F1 3F2 3B0 --- 3B1 --- 3B2 --- 1B0 --- 1B1 --- 1B2 ---
    """,
    ("zb_h1", 2, 4): """
        rank 0: F0 F1 .  I0 W0 F2 I1 W1 F3 I2 W2 I3 W3
        rank 1: .  F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3
    """,
    ("zb_h1", 4, 2): """
        rank 0: F0 F1 .  .  .  .  .  I0 W0 I1 W1
        rank 1: .  F0 F1 .  .  .  I0 W0 I1 W1
        rank 2: .  .  F0 F1 .  I0 W0 I1 W1
        rank 3: .  .  .  F0 I0 F1 I1 W0 W1
    """,
    ("zb_h2", 2, 4): """
        rank 0: F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1: .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """,
    ("zbv", 1, 2): """
        rank 0: 0F0 1F0 1I0 0I0 1W0 0F1 0W0 1F1 1I1 0I1 1W1 0W1
    """,
    ("zbv", 2, 4): """
        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0F3 0W0 3F2 3I2 0I1 3W2 0W1 3F3 3I3 0I2 3W3 0I3 0W2 0W3
        rank 1: .   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2W1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3
    """,
    ("zbv", 3, 2): """
        rank 0: 0F0 0F1 .   .   .   5F0 5I0 5F1 5I1 5W0 5W1 0I0 0W0 0I1 0W1
        rank 1: .   1F0 1F1 .   4F0 .   4F1 4I0 4W0 4I1 1I0 4W1 1I1 1W0 1W1
        rank 2: .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3I1 2I1 3W0 2W0 3W1 2W1
    """,
    # At most 3 activations of a rank, 6 of a stage: half of 1F1B's 4, and one.
    ("v_half", 4, 3): """
        rank 0: 0F0 0F1 0F2 .   .   .   .   7F0 7I0 7F1 7I1 7F2 7W0 7W1 7I2 0I0 7W2 0I1 0W0 0W1 .   0I2 0W2
        rank 1: .   1F0 1F1 1F2 .   .   6F0 .   6F1 6I0 6F2 6I1 6W0 6W1 1I0 6I2 1I1 1W0 6W2 1W1 1I2 1W2
        rank 2: .   .   2F0 2F1 2F2 5F0 .   5F1 .   5F2 5I0 5W0 5I1 2I0 5W1 2I1 5I2 2W0 2W1 2I2 5W2 2W2
        rank 3: .   .   .   3F0 4F0 3F1 4F1 3F2 4F2 .   .   4I0 3I0 4I1 3I1 4W0 3W0 4I2 3I2 4W1 3W1 4W2 3W2
    """,
    # At most 2 activations of a rank, 4 of a stage.
    ("v_min", 3, 3): """
        rank 0: 0F0 0F1 0F2 .   .   5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 .   .   5F2 5I2 0I1 5W2 0W1 .   0I2 0W2
        rank 1: .   1F0 1F1 .   4F0 .   4F1 4I0 4W0 .   1I0 1F2 4I1 1W0 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2
        rank 2: .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2
    """,
    ("dualpipev", 2, 4): """
        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 --- 3F2 0B0 --- 3B2 --- 3F3 .   0B1 --- 3B3 --- 0I2 0W2 0I3 0W3
        rank 1: .   1F0 2F0 1F1 2F1 1F2 2B0 --- 2F2 1B0 --- 1F3 2B1 --- 2F3 1B1 --- 2B2 --- 1B2 --- 2I3 1I3 2W3 1W3
    """,
    # Too few micro-batches for its phases: the first of 2p.
    ("dualpipev", 2, 1): """
        rank 0: 0F0 .   .   3F0 3I0 3W0 .   .   .   0B0 ---
        rank 1: .   1F0 2F0 .   .   2B0 --- 1B0 ---
    """,
    ("sharded", 2, 2): """
        rank 0: F0 .  .  .  B0 -- F1 .  .  .  B1 --
        rank 1: .  F0 B0 -- .  .  .  F1 B1 --
    """,
    ("forward_only", 3, 2): """
        rank 0: F0 F1
        rank 1: .  F0 F1
        rank 2: .  .  F0 F1
    """,
}

EVERY = [
    (name, p, m, v)
    for (name, kind), p, m in product(SCHEDULES.items(), range(1, 7), range(1, 14))
    for v in ((1, 2, 3) if kind.takes_v else (None,))
]


@pytest.mark.parametrize(("name", "p", "m"), STAIRCASES)
def test_staircase(name: str, p: int, m: int) -> None:
    assert drawing(build(name, p, m)) == inspect.cleandoc(STAIRCASES[name, p, m])


@pytest.mark.parametrize("name", SCHEDULES)
def test_staircase_of_the_docstring(name: str) -> None:
    make = SCHEDULES[name].make
    doc = inspect.getdoc(make) or ""
    p, m = map(int, re.search(r"p=(\d+), m=(\d+)", doc).groups())  # type: ignore[union-attr]
    drawn = [line.strip() for line in doc.splitlines() if re.match(r" *rank \d+: ", line)]
    actual = drawing(make(p, m)).splitlines()
    assert len(drawn) == p
    for told, true in zip(drawn, actual, strict=True):
        assert true.startswith(told.removesuffix("...")) if told.endswith("...") else told == true


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_complete_in_order_and_runs(name: str) -> None:
    for _, p, m, v in (case for case in EVERY if case[0] == name):
        schedule = build(name, p, m, v)
        assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == (name, p, m)
        run(schedule)
        verify(schedule)
        check_complete(schedule)


def check_complete(schedule: Schedule) -> None:
    """Each stage has every micro-batch once in F and, in training, once in B or in I and W, in FIFO order."""
    by_stage: dict[int, list[tuple[str, int]]] = {s: [] for s in range(schedule.num_stages)}
    for rank, order in enumerate(schedule.orders):
        for action in order:
            assert schedule.placement[action.stage] == rank
            by_stage[action.stage].append((action.kind, action.microbatch))
    for stage, work in by_stage.items():
        assert [k for kind, k in work if kind == "F"] == list(range(schedule.num_microbatches))
        if not schedule.trains:
            assert schedule.kinds == {"F"}
            continue
        assert [k for kind, k in work if kind in "BI"] == list(range(schedule.num_microbatches)), stage
        assert Counter(k for kind, k in work if kind == "I") == Counter(k for kind, k in work if kind == "W")
        for k in range(schedule.num_microbatches):
            kinds = "".join(kind for kind, other in work if other == k)
            assert kinds in ("FB", "FIW"), (stage, k)


def test_interleaved_with_one_stage_per_rank_is_1f1b() -> None:
    for p, m in product(range(1, 5), range(1, 9)):
        assert interleaved(p, m, 1).orders == one_f_one_b(p, m).orders


def test_stages_are_placed_on_a_loop_or_on_a_v() -> None:
    assert build("interleaved", 3, 4, 2).placement == loop(3, 2) == (0, 1, 2, 0, 1, 2)
    for name in ("zbv", "v_half", "v_min", "dualpipev"):
        assert build(name, 3, 4).placement == vee(3) == (0, 1, 2, 2, 1, 0)


def test_few_microbatches_of_dualpipev() -> None:
    whole = build("dualpipev", 3, 6)
    assert build("dualpipev", 3, 4) == whole.first(4)


def test_schedules_are_plain_data() -> None:
    """No module imports torch, or a part of Penstock that does; ``_registry`` finds the drawings for notebooks."""
    allowed = ("penstock.schedule", "penstock.errors", "penstock._registry", "penstock.json_schema")
    for path in Path(penstock.schedule.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                assert not name.startswith("torch"), path
                assert not name.startswith("penstock") or name.startswith(allowed), path
