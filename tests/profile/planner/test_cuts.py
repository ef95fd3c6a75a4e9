"""Cuts with the least busy ranks: as good as the best of all cuts, tried one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.profile.costs import Crossing, LayerCosts, Link, ModelCosts, SharedParameters
from penstock.profile.planner import cuts
from penstock.profile.planner.bounds import by_counts, by_kinds, floor
from penstock.profile.planner.cuts import balanced, best_partition, placement_of
from penstock.profile.planner.rounds import Rounds
from penstock.profile.planner.segments import Ranks, Segments, bottleneck, choose_recompute, rank_bytes
from penstock.profile.planner.weighed import Weighed

SHAPES = [("straight", 1), ("v", 2), ("loop", 2), ("loop", 3), ("loop", 4)]


def layer(i: int, work: float, activation: float = 0.0, parameters: float = 0.0) -> LayerCosts:
    return LayerCosts(f"l{i}", work / 3, work / 3, work / 3, work / 3, activation, parameters, 0.0, 0.0)


def model(works: list[float], **more: object) -> ModelCosts:
    crossings = tuple(Crossing(i, i + 1, 1.0) for i in range(len(works) - 1))
    return ModelCosts(tuple(layer(i, work) for i, work in enumerate(works)), crossings, **more)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("few", [(0, 0), (1000, 20_000)], ids=["searched", "tried"])
@settings(max_examples=300, deadline=None)
@given(problem=problems())
def test_no_other_cuts_have_a_less_busy_rank(few: tuple[int, int], problem: tuple[Segments, Ranks, str, int]) -> None:
    """So it is where few cuts are tried one by one, and where these are found as many are."""
    segments, ranks, shape, v = problem
    placement = placement_of(shape, len(ranks), v)
    best = best_of_all(segments, ranks, placement)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "_FEW", few)
        found = best_partition(segments, ranks, shape, v)
    moved = balanced(segments, ranks, placement)
    assert moved is None or bottleneck(segments, ranks, placement, moved) >= best * (1 - 1e-12)
    assert (inf if found is None else found.busiest) == pytest.approx(best)
    if found is not None:
        assert found.gap < 1e-9
        assert found.busiest == bottleneck(segments, ranks, placement, found.cuts)
        assert found.bound <= best * (1 + 1e-9)
        assert found.busiest >= best * (1 - 1e-9)


def best_of_all(segments: Segments, ranks: Ranks, placement: tuple[int, ...]) -> float:
    everywhere = [(*inner, segments.n) for inner in combinations(range(1, segments.n), len(placement) - 1)]
    return min(bottleneck(segments, ranks, placement, every) for every in everywhere)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_no_cuts_are_below_a_bound(problem: tuple[Segments, Ranks, str, int]) -> None:
    segments, ranks, shape, v = problem
    placement = placement_of(shape, len(ranks), v)
    best = best_of_all(segments, ranks, placement)
    if 0 < best < inf:
        for bound in (by_counts, by_kinds):
            assert bound(segments, ranks, placement, floor(segments, ranks), 2 * best) <= best * (1 + 1e-9)
        weighed = Weighed(segments, ranks, placement, 2 * best, 50, 0.0)
        assert 0 <= weighed.bound <= best * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(problems(), st.booleans())
def test_rounds_are_gone_through_to_the_end(problem: tuple[Segments, Ranks, str, int], below: bool) -> None:
    segments, ranks, shape, v = problem
    placement = placement_of(shape, len(ranks), v)
    best = best_of_all(segments, ranks, placement)
    if shape == "loop" and 0 < best < inf:
        time = best * (1 - 1e-9 if below else 1 + 1e-9)
        rounds = Rounds(segments, ranks, Weighed(segments, ranks, placement, time, 50, 0.0), 10**6)
        found = rounds.search()
        assert rounds.effort > 0
        assert (found is None) == below
        assert found is None or bottleneck(segments, ranks, placement, found) == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_what_is_recomputed_is_the_least_that_keeps_the_memory(problem: tuple[Segments, Ranks, str, int]) -> None:
    segments, ranks, _, v = problem
    bounds = [segments.n * at // v for at in range(v + 1)]
    runs = list(pairwise(bounds))
    for rank in range(len(ranks)):
        found = choose_recompute(segments, ranks, rank, runs)
        fit = [
            (sum(segments.again(*runs[number]) for number in again), again)
            for size in range(v + 1)
            for again in combinations(range(v), size)
            if (ranks.recompute is None or size == v * ranks.recompute)
            and _peak(segments, runs, again, 2) <= ranks.memory[rank]
        ]
        assert (found is None) == (not fit)
        assert found is None or sum(segments.again(*runs[number]) for number in found) == min(fit)[0]


def _peak(segments: Segments, runs: list[tuple[int, int]], again: tuple[int, ...], in_flight: int) -> float:
    """All micro-batches are in flight everywhere, and the backward of one of them runs in one stage after the other."""
    peaks = []
    for here in range(len(runs)):
        kept = 0.0
        for number, run in enumerate(runs):
            there = segments.activation(*run)
            waiting = min(there, segments.inputs(*run)) if number in again else there
            there = there if number == here else waiting
            kept += segments.static(*run) + (in_flight - 1) * waiting + there
        peaks.append(kept)
    return max(peaks)


def test_what_two_layers_share_counts_once_in_a_stage() -> None:
    layers = tuple(layer(i, 1.0, 0.0, 8.0) for i in range(4))
    segments = Segments(ModelCosts(layers, model([1.0] * 4).crossings, shared=(SharedParameters((0, 1, 3), 8.0),)))
    assert segments.static(0, 1) == 8
    assert segments.static(0, 2) == 8
    assert segments.static(0, 4) == 16  # 8 of the tie, 8 of layer 2
    assert segments.static(2, 4) == 16


def test_activations_that_two_layers_keep_count_once_in_a_stage() -> None:
    base = model([1.0] * 3)
    layers = tuple(layer(i, 1.0, 10.0) for i in range(3))
    segments = Segments(ModelCosts(layers, base.crossings, kept_together=((0, 1, 4.0), (1, 2, 4.0))))
    assert [segments.activation(0, 2), segments.activation(0, 3), segments.activation(1, 2)] == [16.0, 22.0, 10.0]


def test_a_stage_that_recomputes_keeps_what_came_to_it() -> None:
    base = model([3.0] * 3)
    layers = tuple(layer(i, 3.0, 10.0, 2.0) for i in range(3))
    skip = Crossing(0, 2, 5.0)
    segments = Segments(ModelCosts(layers, (base.crossings[0], skip, base.crossings[1])))
    assert [segments.inputs(0, 3), segments.inputs(1, 2), segments.inputs(1, 3), segments.inputs(2, 3)] == [0, 1, 6, 6]
    assert segments.again(1, 3) == pytest.approx(2.0)
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
    assert segments.crossing == [0.0, 4.0, 6.0, 0.0]


@pytest.mark.parametrize(
    ("shape", "p", "v"), [("straight", 64, 1), ("v", 32, 2), ("loop", 32, 2), ("loop", 16, 4), ("loop", 8, 8)]
)
def test_two_hundred_layers_in_sixty_four_stages(shape: str, p: int, v: int) -> None:
    works = [1.0 + (i * 7919 % 13) / 13 for i in range(200)]
    found = best_partition(Segments(model(works)), alike(p), shape, v)
    assert found is not None
    assert len(found.cuts) == 64
    assert sum(works) / p <= found.bound <= found.busiest
    assert found.gap < (1e-9 if v <= 2 else 0.02)


@pytest.mark.parametrize("recompute", [False, True, None])
@pytest.mark.parametrize(("p", "v"), [(8, 3), (16, 4), (8, 8)])
def test_loops_of_equal_layers_between_two_others_are_exact(p: int, v: int, recompute: bool | None) -> None:
    works = [0.1, *[1.0] * 198, 2.4]
    layers = tuple(layer(i, work, 1.0, 1.0) for i, work in enumerate(works))
    segments = Segments(ModelCosts(layers, model(works).crossings))
    memory = 1.3 * (segments.static(0, 200) + p * segments.activation(0, 200)) / p
    found = best_partition(segments, Ranks((1.0,) * p, (memory,) * p, (float(p),) * p, recompute), "loop", v)
    assert found is not None
    assert found.gap < 1e-9
    again = 4 / 3 if recompute else 1.0
    assert found.busiest > sum(segments.works) * again / p * 1.001  # a rank has a whole number of layers


@pytest.mark.parametrize(("p", "v", "n"), [(8, 3, 27), (6, 4, 28), (4, 8, 34), (12, 4, 50)])
def test_loops_with_few_more_layers_than_stages_are_exact(p: int, v: int, n: int) -> None:
    works = [1.0 + (i * 7919 % 101) / 101 for i in range(n)]
    segments = Segments(model(works))
    found = best_partition(segments, alike(p), "loop", v)
    assert found is not None
    assert found.gap < 1e-9
    assert found.busiest > floor(segments, alike(p)) * 1.01  # more than the share of all work


def test_slow_cuts_are_avoided() -> None:
    base = model([1.0] * 100)
    crossings = tuple(replace(one, bytes=50.0 if i % 3 else 1.0) for i, one in enumerate(base.crossings))
    segments = Segments(replace(base, crossings=crossings, link=Link(0.0, 1.0)))
    found = best_partition(segments, alike(4), "loop", 4)
    assert found is not None
    assert found.busiest == pytest.approx(27)  # of 33 times three layers a rank has nine
    assert all(segments.transfer[at] <= 1 for at in found.cuts[:-1])


def test_there_are_no_cuts_where_there_are_more_stages_than_layers() -> None:
    segments = Segments(model([1.0] * 5))
    assert best_partition(segments, alike(3), "v", 2) is None
    assert balanced(segments, alike(3), placement_of("v", 3, 2)) is None


@pytest.mark.parametrize(("shape", "v"), SHAPES)
def test_there_are_no_cuts_where_there_is_no_memory(shape: str, v: int) -> None:
    layers = tuple(layer(i, 1.0, 1.0, 1.0) for i in range(12))
    segments = Segments(ModelCosts(layers, model([1.0] * 12).crossings))
    for memory in ((0.0, 0.0), (0.0, inf)):
        for recompute in (False, True, None):
            assert best_partition(segments, Ranks((1.0,) * 2, memory, (2.0,) * 2, recompute), shape, v) is None


@pytest.mark.parametrize(("shape", "v"), SHAPES)
def test_layers_that_take_no_time_are_cut_too(shape: str, v: int) -> None:
    """Shares of the work that memory lets ranks do were all zero, and divided by."""
    layers = tuple(layer(i, 0.0, 1.0, 1.0) for i in range(12))
    segments = Segments(ModelCosts(layers, model([0.0] * 12).crossings))
    found = best_partition(segments, Ranks((1.0,) * 2, (30.0,) * 2, (2.0,) * 2), shape, v)
    assert found is not None
    assert found.busiest == found.gap == 0


@pytest.mark.parametrize("recompute", [False, None])
@pytest.mark.parametrize(("shape", "v"), SHAPES)
def test_cuts_are_the_same_where_tensors_are_made_elsewhere(shape: str, v: int, recompute: bool | None) -> None:
    works = [1.0 + (i * 7919 % 13) / 13 for i in range(24)]
    layers = tuple(layer(i, work, work, 1.0) for i, work in enumerate(works))
    segments = Segments(ModelCosts(layers, model(works).crossings))
    memory = 1.2 * (segments.static(0, 24) + 3 * segments.activation(0, 24)) / 3
    ranks = Ranks((1.0,) * 3, (memory,) * 3, (3.0,) * 3, recompute)
    expected = best_partition(segments, ranks, shape, v)
    assert expected is not None
    with torch.device("meta"):
        assert best_partition(segments, ranks, shape, v) == expected
        assert torch.get_default_device() == torch.device("meta")
    with torch.inference_mode():
        assert best_partition(segments, ranks, shape, v) == expected
    try:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float16)
        assert best_partition(segments, ranks, shape, v) == expected
        assert torch.zeros(1).is_meta
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert best_partition(segments, ranks, shape, v) == expected
