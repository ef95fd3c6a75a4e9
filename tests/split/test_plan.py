"""A plan is plain data: it prints as a table, and saves and loads as JSON."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock as ps
from tests.support.models import mlp


def model(width: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))


def table(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_prints_as_a_table() -> None:
    # Bytes count the buffers too: BatchNorm has 6 floats of statistics and a counter of 8 bytes.
    assert str(ps.split(model(), balance=[2, 2])).splitlines() == table("""
stage  rank  layers  parameters  bytes  sends to
─────  ────  ──────  ──────────  ─────  ────────
    0  -     0 1             15     92  1
    1  -     2 3              4     16  -
""")


def test_a_pipelines_plan_says_where_each_stage_is() -> None:
    with ps.Pipeline(ps.split(mlp(3), stages=4), schedule="interleaved", devices=["cpu", "cpu"]) as pipe:
        rows = str(pipe.plan).splitlines()[2:]
    assert [row.split()[:3] for row in rows] == [
        ["0", "0", "cpu"],
        ["1", "1", "cpu"],
        ["2", "0", "cpu"],
        ["3", "1", "cpu"],
    ]


def test_ties_stand_under_the_table() -> None:
    layer = nn.Linear(2, 2, bias=False)
    text = str(ps.split(nn.Sequential(layer, nn.ReLU(), layer), stages=3))
    assert text.splitlines()[-1] == "tie: 0.weight = 2.weight (stages 0, 2)"


def test_many_layers_do_not_make_a_wide_table() -> None:
    text = str(ps.split(nn.Sequential(*(nn.ReLU() for _ in range(100))), stages=2))
    assert max(map(len, text.splitlines())) < 80
    assert "0 … 49 (50 layers)" in text


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_saved_loads_equal(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    net = nn.Sequential(layer, nn.ReLU(), layer)
    plan = ps.split(net, balance=[2, 1])
    plan.save(tmp_path / "plan.json")
    assert ps.Plan.load(tmp_path / "plan.json") == plan
    assert ps.Plan.load(str(tmp_path / "plan.json"), net) == plan


def test_a_placed_plan_keeps_its_places(tmp_path: Path) -> None:
    with ps.Pipeline(ps.split(model(), stages=2)) as pipe:
        pipe.plan.save(tmp_path / "plan.json")
        loaded = ps.Plan.load(tmp_path / "plan.json")
        assert loaded == pipe.plan
        assert (loaded.ranks, loaded.devices) == ((0, 1), tuple(str(d) for d in pipe.plan.devices or ()))


def test_the_file_is_json_without_the_model(tmp_path: Path) -> None:
    ps.split(model(), balance=[2, 2]).save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["stages"][0] == {"layers": ["0", "1"], "parameters": 15, "bytes": 92}
    assert "model" not in data


def test_a_loaded_plan_runs_with_its_model(tmp_path: Path) -> None:
    net = model()
    ps.split(net, balance=[2, 2]).save(tmp_path / "plan.json")
    with ps.Pipeline(ps.Plan.load(tmp_path / "plan.json", net), nn.MSELoss(), microbatches=2) as pipe:
        pipe.step(torch.ones(4, 2), torch.ones(4, 1))
    assert all(p.grad is not None for p in net.parameters())


def test_without_a_model_it_says_how_to_get_one(tmp_path: Path) -> None:
    ps.split(model(), stages=2).save(tmp_path / "plan.json")
    plan = ps.Plan.load(tmp_path / "plan.json")
    with pytest.raises(ps.PlanError, match=r"Plan\.load\(path, model\)"):
        plan.stage_module(0)
    with pytest.raises(ps.PlanError, match=r"Plan\.load\(path, model\)"):
        ps.Pipeline(plan)


# 2 -> 5 wide, another number of layers, the same sizes under other names
OTHERS = {
    "wider": (model(5), r"stage 0.*parameters=15.*parameters=25"),
    "longer": (nn.Sequential(*model(), nn.ReLU()), r"4 layers.*has 5"),
    "renamed": (nn.Sequential(OrderedDict(zip("abcd", model(), strict=True))), r"0 1 2 3.*a b c d"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_plan_of_another_model_is_refused_with_both_numbers(tmp_path: Path, other: str) -> None:
    ps.split(model(), balance=[2, 2]).save(tmp_path / "plan.json")
    net, says = OTHERS[other]
    with pytest.raises(ps.PlanError, match=says):
        ps.Plan.load(tmp_path / "plan.json", net)


@pytest.mark.parametrize("text", ["", "not json", "[]", "3", "{}", '{"penstock_plan": 1}'])
def test_a_file_that_is_no_plan_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ps.PlanError, match=r"other\.json is not a saved plan"):
        ps.Plan.load(tmp_path / "other.json")


def test_a_plan_of_another_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"penstock_plan": 99}')
    with pytest.raises(ps.PlanError, match=r"format 99.*expected 1"):
        ps.Plan.load(tmp_path / "plan.json")


def test_plans_are_equal_by_what_they_say() -> None:
    assert ps.split(model(), stages=2) == ps.split(model(), stages=2)
    assert ps.split(model(), balance=[1, 3]) != ps.split(model(), balance=[2, 2])
