"""(i) Schedule search: regret against the best known orders, gain over fixed schedules, and speed.

The scenarios are those of ``../shared/peers/scenarios.json``: costs per stage for 4 and 8 ranks, the latency of a hop,
the makespans of fixed schedules, and the best known orders for one stage per rank, two in a loop and two in a V, at the
memory of 1F1B and at fractions of it. The costs of the first scenarios are also run on 16 ranks, without a best known
order.

Times of the search are CPU time of one thread (``thread_time``), independent of other jobs on the machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.report import check, table
from penstock.schedule import Costs, auto, loop, simulate, vee
from penstock.schedule.search.lower_bound import recompute_choices
from penstock.schedule.search.orders import fixed_schedules
from penstock.schedule.search.place_weight_grads import list_schedule
from penstock.schedule.search.problem import make_problem

__all__ = ["run", "show"]

SCENARIOS = Path(__file__).parents[2] / "shared" / "peers" / "scenarios.json"
CAPS = ("1.0p", "0.75p", "0.5p")
SECONDS = 0.8
CHECKPOINT = 0.02  # the input of a stage: about one of the 34 to 50 tensors of its size that a transformer block saves


def run(quick: bool = False) -> dict[str, Any]:
    """Run all measurements."""
    rows = list(_instances(quick))
    placed = [row for row in rows if "best_known" in row]
    regrets = {cap: [row["makespan"] / row["best_known"] - 1 for row in placed if row["cap"] == cap] for cap in CAPS}
    gains = {cap: _gains(rows, cap) for cap in CAPS}
    named = {f"{cap}, only the file's": _gains(placed, cap, ours=False) for cap in CAPS}
    worse = [row for row in rows if row["makespan"] > row["fixed_here"] * (1 + 1e-9)]
    uniform = list(_uniform(quick))
    speed = list(_speed(quick))
    again = list(_recompute())
    replayed = min(row["makespan"] for row in again)
    large = [row for row in speed if row["m"] == 128]
    flat = {m: mean(row["seconds"] for row in speed if row["m"] == m) for m in {row["m"] for row in speed}}
    targets = [
        check("uniform costs, no latency: largest gap, %", 100 * max(row["gap"] for row in uniform), most=1e-6),
        check("regret at 1.0p, mean, %", 100 * mean(regrets["1.0p"]), most=0.5),
        check("regret at 1.0p, largest, %", 100 * max(regrets["1.0p"]), most=2.0),
        check("gain over the best fixed at 0.75p, mean, %", 100 * mean(gains["0.75p"]), least=5.0),
        check("gain over the best fixed at 0.5p, mean, %", 100 * mean(gains["0.5p"]), least=5.0),
        check("recompute chosen, hops of a tenth, p=8 m=16 at 0.5p: makespan", replayed, most=63.0),
        check("orders slower than a fixed schedule under the same cap", len(worse), most=0),
        check("p=16 m=128, 2 stages per rank: longest search, s", max(row["seconds"] for row in large), most=1.0),
        check("p=16 m=128: time to the first order, ms", 1e3 * max(row["first"] for row in large), most=100),
        check("time at m=16p over time at m=4p", flat[256] / flat[64], most=2.0) if not quick else None,
    ]
    return {
        "targets": [target for target in targets if target],
        "regret": {cap: _spread(values) for cap, values in regrets.items()},
        "gain": {cap: _spread(values) for cap, values in (gains | named).items()},
        "recompute": again,
        "uniform": uniform,
        "speed": speed,
        "instances": rows,
    }


def show(result: dict[str, Any]) -> None:
    """Print the tables of ``result``."""
    table("regret against the best order known for the placement, %", _percent(result["regret"]))
    table("gain of the best placement over the best fixed schedule that fits, %", _percent(result["gain"]))
    table("recompute, or not, in half of 1F1B's memory", result["recompute"])
    table("uniform costs, no latency", result["uniform"])
    table("speed, seconds of a core", result["speed"])


def _instances(quick: bool) -> Iterator[dict[str, Any]]:
    """For every scenario, placement and cap: the result of ``auto``, the best known order, and the fixed schedules."""
    for scenario in _scenarios(quick):
        p, m = scenario["p"], scenario["m"]
        for shape, v, placement in (("v1", 1, loop(p)), ("loop2", 2, loop(p, 2)), ("V", 2, vee(p))):
            stages = scenario["costs_per_stage"]["1_stage_per_rank" if v == 1 else "2_stages_per_rank"]
            costs = Costs(
                f=tuple(stages["F"]),
                i=tuple(stages["I"]),
                w=tuple(stages["W"]),
                latency=scenario["hop_latency"],
                activation=1 / v,
            )
            problem, _ = make_problem(costs, placement, m, None, None)
            own = [
                (s.makespan, max(s.peak_memory))
                for s in (simulate(f, costs) for f in fixed_schedules(problem.placement, problem.m))
            ]
            for cap in CAPS:
                room = float(cap[:-1]) * p
                begin = time.thread_time()
                found = auto(costs, placement, m, cap=room, seconds=SECONDS)
                row = {
                    "scenario": scenario["name"],
                    "p": p,
                    "m": m,
                    "placement": shape,
                    "cap": cap,
                    "makespan": found.makespan,
                    "floor": found.lower_bound,
                    "seconds": time.thread_time() - begin,
                    "fixed_here": min((t for t, kept in own if kept <= room + 1e-9), default=float("inf")),
                }
                if "by_memory_cap" in scenario:
                    row["best_known"] = scenario["by_memory_cap"][cap][shape]["best_known"]
                    named = scenario["fixed"].values()
                    fits = (f["makespan"] for f in named if f["peak_activations"] <= room + 1e-9)
                    row["fixed_named"] = min(fits, default=float("inf"))
                yield row


def _scenarios(quick: bool) -> Iterator[dict[str, Any]]:
    """The scenarios of the file; and the costs of the first ones on 16 ranks."""
    if not SCENARIOS.exists():
        raise FileNotFoundError(f"the scenarios are not there: {SCENARIOS}")
    known = json.loads(SCENARIOS.read_text())["scenarios"]
    if quick:
        known = [scenario for scenario in known if (scenario["p"], scenario["m"]) == (4, 8)][:3]
    yield from known
    for scenario in [] if quick else known[:7]:
        yield {
            "name": scenario["name"],
            "p": 16,
            "m": 32,
            "hop_latency": scenario["hop_latency"],
            "costs_per_stage": {
                key: {kind: _widen(times, 16 * len(times) // 4) for kind, times in stages.items()}
                for key, stages in scenario["costs_per_stage"].items()
            },
        }


def _widen(times: list[float], count: int) -> list[float]:
    """More stages: repeat the middle one, keep the first and the last."""
    return [times[0], *([times[1]] * (count - 2)), times[-1]]


def _gains(rows: list[dict[str, Any]], cap: str, ours: bool = True) -> list[float]:
    """For each instance, the relative gain of the best placement over the best fixed schedule that fits.

    The fixed schedules are those of the file and, with ``ours``, those of Penstock.
    """
    gains = []
    for key in dict.fromkeys((row["scenario"], row["p"], row["m"]) for row in rows):
        same = [row for row in rows if row["cap"] == cap and (row["scenario"], row["p"], row["m"]) == key]
        fixed = min(row.get("fixed_named", float("inf")) for row in same)
        if ours:
            fixed = min(fixed, *(row["fixed_here"] for row in same))
        gains.append(1 - min(row["makespan"] for row in same) / fixed)
    return gains


def _recompute() -> Iterator[dict[str, Any]]:
    """8 ranks, 16 micro-batches, hop latency 0.1, half of 1F1B's memory: with and without recompute."""
    p, m = 8, 16
    for shape, v, placement in (("v1", 1, loop(p)), ("loop2", 2, loop(p, 2)), ("V", 2, vee(p))):
        costs = replace(Costs.per_rank(v=v, comm=0.1), checkpoint=CHECKPOINT)
        for recompute in (False, None):
            begin = time.thread_time()
            found = auto(costs, placement, m, cap=p / 2, recompute=recompute, seconds=SECONDS)
            yield {
                "placement": shape,
                "recompute": "chosen" if recompute is None else "never",
                "makespan": found.makespan,
                "floor": found.lower_bound,
                "recomputes": sum(a.kind == "R" for order in found.schedule.orders for a in order),
                "of": m * len(placement),
                "seconds": time.thread_time() - begin,
            }


def _uniform(quick: bool) -> Iterator[dict[str, Any]]:
    for p in (2, 4, 8) if quick else (2, 3, 4, 6, 8, 12, 16):
        for m in (p, 2 * p) if quick else (p, 2 * p, 3 * p + 1, 8 * p):
            for shape, v, placement in (
                ("loop", 1, loop(p)),
                ("loop", 2, loop(p, 2)),
                ("V", 2, vee(p)),
                ("loop", 4, loop(p, 4)),
            ):
                begin = time.thread_time()
                found = auto(Costs.per_rank(v=v), placement, m, cap=float(p), seconds=SECONDS)
                took = time.thread_time() - begin
                row = {"p": p, "m": m, "placement": shape, "v": v, "makespan": found.makespan}
                yield {**row, "floor": found.lower_bound, "gap": found.gap, "seconds": took}


def _speed(quick: bool) -> Iterator[dict[str, Any]]:
    """16 ranks, two stages each, hop latency 0.1: seconds of the search and until the first order."""
    p = 16
    for m in (128,) if quick else (32, 64, 128, 256):
        for shape, placement in (("loop", loop(p, 2)), ("V", vee(p))):
            costs = Costs.per_rank(v=2, comm=0.1)
            begin = time.thread_time()
            problem, _ = make_problem(costs, placement, m, None, None)
            list_schedule(recompute_choices(problem)[0])
            first = time.thread_time() - begin
            begin = time.thread_time()
            found = auto(costs, placement, m, seconds=SECONDS)
            took = time.thread_time() - begin
            yield {"p": p, "m": m, "placement": shape, "seconds": took, "first": first, "gap": found.gap}


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": mean(values), "least": min(values), "most": max(values)}


def _percent(spreads: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    return [{"cap": cap, **{key: 100 * value for key, value in s.items()}} for cap, s in spreads.items()]
