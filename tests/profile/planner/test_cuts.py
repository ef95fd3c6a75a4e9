"""Partitions of layers into stages: optimal where they are straight, else close to the optimum."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.profile.costs import Crossing, LayerCosts, Link, ModelCosts, SharedParameters
from penstock.profile.planner.cuts import (
    Ranks,
    Segments,
    balanced,
    bottleneck,
    choose_recompute,
    find_cuts,
    placement_of,
    rank_bytes,
)

pytestmark = pytest.mark.slow

SHAPES = [("straight", 1), ("v", 2), ("loop", 2), ("loop", 3), ("loop", 4)]


def layer(i: int, work: float, activation: float = 0.0, parameters: float = 0.0) -> LayerCosts:
    return LayerCosts(f"l{i}", work / 3, work / 3, work / 3, work / 3, activation, parameters, 0.0, 0.0)


def model(works: list[float], **more: object) -> ModelCosts:
    crossings = tuple(Crossing(i, i + 1, 1.0) for i in range(len(works) - 1))
    return ModelCosts(tuple(layer(i, work) for i, work in enumerate(works)), crossings, **more)  # type: ignore[arg-type]


def best_cuts(segments: Segments, ranks: Ranks, shape: str, v: int) -> tuple[int, ...] | None:
    found = find_cuts(segments, ranks, placement_of(shape, len(ranks), v))
    return found[-1] if found else None


def alike(p: int) -> Ranks:
    return Ranks((1.0,) * p, (inf,) * p, (1.0,) * p)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Segments, Ranks, str, int]:
    shape, v = draw(st.sampled_from(SHAPES))
    p = draw(st.integers(1, {1: 4, 2: 3, 3: 3, 4: 2}[v]))
    n = draw(st.integers(p * v, {1: 8, 2: 8, 3: 11, 4: 11}[v]))
    recompute = draw(st.sampled_from([False, True, None]))
    chain = draw(st.booleans())
    whole = st.integers(0, 6).map(float)
    layers = tuple(layer(i, draw(whole), draw(whole), draw(whole)) for i in range(n))
    crossings = [Crossing(i, i + 1, 1.0 if chain else draw(whole)) for i in range(n - 1)]
    if n > 2 and not chain and draw(st.booleans()):
        crossings.insert(1, Crossing(0, n - 1, draw(whole)))
    shared = (SharedParameters((0, n - 1), min(layers[0].parameters, layers[-1].parameters)),) * (n > 1)
    link = Link(0.0, draw(st.sampled_from([inf, 1.0, 0.3])))
    costs = ModelCosts(layers, tuple(crossings), shared=shared, link=link)
    numbers = [draw(st.tuples(*[of] * p)) for of in (st.sampled_from([1.0, 0.5]), st.sampled_from([inf, 40.0, 20.0]))]
    return Segments(costs), Ranks(numbers[0], numbers[1], (2.0,) * p, recompute), shape, v


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(problem=problems())
def test_straight_partitions_are_optimal_and_no_other_is_better(problem: tuple[Segments, Ranks, str, int]) -> None:
    segments, ranks, shape, v = problem
    placement = placement_of(shape, len(ranks), v)
    best = min(bottleneck(segments, ranks, placement, cuts) for cuts in all_cuts(segments, placement))
    for found in (best_cuts(segments, ranks, shape, v), balanced(segments, ranks, placement)):
        assert found is None or bottleneck(segments, ranks, placement, found) >= best * (1 - 1e-12)
    if v == 1:
        straight = best_cuts(segments, ranks, shape, v)
        assert (inf if straight is None else bottleneck(segments, ranks, placement, straight)) == pytest.approx(best)


def all_cuts(segments: Segments, placement: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [(*inner, segments.n) for inner in combinations(range(1, segments.n), len(placement) - 1)]


@settings(max_examples=100, deadline=None)
@given(problems())
def test_what_is_recomputed_is_the_least_that_keeps_the_memory(problem: tuple[Segments, Ranks, str, int]) -> None:
    segments, ranks, _, v = problem
    bounds = [segments.n * at // v for at in range(v + 1)]
    runs = list(pairwise(bounds))
    for rank in range(len(ranks)):
        found = choose_recompute(segments, ranks, rank, runs)
        fit = [
            (sum(segments.total("recompute", *runs[number]) for number in again), again)
            for size in range(v + 1)
            for again in combinations(range(v), size)
            if (ranks.recompute is None or size == v * ranks.recompute)
            and _peak(segments, runs, again, 2) <= ranks.memory[rank]
        ]
        assert (found is None) == (not fit)
        assert found is None or sum(segments.total("recompute", *runs[number]) for number in found) == min(fit)[0]


def _peak(segments: Segments, runs: list[tuple[int, int]], again: tuple[int, ...], in_flight: int) -> float:
    """All micro-batches are in flight everywhere, and the backward of one of them runs in one stage after the other."""
    peaks = []
    for here in range(len(runs)):
        kept = 0.0
        for number, run in enumerate(runs):
            there = segments.activation_bytes(*run)
            waiting = min(there, segments.input_bytes(*run)) if number in again else there
            there = there if number == here else waiting
            kept += segments.static_bytes(*run) + (in_flight - 1) * waiting + there
        peaks.append(kept)
    return max(peaks)


def test_what_two_layers_share_counts_once_in_a_stage() -> None:
    layers = tuple(layer(i, 1.0, 0.0, 8.0) for i in range(4))
    segments = Segments(ModelCosts(layers, model([1.0] * 4).crossings, shared=(SharedParameters((0, 1, 3), 8.0),)))
    assert segments.static_bytes(0, 1) == 8
    assert segments.static_bytes(0, 2) == 8
    assert segments.static_bytes(0, 4) == 16  # 8 of the tie, 8 of layer 2
    assert segments.static_bytes(2, 4) == 16


def test_activations_that_two_layers_keep_count_once_in_a_stage() -> None:
    base = model([1.0] * 3)
    layers = tuple(layer(i, 1.0, 10.0) for i in range(3))
    segments = Segments(ModelCosts(layers, base.crossings, kept_together=((0, 1, 4.0), (1, 2, 4.0))))
    assert [segments.activation_bytes(*run) for run in ((0, 2), (0, 3), (1, 2))] == [16.0, 22.0, 10.0]


def test_a_stage_that_recomputes_keeps_what_came_to_it() -> None:
    base = model([3.0] * 3)
    layers = tuple(layer(i, 3.0, 10.0, 2.0) for i in range(3))
    skip = Crossing(0, 2, 5.0)
    segments = Segments(ModelCosts(layers, (base.crossings[0], skip, base.crossings[1])))
    assert [segments.input_bytes(*run) for run in ((0, 3), (1, 2), (1, 3), (2, 3))] == [0, 1, 6, 6]
    assert segments.total("recompute", 1, 3) == pytest.approx(2.0)
    assert (
        rank_bytes(segments, [(1, 3)], (0,), 4) == 4 + 3 * 6 + 20
    )  # three inputs, and one micro-batch that is there again
    assert (
        rank_bytes(segments, [(0, 1), (2, 3)], (0, 1), 4) == 4 + 4 * 6 + 10
    )  # of the two stages one is there at a time
    assert rank_bytes(segments, [(0, 1), (2, 3)], (0,), 4) == 4 + 4 * 10 + 10


def test_a_value_for_several_layers_crosses_a_cut_once() -> None:
    crossings = (Crossing(0, 1, 4.0, ((7, 4.0),)), Crossing(0, 2, 4.0, ((7, 4.0),)), Crossing(1, 2, 2.0))
    segments = Segments(ModelCosts(tuple(layer(i, 1.0) for i in range(3)), crossings))
    assert segments.cut_bytes == [0.0, 4.0, 6.0, 0.0]


@pytest.mark.parametrize(
    ("shape", "p", "v"), [("straight", 64, 1), ("v", 32, 2), ("loop", 32, 2), ("loop", 16, 4), ("loop", 8, 8)]
)
def test_two_hundred_layers_in_sixty_four_stages(shape: str, p: int, v: int) -> None:
    works = [1.0 + (i * 7919 % 13) / 13 for i in range(200)]
    segments, ranks = Segments(model(works)), alike(p)
    found = best_cuts(segments, ranks, shape, v)
    assert found is not None
    assert len(found) == 64
    value = bottleneck(segments, ranks, placement_of(shape, p, v), found)
    if v == 1:
        assert ranks_below(works, value * (1 - 1e-9)) > p
    else:
        assert 1 <= value / (sum(works) / p) < (1.03 if v > 2 else 1.10)


def ranks_below(works: list[float], limit: float) -> int:
    """The number of straight ranks that are needed if each takes at most ``limit``."""
    count, left = 0, 0.0
    for work in works:
        if work > left:
            count, left = count + 1, limit
        left -= work
    return count


@pytest.mark.parametrize("recompute", [False, True, None])
@pytest.mark.parametrize(("p", "v"), [(8, 3), (16, 4), (8, 8)])
def test_loops_of_equal_layers_between_two_others(p: int, v: int, recompute: bool | None) -> None:
    """A rank has a whole number of equal layers: less than one of them above its share of the work."""
    works = [0.1, *[1.0] * 198, 2.4]
    layers = tuple(layer(i, work, 1.0, 1.0) for i, work in enumerate(works))
    segments = Segments(ModelCosts(layers, model(works).crossings))
    memory = 1.3 * (segments.static_bytes(0, 200) + p * segments.activation_bytes(0, 200)) / p
    ranks = Ranks((1.0,) * p, (memory,) * p, (float(p),) * p, recompute)
    found = best_cuts(segments, ranks, "loop", v)
    assert found is not None
    again = 4 / 3 if recompute else 1.0
    assert bottleneck(segments, ranks, placement_of("loop", p, v), found) < again * (sum(segments.layer_work) / p + 1)


@pytest.mark.parametrize("v", [3, 4])
def test_memory_for_micro_batches_in_flight_on_the_first_ranks(v: int) -> None:
    """No cuts were found: a move was accepted only if fewer ranks lacked memory, not if one lacked less of it."""
    draw = Random(5)
    layers = tuple(LayerCosts(f"l{i}", *[draw.uniform(0.5, 1.5)] * 6, 0.0, 0.0) for i in range(100))  # type: ignore[arg-type]
    segments = Segments(ModelCosts(layers, tuple(Crossing(i, i + 1, 0.1) for i in range(99))))
    in_flight = tuple(8.0 - rank for rank in range(8))
    limit = 1.3 * (segments.static_bytes(0, 100) + 4.5 * segments.activation_bytes(0, 100)) / 8
    ranks = Ranks((1.0,) * 8, (limit,) * 8, in_flight)
    start = balanced(segments, ranks, placement_of("loop", 8, v))
    assert start is not None
    assert bottleneck(segments, ranks, placement_of("loop", 8, v), start) < 1.4 * segments.work(0, 100) / 8


def test_slow_cuts_are_avoided() -> None:
    base = model([1.0] * 100)
    crossings = tuple(replace(one, bytes=50.0 if i % 3 else 1.0) for i, one in enumerate(base.crossings))
    segments = Segments(replace(base, crossings=crossings, link=Link(0.0, 1.0)))
    found = best_cuts(segments, alike(4), "loop", 4)
    assert found is not None
    assert bottleneck(segments, alike(4), placement_of("loop", 4, 4), found) == pytest.approx(
        27
    )  # of 33 times three layers a rank has nine
    assert all(segments.cut_seconds[at] <= 1 for at in found[:-1])


def test_there_are_no_cuts_where_there_are_more_stages_than_layers() -> None:
    segments = Segments(model([1.0] * 5))
    assert best_cuts(segments, alike(3), "v", 2) is None
    assert balanced(segments, alike(3), placement_of("v", 3, 2)) is None


@pytest.mark.parametrize(("shape", "v"), SHAPES)
def test_there_are_no_cuts_where_there_is_no_memory(shape: str, v: int) -> None:
    layers = tuple(layer(i, 1.0, 1.0, 1.0) for i in range(12))
    segments = Segments(ModelCosts(layers, model([1.0] * 12).crossings))
    for memory in ((0.0, 0.0), (0.0, inf)):
        for recompute in (False, True, None):
            assert best_cuts(segments, Ranks((1.0,) * 2, memory, (2.0,) * 2, recompute), shape, v) is None


@pytest.mark.parametrize(("shape", "v"), SHAPES)
def test_layers_that_take_no_time_are_cut_too(shape: str, v: int) -> None:
    """Shares of the work that memory lets ranks do were all zero, and divided by."""
    layers = tuple(layer(i, 0.0, 1.0, 1.0) for i in range(12))
    segments = Segments(ModelCosts(layers, model([0.0] * 12).crossings))
    ranks = Ranks((1.0,) * 2, (30.0,) * 2, (2.0,) * 2)
    found = best_cuts(segments, ranks, shape, v)
    assert found is not None
    assert bottleneck(segments, ranks, placement_of(shape, 2, v), found) == 0
