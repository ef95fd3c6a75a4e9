"""An exact solver (OR-tools CP-SAT) for small problems: what no order can beat, and some order reaches."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.schedule.search.problem import Problem

__all__ = ["optimum"]

_TICKS = 1000
"""Parts of a unit of time: times are whole numbers to the solver."""


def optimum(problem: Problem, seconds: float) -> float | None:
    """The least makespan, or None where it is not proven in time. Skips the test where there is no such solver.

    A start for every F, I and W, in the order of the micro-batches within each class; one action at a time on a rank;
    an activation from the start of F to the end of W, and no more of them than fit. All stages keep the same.
    """
    solver: Any = pytest.importorskip("ortools.sat.python.cp_model")
    count, m = problem.num_stages, problem.m
    size = problem.activation[0]
    assert set(problem.activation) == {size}
    assert set(problem.keep) == {1}

    def ticks(time: float) -> int:
        return round(time * _TICKS)

    times = {kind: [ticks(problem.durations[n * count + s]) for s in range(count)] for n, kind in enumerate("FIBW")}
    horizon = m * sum(times["F"] + times["I"] + times["W"]) + m * sum(2 * ticks(time) for _, _, time in problem.arcs)
    model = solver.CpModel()
    start = {
        (kind, s, k): model.new_int_var(0, horizon, f"{s}{kind}{k}")
        for kind in "FIW"
        for s in range(count)
        for k in range(m)
    }
    end = {(kind, s, k): var + times[kind][s] for (kind, s, k), var in start.items()}
    for k in range(m):
        for s in range(count):
            model.add(start["I", s, k] >= end["F", s, k])
            model.add(start["W", s, k] >= end["I", s, k])
            if k:
                model.add(start["F", s, k] >= end["F", s, k - 1])
                model.add(start["I", s, k] >= end["I", s, k - 1])
                model.add(start["W", s, k] >= end["W", s, k - 1])
        for src, dst, time in problem.arcs:
            model.add(start["F", dst, k] >= end["F", src, k] + ticks(time))
            model.add(start["I", src, k] >= end["I", dst, k] + ticks(time))
    for rank, stages in enumerate(problem.stages_of):
        mine = [(s, k) for s in stages for k in range(m)]
        model.add_no_overlap(
            model.new_fixed_size_interval_var(start[kind, s, k], times[kind][s], "") for s, k in mine for kind in "FIW"
        )
        stays = []
        for s, k in mine:
            stay = model.new_int_var(0, horizon, "")
            stays.append(model.new_interval_var(start["F", s, k], stay, end["W", s, k], ""))
        model.add_cumulative(stays, [1] * len(stays), int(problem.cap[rank] / size * (1 + 1e-9)))
    makespan = model.new_int_var(0, horizon, "makespan")
    for s in range(count):
        model.add(makespan >= end["W", s, m - 1])
    model.minimize(makespan)
    search = solver.CpSolver()
    search.parameters.max_time_in_seconds = seconds
    search.parameters.num_workers = 2
    status = search.solve(model)
    return search.objective_value / _TICKS if status == solver.OPTIMAL else None
