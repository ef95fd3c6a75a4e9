"""The automatic schedule: properties of every result, for any costs, placement and memory."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import Costs, SearchResult, auto, build, simulate, verify
from penstock.schedule.schedule import loop, vee, with_recompute
from penstock.schedule.search.lower_bound import lower_bound, memory_bound_period, memory_time, recompute_choices
from penstock.schedule.search.orders import fixed_schedules, sequential_orders
from penstock.schedule.search.place_weight_grads import evaluate, list_schedule
from penstock.schedule.search.problem import Problem, make_problem
from tests.schedule.memory_check import fits_all
from tests.schedule.samples import placed

pytestmark = pytest.mark.slow

SHORT = 0.02
"""Seconds of search: the properties do not depend on it."""

TIMES = st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.0, 1.3, 4.0])
SIZES = st.sampled_from([0.0, 0.25, 1.0, 1.0, 3.0])


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of ``auto`` with a feasible cap."""
    p = draw(st.integers(1, 4))
    shape = draw(st.sampled_from(["loop", "vee", "any"]))
    if shape == "any":
        extra = draw(st.lists(st.integers(0, p - 1), max_size=5))
        placement = tuple(draw(st.permutations([*range(p), *extra])))
    else:
        placement = vee(p) if shape == "vee" else loop(p, draw(st.integers(1, 3)))
    count = len(placement)
    edges = None
    if draw(st.booleans()):
        pairs = [(src, dst) for dst in range(count) for src in range(dst)]
        skips = draw(st.lists(st.sampled_from(pairs), max_size=4)) if pairs else []
        edges = [*skips] if draw(st.booleans()) else [*((s, s + 1) for s in range(count - 1)), *skips]

    def each(of: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(draw(st.lists(of, min_size=count, max_size=count)))

    f, i, w = each(TIMES), each(TIMES), each(TIMES)
    b = draw(st.sampled_from([None, 0.7, 1.0, 1.2]))
    costs = Costs(
        f=f,
        i=i,
        w=w,
        b=None if b is None else tuple(b * (x + y) for x, y in zip(i, w, strict=True)),
        latency=draw(st.sampled_from([0.0, 0.0, 0.1, 2.0])),
        bytes=draw(st.sampled_from([0.0, 0.0, 1.0])),
        bandwidth=2.0,
        activation=each(SIZES),
        keep=each(st.sampled_from([1.0, 1.5])) if draw(st.booleans()) else draw(st.sampled_from([1.0, 1.0, 0.5, 0.0])),
        r=draw(st.sampled_from([None, 0.0, 2.0])),
        checkpoint=each(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
    )
    recompute = draw(st.sampled_from([False, False, None, True, "some"]))
    if recompute == "some":
        recompute = draw(st.sets(st.integers(0, count - 1)))
    plenty = make_problem(costs, placement, 1, math.inf, edges, True if recompute is None else recompute)[
        0
    ].with_full_backwards()
    factor = draw(st.sampled_from([None, 1.0, 1.5, 2.5, math.inf]))
    cap = (
        None if factor is None else [math.inf if factor == math.inf else factor * kept for kept in plenty.least_memory]
    )
    return {
        "costs": costs,
        "placement": placement,
        "m": draw(st.integers(1, 9)),
        "cap": cap,
        "edges": edges,
        "recompute": recompute,
    }


def problem_of(case: dict[str, Any]) -> Problem:
    return make_problem(*(case[key] for key in ("costs", "placement", "m", "cap", "edges", "recompute")))[0]


ONE_OF_THEM_SPLIT = {  # fits if only the stage is split whose weight gradients wait with no more than it keeps
    "costs": Costs(f=0.0, i=0.0, w=0.1, b=0.12, activation=(0.25, 1.0), keep=(1.0, 1.5)),
    "placement": (0, 0), "m": 2, "cap": [1.5], "edges": None, "recompute": None,
}  # fmt: skip


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(cases())
@example(ONE_OF_THEM_SPLIT)
def test_every_result_is_valid_and_at_least_as_fast_as_fixed_schedules(case: dict[str, Any]) -> None:
    found = auto(**case, seconds=SHORT)
    assert found.schedule.name == "auto"
    assert found.schedule.placement == case["placement"]
    assert found.schedule.num_microbatches == case["m"]
    assert found.schedule.trains
    verify(found.schedule, case["edges"])
    certificate = simulate(found.schedule, case["costs"], case["edges"])
    assert (found.makespan, found.peak_memory) == (certificate.makespan, certificate.peak_memory)
    assert all(peak <= cap * (1 + 1e-9) for peak, cap in zip(found.peak_memory, found.cap, strict=True))
    assert 0 <= found.lower_bound <= found.makespan
    assert found.gap >= 0

    recomputes = {(a.stage, a.microbatch) for order in found.schedule.orders for a in order if a.kind == "R"}
    problem = problem_of(case)
    if not problem.recompute_optional:
        stages = [s for s, recomputed in enumerate(problem.recomputed) if recomputed]
        assert recomputes == {(s, k) for s in stages for k in range(case["m"])}
    assert lower_bound(problem) <= found.makespan * (1 + 1e-9)
    modes = ["always" if always and not problem.recompute_optional else "never" for always in problem.recomputed]
    for fixed in fixed_schedules(problem.placement, problem.m):
        other = simulate(with_recompute(fixed, modes), case["costs"], case["edges"])
        if all(peak <= cap for peak, cap in zip(other.peak_memory, found.cap, strict=True)):
            assert found.makespan <= other.makespan * (1 + 1e-9), fixed.name


@settings(deadline=None, max_examples=40)
@given(cases())
def test_one_micro_batch_at_a_time_always_fits(case: dict[str, Any]) -> None:
    problem = recompute_choices(problem_of(case).relaxed_to_fit())[0]
    words = sequential_orders(problem)
    assert fits_all(problem, words)
    assert evaluate(problem, words) < math.inf


@pytest.mark.parametrize("placement", [loop(4), loop(4, 2), vee(4), (0, 1, 2, 3, 0, 0, 2)])
def test_list_scheduling_does_not_deadlock_for_lack_of_memory(placement: tuple[int, ...]) -> None:
    for factor in (1.0, 1.5, 2.0, 3.0):
        caps = [factor * placement.count(rank) for rank in range(4)]
        problem, _ = make_problem(Costs(latency=0.1), placement, 9, caps, None)
        makespan, words = list_schedule(problem)
        assert makespan < math.inf
        assert fits_all(problem, words)
        assert evaluate(problem, words) <= makespan


def test_fixed_schedules_are_compared_without_time_to_search() -> None:
    """More micro-batches than the search looks at, no time, and memory for all of them."""
    costs = Costs.per_rank(v=2, comm=0.5)
    found = auto(costs, loop(8, 2), 160, cap=200, seconds=0)
    assert found.makespan <= simulate(build("looped_bfs", 8, 160, 2), costs).makespan * (1 + 1e-9)


# Uniform costs: no order is faster -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("v", "shape", "sizes"),
    [(1, "loop", (1, 3, 8)), (2, "loop", (1, 2, 4, 16)), (2, "vee", (1, 2, 3, 8, 16)), (4, "loop", (2, 3, 4))],
)
def test_uniform_costs_have_no_gap(v: int, shape: str, sizes: tuple[int, ...]) -> None:
    for p, m in [(size, m) for size in sizes for m in (size, 2 * size, 3 * size + 1)]:
        found = auto(Costs.per_rank(v=v), vee(p) if shape == "vee" else loop(p, v), m, cap=p)
        assert found.gap < 1e-9, (p, m, str(found))
        assert found.makespan == pytest.approx(3 * m + (p - 1) / v), (p, m)


def test_many_micro_batches_extend_few() -> None:
    for placement in (loop(16, 2), vee(16)):
        found = auto(Costs.per_rank(v=2), placement, 128)
        assert found.makespan == pytest.approx(391.5)
        assert max(found.peak_memory) <= 16


def test_extending_keeps_the_period_of_the_busiest_rank() -> None:
    """Each micro-batch adds the work of the busiest rank, also for costs that no fixed schedule is made for."""
    costs = Costs(f=(1.0, 0.8, 1.1, 1.0), i=(1.2, 1.0, 1.0, 1.4), w=(0.7, 1.0, 0.9, 1.0), latency=0.1)
    few, many = (auto(costs, loop(4), m, cap=6, seconds=0.3).makespan for m in (16, 64))
    assert many - few <= 48 * 3.4 * 1.01


# Memory ----------------------------------------------------------------------------------------------------------


def test_default_cap_is_the_peak_of_1f1b() -> None:
    assert auto(Costs(), loop(4), 8, seconds=SHORT).cap == (4.0,) * 4
    assert auto(Costs(), loop(4), 2, seconds=SHORT).cap == (2.0,) * 4
    uneven = Costs(activation=(1.0, 5.0, 0.0, 2.0))
    assert auto(uneven, loop(4), 8, seconds=SHORT).cap == (15.0,) * 4  # rank 1 holds 3 micro-batches of 5
    assert auto(Costs.per_rank(v=2), vee(4), 8, seconds=SHORT).cap == (4.0,) * 4


def test_cap_with_more_memory_between_i_and_w() -> None:
    """With twice the memory between I and W, weight gradients run sooner."""
    costs = Costs(keep=(2.0, 1.0, 2.0, 0.5))
    for cap in (2.0, 4.0, 8.0):
        found = auto(costs, loop(4), 8, cap=cap, seconds=0.1)
        assert max(simulate(found.schedule, costs).peak_memory) <= cap
        assert found.peak_memory == simulate(found.schedule, costs).peak_memory


def test_less_memory_costs_time() -> None:
    tight, roomy = (auto(Costs.per_rank(v=2, comm=0.1), vee(4), 8, cap=cap, seconds=0.2) for cap in (2, 4))
    assert max(tight.peak_memory) <= 2
    assert tight.makespan > roomy.makespan


def test_more_memory_than_1f1b_is_used() -> None:
    costs = Costs(latency=1.0)
    assert auto(costs, loop(4), 16, cap=8, seconds=0.2).makespan < auto(costs, loop(4), 16, seconds=0.2).makespan


def test_each_rank_has_its_own_cap() -> None:
    found = auto(Costs(), loop(3), 6, cap=[1, 2, 3], seconds=SHORT)
    assert all(peak <= cap for peak, cap in zip(found.peak_memory, (1, 2, 3), strict=True))


def test_lower_bound_of_memory() -> None:
    """One micro-batch at a time, and no order is faster."""
    found = auto(Costs(), loop(4), 5, cap=1, seconds=SHORT)
    assert found.makespan == 5 * 9
    assert found.gap == 0


def test_infeasible_cap() -> None:
    costs = Costs(activation=(1.0, 2.0, 0.5, 1.5))
    with pytest.raises(ScheduleError) as caught:
        auto(costs, vee(2), 4, cap=2.0)
    assert str(caught.value) == (
        "no order fits: rank 0 needs at least 2.5 (one micro-batch in stages 0, 3), but its cap is 2, 0.5 too little. "
        "The least for all ranks: 2.5, 2.5. Raise the cap, use more ranks, or recompute"
    )


# Recompute -------------------------------------------------------------------------------------------------------


def recomputes(found: SearchResult) -> int:
    return sum(a.kind == "R" for order in found.schedule.orders for a in order)


def test_recomputes_pay_in_half_the_memory() -> None:
    """Two stages per rank in a loop, hops of a tenth. Orders that keep everything take 66.6, on a V."""
    costs = replace(Costs.per_rank(v=2, comm=0.1), checkpoint=0.02)
    found = auto(costs, loop(8, 2), 16, cap=4, recompute=None, repeatable=True)
    assert found.makespan <= 63
    assert max(found.peak_memory) <= 4 * (1 + 1e-9)
    assert 0 < recomputes(found) < 16 * 16
    assert found.makespan == simulate(found.schedule, costs).makespan


def test_nothing_is_recomputed_without_need() -> None:
    found = auto(Costs(), loop(4), 8, recompute=None)
    assert found.gap < 1e-9
    assert recomputes(found) == 0


def test_part_of_the_micro_batches_is_recomputed() -> None:
    """Memory for two micro-batches of the first stage only."""
    costs = Costs(activation=(2.0, 1.0), latency=2.0, checkpoint=0.0)
    kept, chosen = (auto(costs, (0, 1), 8, cap=[4.0, 4.0], recompute=how, seconds=0.2) for how in (False, None))
    assert chosen.makespan < kept.makespan
    assert 0 < recomputes(chosen) < 8


def test_a_recompute_fills_the_wait_for_the_gradient() -> None:
    found = auto(Costs(activation=(1.0, 1.0)), (0, 1), 1, recompute=[0], seconds=SHORT)
    assert found.schedule.orders[0][:2] == placed((0, 1), "0F0 0R0 0B0", "1F0 1B0").orders[0][:2]
    assert found.makespan == 5  # as long as without


def test_recompute_needs_less_than_one_micro_batch_in_all_stages() -> None:
    """Only one of four stages on the rank holds complete activations at a time."""
    costs = Costs(checkpoint=0.1)
    with pytest.raises(ScheduleError, match=r"use more ranks, or recompute$"):
        auto(costs, (0, 0, 0, 0), 2, cap=1.3)
    for recompute in (True, None):
        found = auto(costs, (0, 0, 0, 0), 2, cap=1.3, recompute=recompute, seconds=SHORT)
        assert max(found.peak_memory) == pytest.approx(1.3)
    with pytest.raises(ScheduleError, match=r"Raise the cap, or use more ranks$"):
        auto(costs, (0, 0, 0, 0), 2, cap=1.29, recompute=None)


def test_default_cap_with_recomputes() -> None:
    """p - r checkpoints, and one complete activation."""
    costs = Costs(checkpoint=0.25)
    assert auto(costs, loop(4), 8, recompute=True, seconds=SHORT).cap == (4 * 0.25 + 0.75,) * 4
    assert auto(costs, loop(4), 8, recompute=None, seconds=SHORT).cap == (4.0,) * 4


def test_lower_bound_trades_memory_for_recompute_time() -> None:
    """Stage 0 keeps its activation for 5, or for 4 and half of it for 1 more where that is recomputed."""
    costs = Costs(checkpoint=0.5)
    problem, _ = make_problem(costs, loop(2), 8, 1.25, None, None)
    assert memory_time(problem) == [(5.0, 4.5), (3.0, 3.0)]
    # With x of all micro-batches recomputed, rank 0 takes 3 + x for each, and keeps 5 - x / 2 in 1.25.
    x = (5 - 1.25 * 3) / (0.5 + 1.25)
    assert memory_bound_period(problem) == pytest.approx([3 + x, 3 / 1.25])
    forced = problem.with_recomputed([0])
    assert memory_bound_period(forced) == pytest.approx([4.5 / 1.25, 3.0])  # rank 1 has room for one, not for more


@pytest.mark.slow
def test_many_micro_batches_with_recomputes() -> None:
    """Each micro-batch adds the work of a rank, and little more than half a recompute."""
    costs = Costs.per_rank(v=2, comm=0.1)
    how: dict[str, Any] = {"cap": 4, "recompute": None, "seconds": 0.4, "repeatable": True}
    few, many = (auto(costs, loop(8, 2), m, **how) for m in (64, 128))
    assert max(many.peak_memory) <= 4 * (1 + 1e-9)
    assert many.makespan - few.makespan <= 64 * 3.7


# Odd inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "options", "message"),
    [
        ((), {}, "auto needs at least 1 stage: the placement is empty"),
        ((0, 2), {}, "rank 1 of the placement (0, 2) holds no stage"),
        ((0, -1), {}, "rank -1 of the placement (0, -1) does not exist"),
        ((0, 1), {"m": 0}, "auto needs at least 1 micro-batch, not 0"),
        ((0, 1), {"cap": [4.0]}, "cap has 1 numbers, there are 2 ranks: give one number, or 2"),
        ((0, 1), {"cap": math.nan}, "no order fits"),
        ((0, 1), {"seconds": -1.0}, "seconds=-1.0"),
        ((0, 1), {"seconds": math.inf}, "seconds=inf"),
        ((0, 1), {"recompute": [2]}, "recompute names stage 2, but there are 2 stages (0..1)"),
        ((0, 1), {"edges": [(1, 0)]}, "edge 1->0 is not possible"),
        ((0, 1), {"costs": Costs(f=(1.0,))}, "cost f has 1 numbers"),
    ],
)
def test_wrong_arguments(placement: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"costs": Costs(), "m": 2, **options}
    with pytest.raises(ScheduleError) as caught:
        auto(arguments.pop("costs"), placement, arguments.pop("m"), **arguments)
    assert message in str(caught.value)


def test_zero_durations() -> None:
    found = auto(Costs(f=0, i=0, w=0), loop(2), 3, seconds=SHORT)
    assert (found.makespan, found.lower_bound, found.gap) == (0, 0, 0)


def test_stages_without_activations() -> None:
    """An embedding and a head without activations, on ranks with other stages."""
    costs = Costs(f=(0.1, 1, 1, 0.8), i=(0, 1, 1, 0.8), w=(0.1, 1, 1, 0.8), activation=(0.0, 1.0, 1.0, 0.0))
    found = auto(costs, (0, 0, 1, 1), 8, cap=2, seconds=0.2)
    assert max(found.peak_memory) <= 2
    assert found.gap < 0.02


# Fused backwards, determinism, no time ---------------------------------------------------------------------------


def test_a_backward_is_fused_where_that_delays_nothing() -> None:
    """Rank 0 waits for the gradient of rank 1; nobody waits for that of rank 0."""
    found = auto(Costs(), loop(2), 1, seconds=SHORT)
    assert found.schedule.orders == placed((0, 1), "0F0 0B0", "1F0 1I0 1W0").orders


def test_a_cheaper_fused_backward_is_used() -> None:
    """I and W together take twice the time of B, so few backwards are split."""
    found = auto(Costs(f=1, i=1, w=1, b=1), loop(2), 8, seconds=0.2)
    assert found.makespan <= simulate(build("1f1b", 2, 8), Costs(f=1, i=1, w=1, b=1)).makespan
    assert sum(a.kind == "B" for order in found.schedule.orders for a in order) >= 12


def test_results_are_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the time never expires, the result depends on the arguments alone."""
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)

    def found(seed: int) -> SearchResult:
        return auto(Costs.per_rank(v=2, comm=0.1), vee(4), 6, cap=2.5, seconds=0.1, seed=seed)

    assert found(0) == found(0)
    assert found(1) == found(1)


def test_no_time_to_search() -> None:
    found = auto(Costs.per_rank(v=2, comm=0.1), vee(4), 40, cap=3, seconds=0)
    verify(found.schedule)
    assert max(found.peak_memory) <= 3


def test_text_of_a_result() -> None:
    assert str(auto(Costs(), loop(2), 4, seconds=SHORT)) == (
        "makespan 13, lower bound 13: no order is faster\npeak memory 2 on rank 0, with a cap of 2"
    )
    found = auto(Costs(latency=0.5), loop(2), 4, seconds=SHORT)
    assert f"at most {found.gap:.1%} slower than the best order" in str(found)
