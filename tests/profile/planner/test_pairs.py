"""Two stages a rank: every question about a time is answered as by trying all cuts one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from math import inf
from random import Random

import pytest

from penstock.profile.costs import Crossing, LayerCosts, Link, ModelCosts, SharedParameters
from penstock.profile.planner import pairs
from penstock.profile.planner.bounds import works_of
from penstock.profile.planner.cuts import balanced, best_partition, placement_of
from penstock.profile.planner.pairs import Pairs, ThereAndBack, TwiceRound
from penstock.profile.planner.segments import Ranks, Segments, bottleneck, rank_time

ASKED: dict[str, type[Pairs]] = {"v": ThereAndBack, "loop": TwiceRound}
ENOUGH = 10**9


def random_segments(of: Random, n: int) -> Segments:
    """Layers, skips and ties of any sizes, none of which is a round number."""
    layers = [
        LayerCosts(f"l{i}", *(of.lognormvariate(0, 0.8) for _ in range(6)), 0.0, 0.0)  # type: ignore[arg-type]
        for i in range(n)
    ]
    crossings = {(i, i + 1): Crossing(i, i + 1, of.lognormvariate(0, 0.8)) for i in range(n - 1)}
    if n > 3 and of.random() < 0.5:
        crossings[1, n - 1] = Crossing(1, n - 1, of.random())
    tied = SharedParameters((0, n - 1), min(layers[0].parameters, layers[-1].parameters))
    link = Link(0.0, of.choice([inf, 0.4]))
    return Segments(
        ModelCosts(
            tuple(layers), tuple(crossings[key] for key in sorted(crossings)), shared=(tied,) * (n > 1), link=link
        )
    )


def random_ranks(of: Random, segments: Segments, p: int, recompute: bool | None) -> Ranks:
    whole = (segments.static(0, segments.n) + 2 * segments.activation(0, segments.n)) / p
    return Ranks(
        tuple(of.choice([1.0, 0.7]) for _ in range(p)),
        tuple(of.choice([inf, whole * of.uniform(0.6, 1.8)]) for _ in range(p)),
        tuple(float(of.randint(1, 3)) for _ in range(p)),
        recompute,
    )


@pytest.fixture(params=[False, True], ids=["whole words", "small words"])
def words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginnings that need several words, of which not all are looked at together: few of them do as well as many."""
    if request.param:
        for name, value in (("_BITS", 2), ("_LONG", 9), ("_MANY", 4), ("_PLACES", 5)):
            monkeypatch.setattr(pairs, name, value)


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize("recompute", [False, True, None])
@pytest.mark.parametrize("shape", ["v", "loop"])
def test_questions_are_answered_as_by_trying_all_cuts(shape: str, recompute: bool | None) -> None:
    of = Random(f"{shape} {recompute}")
    possible = 0
    for _ in range(60):
        p = of.randint(1, 3)
        segments = random_segments(of, of.randint(2 * p, 11))
        ranks, placement = random_ranks(of, segments, p, recompute), placement_of(shape, p, 2)
        cuts = [(*inner, segments.n) for inner in combinations(range(1, segments.n), 2 * p - 1)]
        best = min(bottleneck(segments, ranks, placement, one) for one in cuts)
        ask = ASKED[shape](segments, ranks, min(100.0, 2 * best), ENOUGH)
        if best == inf:
            assert ask(100.0) is None
            continue
        possible += 1
        for below in (1.5 * best, best * (1 + 1e-6), best * (1 - 1e-6), best / 2, best * (1 + 1e-9)):
            found = ask(below)
            assert (found is None) == (below < best)
            assert found is None or bottleneck(segments, ranks, placement, found) < below
        assert ask.bound == best * (1 - 1e-6)
    assert possible > 20


@pytest.mark.parametrize("recompute", [False, True, None])
def test_two_rounds_are_cut_for_ranks_that_have_a_third(recompute: bool | None) -> None:
    of = Random(f"third {recompute}")
    possible = 0
    for _ in range(40):
        segments = random_segments(of, 12)
        ranks = random_ranks(of, segments, 2, recompute)
        own = [((0, 2),), ((2, 4),)]  # the first round, which stays as it is

        def busiest(inner: tuple[int, ...], segments: Segments = segments, ranks: Ranks = ranks) -> float:
            runs = list(pairwise((4, *inner, 12)))
            times = [rank_time(segments, ranks, rank, [(2 * rank, 2 * rank + 2), *runs[rank::2]]) for rank in (0, 1)]
            return max(*times, *(segments.transfer[at] for at in inner))

        best = min(map(busiest, combinations(range(5, 12), 3)))
        if best < inf:
            possible += 1
            ask = TwiceRound(segments, ranks, 2 * best, ENOUGH, (4, 12), own)
            found = ask(best * (1 + 1e-6))
            assert found is not None
            assert busiest(found[:-1]) == pytest.approx(best)
            assert ask(best * (1 - 1e-6)) is None
    assert possible > 10


@pytest.mark.parametrize("memory", [inf, 1.3])
@pytest.mark.parametrize("recompute", [False, None])
@pytest.mark.parametrize("shape", ["v", "loop"])
def test_uneven_layers_in_many_stages_are_exact(shape: str, recompute: bool | None, memory: float) -> None:
    of = Random(3)
    works = [of.lognormvariate(0, 0.6) / 3 for _ in range(90)]
    layers = tuple(LayerCosts(f"l{i}", *[w] * 5, w, 0.0, 0.0) for i, w in enumerate(works))  # type: ignore[arg-type]
    segments = Segments(ModelCosts(layers, tuple(Crossing(i, i + 1, 0.1) for i in range(89))))
    flights = tuple(16.0 - rank for rank in range(16))
    limit = memory * (segments.static(0, 90) + 8.5 * segments.activation(0, 90)) / 16
    found = best_partition(segments, Ranks((1.0,) * 16, (limit,) * 16, flights, recompute), shape, 2)
    assert found is not None
    assert found.gap < 1e-9
    assert found.busiest > segments.work(0, 90) / 16 * 1.005  # the share of all work is no proof


@pytest.mark.parametrize(("p", "noise"), [(4, 0.05), (4, 0.5), (8, 0.05)])
def test_long_loops_are_exact(p: int, noise: float) -> None:
    """There are very many cuts that are hardly worse than the best, and it is not gone from each to the next."""
    of = Random(1)
    works = [of.uniform(1 - noise, 1 + noise) / 3 for _ in range(300)]
    layers = tuple(LayerCosts(f"l{i}", *[w] * 5, w, 0.0, 0.0) for i, w in enumerate(works))  # type: ignore[arg-type]
    segments = Segments(ModelCosts(layers, tuple(Crossing(i, i + 1, 0.1) for i in range(299))))
    found = best_partition(segments, Ranks((1.0,) * p, (inf,) * p, (1.0,) * p), "loop", 2)
    assert found is not None
    assert found.gap < 1e-9


def test_a_question_that_takes_too_much_has_no_sure_answer() -> None:
    segments = random_segments(Random(0), 60)
    ranks = Ranks((1.0,) * 8, (inf,) * 8, (1.0,) * 8)
    ask = TwiceRound(segments, ranks, 100.0, 3000)
    assert ask(50.0) is None
    assert ask.bound == 0
    assert ask.effort >= 1000  # half of it is for other questions


def test_an_end_is_met_whatever_the_sums_of_the_work_round_to() -> None:
    """At the end all work had to be done to the last bit of its sum, which by rounding it often was not."""
    of = Random(1)
    for _ in range(50):
        segments = random_segments(of, 20)
        ranks = Ranks((1.0,) * 2, (inf,) * 2, (1.0,) * 2)
        ask = TwiceRound(segments, ranks, 1000.0, ENOUGH)
        every = [(*inner, 20) for inner in combinations(range(1, 20), 3)]
        best = min(bottleneck(segments, ranks, (0, 1, 0, 1), cuts) for cuts in every)
        assert ask(best * (1 + 1e-9)) is not None


@pytest.mark.parametrize("v", [3, 4])
def test_cuts_are_found_where_the_first_ranks_have_little_memory_for_what_is_in_flight(v: int) -> None:
    """There were said to be none: a move helped only if fewer ranks lacked memory, and not if one lacked less."""
    of = Random(5)
    layers = tuple(LayerCosts(f"l{i}", *[of.uniform(0.5, 1.5)] * 6, 0.0, 0.0) for i in range(100))  # type: ignore[arg-type]
    segments = Segments(ModelCosts(layers, tuple(Crossing(i, i + 1, 0.1) for i in range(99))))
    flights = tuple(8.0 - rank for rank in range(8))
    limit = 1.3 * (segments.static(0, 100) + 4.5 * segments.activation(0, 100)) / 8
    ranks = Ranks((1.0,) * 8, (limit,) * 8, flights)
    even = balanced(segments, ranks, placement_of("loop", 8, v))
    assert even is not None
    assert bottleneck(segments, ranks, placement_of("loop", 8, v), even) < 1.4 * segments.work(0, 100) / 8


@pytest.mark.parametrize("recompute", [False, True, None])
def test_a_rank_can_do_no_more_work_than_its_memory_is_said_to_let_it(recompute: bool | None) -> None:
    of = Random(f"most {recompute}")
    for _ in range(20):
        segments = random_segments(of, 7)
        ranks = replace(random_ranks(of, segments, 1, recompute), memory=(of.uniform(4.0, 30.0),))
        works = works_of(segments, ranks)
        most = TwiceRound(segments, ranks, 1000.0, ENOUGH).kinds[0].most(1000.0)
        for i, j, k, end in combinations(range(8), 4):
            for runs in (((i, j), (k, end)), ((i, j), (j, end))):
                if rank_time(segments, ranks, 0, runs) < inf:
                    assert sum(sum(works[a:b]) for a, b in runs) <= most * (1 + 1e-9)
