"""The automatic schedule against the best known orders and an exact solver."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.schedule.costs import Costs
from penstock.schedule.schedule import loop, vee
from penstock.schedule.search import auto
from penstock.schedule.search.lower_bound import lower_bound
from penstock.schedule.search.problem import make_problem
from tests.schedule.exact_solver import optimum

SCENARIOS = Path(__file__).parents[3] / "shared" / "peers" / "scenarios.json"
SHAPES = {"v1": (1, loop(4)), "loop2": (2, loop(4, 2)), "V": (2, vee(4))}


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the search never expires, however slow or busy the machine."""
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)


def scenarios() -> list[dict[str, Any]]:
    """The scenarios of four ranks and eight micro-batches."""
    if not SCENARIOS.exists():
        pytest.skip(f"there is no {SCENARIOS.name} beside this repository")
    known = json.loads(SCENARIOS.read_text(encoding="utf-8"))["scenarios"]
    return [scenario for scenario in known if (scenario["p"], scenario["m"]) == (4, 8)]


def costs_of(scenario: dict[str, Any], v: int) -> Costs:
    stages = scenario["costs_per_stage"]["1_stage_per_rank" if v == 1 else "2_stages_per_rank"]
    f, i, w = (tuple(stages[kind]) for kind in "FIW")
    return Costs(f=f, i=i, w=w, latency=scenario["hop_latency"], activation=1 / v)


@pytest.mark.slow
def test_regret_at_the_memory_of_1f1b() -> None:
    regrets = []
    for scenario in scenarios():
        for shape, (v, placement) in SHAPES.items():
            found = auto(costs_of(scenario, v), placement, 8, seconds=0.2)
            best = scenario["by_memory_cap"]["1.0p"][shape]
            assert found.lower_bound <= best["best_known"] * (1 + 1e-4)  # the file has four digits
            regrets.append(found.makespan / best["best_known"] - 1)
    assert max(regrets) <= 0.02
    assert sum(regrets) / len(regrets) <= 0.005


@pytest.mark.slow
@pytest.mark.parametrize(("cap", "least"), [(3, 0.025), (2, 0.03)])
def test_gain_in_less_memory(cap: int, least: float) -> None:
    """The best placement is never slower than the best fixed schedule that fits, about as fast as the best order known
    at least, and faster on average.
    """
    gains = []
    for scenario in scenarios()[::2]:
        fixed = min(f["makespan"] for f in scenario["fixed"].values() if f["peak_activations"] <= cap)
        known = min(best["best_known"] for best in scenario["by_memory_cap"][{3: "0.75p", 2: "0.5p"}[cap]].values())
        found = min(
            auto(costs_of(scenario, v), placement, 8, cap=cap, seconds=0.15).makespan
            for v, placement in SHAPES.values()
        )
        assert found <= known * 1.015
        gains.append(1 - found / fixed)
    assert min(gains) >= -1e-4
    assert sum(gains) / len(gains) >= least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "cap", "m"),
    [("v1", 1.0, 4), ("v1", 4.0, 6), ("loop2", 2.0, 4), ("V", 1.0, 4)],
)
def test_as_good_as_the_exact_solver(shape: str, cap: float, m: int) -> None:
    v, placement = (SHAPES | {"loop2": (2, loop(2, 2)), "V": (2, vee(2))})[shape]
    costs = Costs(f=1.0 / v, i=1.3 / v, w=0.7 / v, latency=0.1, activation=1 / v)
    problem, _ = make_problem(costs, placement, m, cap, None)
    best = optimum(problem, seconds=20)
    if best is None:
        pytest.skip("no optimum is proven in time")
    found = auto(costs, placement, m, cap=cap, seconds=1.0)
    assert lower_bound(problem) <= best + 1e-6
    assert best - 0.01 <= found.makespan <= best * 1.02  # the solver rounds times
