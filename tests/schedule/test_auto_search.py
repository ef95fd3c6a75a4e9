"""The parts of the search for an order: the graph that moves keep up to date, tabu search, and periods."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.costs import Costs
from penstock.schedule.schedule import loop, vee
from penstock.schedule.search.extend import extend
from penstock.schedule.search.justify import Justification, justify
from penstock.schedule.search.list_scheduler import Policy, default_policy, list_schedule, random_policy
from penstock.schedule.search.op_graph import OpGraph, OpTable
from penstock.schedule.search.orders import sequential_orders
from penstock.schedule.search.periodic import in_turn, pack
from penstock.schedule.search.place_weight_grads import evaluate, place_weight_grads
from penstock.schedule.search.problem import Orders, Problem, make_problem
from penstock.schedule.search.recompute_choice import recompute_choices
from penstock.schedule.search.tabu import tabu_search
from tests.schedule.fits import fits_all
from tests.schedule.test_auto import cases
from tests.schedule.test_auto import problem_of as of_case


def problem_of(costs: Costs, placement: tuple[int, ...], m: int, cap: float | None = None) -> Problem:
    return make_problem(costs, placement, m, cap, None)[0]


def some_order(problem: Problem) -> Orders:
    problem = recompute_choices(problem)[0]
    makespan, words = list_schedule(problem, default_policy(problem))
    return words if makespan < math.inf else sequential_orders(problem)


def check(graph: OpGraph) -> None:
    """The graph says what the words say."""
    words = graph.words
    assert fits_all(graph.problem, words)
    assert graph.makespan == pytest.approx(evaluate(graph.problem, words))
    for order, word in zip(graph.orders, words, strict=True):
        held = 0.0
        for work, letter in zip(order, word, strict=True):
            held += graph.problem.takes[letter]
            assert graph.held[work] == pytest.approx(held)
            assert graph.end[work] - graph.duration[work] + graph.tail[work] <= graph.makespan * (1 + 1e-9)


# The graph -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(cases(), st.integers(0, 2**16))
def test_moves_keep_the_graph_right(case: dict[str, Any], seed: int) -> None:
    problem = of_case(case).relaxed_to_fit()
    random = Random(seed)
    graph = OpGraph(OpTable(problem), some_order(problem))
    check(graph)
    for _ in range(25):
        rank = random.randrange(problem.num_ranks)
        origin, to = (random.randrange(len(graph.orders[rank])) for _ in range(2))
        part = graph.moved(rank, origin, to) if origin != to else None
        if part is not None:
            before = graph.words
            if not graph.move(rank, origin, to, part):
                assert graph.words == before
                word = graph.orders[rank]
                low = min(origin, to)
                turned = [*graph.orders[:rank], word[:low] + part + word[low + len(part) :], *graph.orders[rank + 1 :]]
                graph.orders, kept = turned, graph.orders
                assert evaluate(problem, graph.words) == math.inf  # it would have been a deadlock
                graph.orders = kept
        graph.update()
        check(graph)


@settings(deadline=None, max_examples=60)
@given(cases(), st.integers(0, 2**16))
def test_a_backward_is_fused_and_split_again(case: dict[str, Any], seed: int) -> None:
    problem = of_case(case).relaxed_to_fit()
    graph = OpGraph(OpTable(problem), some_order(problem))
    random, half = Random(seed), problem.num_stages * problem.m
    for _ in range(10):
        backward = half + random.randrange(half)
        before = graph.words
        if graph.fused[backward]:
            graph.split(backward)
            graph.update()
            check(graph)
            continue
        place = graph.fuse(backward)
        graph.update()
        check(graph)
        if random.random() < 0.5:
            graph.split(backward, place)
            graph.update()
            check(graph)
            assert graph.words == before


@settings(deadline=None, max_examples=60)
@given(cases(), st.integers(0, 2**16))
def test_a_micro_batch_is_recomputed_and_kept_again(case: dict[str, Any], seed: int) -> None:
    problem = of_case(case).relaxed_to_fit()
    graph = OpGraph(OpTable(problem), some_order(problem))
    random, half = Random(seed), problem.num_stages * problem.m
    for _ in range(10):
        forward = random.randrange(half)
        before, makespan = graph.words, graph.makespan
        if not graph.dropped[forward]:
            graph.drop(forward)
            graph.update()
            check(graph)
            assert graph.keep(forward) is not None
            graph.update()
            assert graph.words == before
            assert graph.makespan == pytest.approx(makespan)
            continue
        place = graph.keep(forward)
        graph.update()
        check(graph)
        if place is None:
            assert graph.words == before
            continue
        assert graph.makespan <= makespan * (1 + 1e-9)
        if random.random() < 0.5:
            graph.drop(forward, place)
            graph.update()
            check(graph)
            assert graph.words == before


def test_what_has_its_order_keeps_it() -> None:
    """Of rank 0 of a V, F F of two micro-batches, F and I, I and W, and F of the two stages of the turn."""
    problem = problem_of(Costs(), vee(1), 2)
    graph = OpGraph(OpTable(problem), sequential_orders(problem))
    kinds = [[work // 2 for work in order] for order in graph.orders]
    assert kinds == [[0, 1, 3, 5, 2, 4, 0, 1, 3, 5, 2, 4]]  # F0 F1 I1 W1 I0 W0, twice
    for origin, to in ((1, 0), (2, 1), (3, 2), (0, 6), (4, 2), (5, 4), (10, 8)):
        assert graph.moved(0, origin, to) is None
    assert graph.moved(0, 4, 3) is not None  # I0 before W1


def test_no_move_breaks_the_cap() -> None:
    problem = problem_of(Costs(), loop(1), 3, cap=1)
    graph = OpGraph(OpTable(problem), sequential_orders(problem))
    assert graph.moved(0, 3, 2) is None  # the second F before the W of the first
    roomy = problem_of(Costs(), loop(1), 3, cap=2)
    assert OpGraph(OpTable(roomy), sequential_orders(roomy)).moved(0, 3, 2) is not None


def test_an_estimate_is_what_comes_of_it() -> None:
    """The W of rank 1 goes behind its second I, and off the longest path."""
    problem = problem_of(Costs(), loop(2), 2, cap=4)
    graph = OpGraph(OpTable(problem), [[0, 0, 2, 6, 2, 6], [1, 3, 7, 1, 3, 7]])
    assert graph.makespan == 8
    part = graph.moved(1, 2, 4)
    assert part is not None
    estimate = graph.estimate(1, 2, part)
    assert graph.move(1, 2, 4, part)
    graph.update()
    assert graph.makespan == estimate == 7


# Squeezing -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(cases(), st.integers(0, 2**16))
def test_squeezing_is_never_worse(case: dict[str, Any], seed: int) -> None:
    """Whatever the order: here one after so many moves at random."""
    problem = of_case(case).relaxed_to_fit()
    random, pieces = Random(seed), OpTable(problem)
    graph = OpGraph(pieces, some_order(problem))
    for _ in range(20):
        rank = random.randrange(problem.num_ranks)
        origin, to = (random.randrange(len(graph.orders[rank])) for _ in range(2))
        part = graph.moved(rank, origin, to) if origin != to else None
        if part is not None:
            graph.move(rank, origin, to, part)
    words = graph.words
    order = Justification(pieces, words)
    assert order.early() == words
    makespan = order.makespan
    assert makespan == pytest.approx(evaluate(problem, words))
    for turn in range(6):
        order.turn()
        assert order.makespan <= makespan * (1 + 1e-9)
        makespan = order.makespan
        if turn % 2:
            better = order.early()
            assert fits_all(problem, better)
            assert order.makespan == pytest.approx(evaluate(problem, better))


def test_work_goes_into_gaps_both_ways() -> None:
    """F F I . I W W of rank 0: a W goes where it waited. Late, the second F of rank 1 leaves the first I alone."""
    problem = problem_of(Costs(), loop(2), 2, cap=4)
    makespan, words = justify(OpTable(problem), [[0, 0, 2, 2, 6, 6], [1, 3, 7, 1, 3, 7]], 4, lambda: False)
    assert makespan == 7
    assert words == [[0, 0, 2, 6, 2, 6], [1, 3, 1, 3, 7, 7]]


def test_squeezing_keeps_the_cap() -> None:
    """With room for one micro-batch nothing is passed; with room for two the second F is done while rank 0 waits."""
    tight, roomy = (problem_of(Costs(), loop(2), 2, cap=cap) for cap in (1, 2))
    words = sequential_orders(tight)
    assert justify(OpTable(tight), words, 8, lambda: False) == (evaluate(tight, words), words)
    assert justify(OpTable(roomy), words, 8, lambda: False)[0] < evaluate(roomy, words)


# Tabu search -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(cases(), st.integers(0, 2**16))
def test_tabu_search_is_never_worse(case: dict[str, Any], seed: int) -> None:
    problem = of_case(case).relaxed_to_fit()
    words = some_order(problem)
    begin = evaluate(problem, words)
    makespan, better = tabu_search(OpTable(problem), words, 40, Random(seed), 0.0, lambda: False)
    assert fits_all(problem, better)
    assert makespan == pytest.approx(evaluate(problem, better))
    assert makespan <= begin * (1 + 1e-9)


def test_tabu_search_finds_the_best_order_from_a_bad_one() -> None:
    """From one micro-batch at a time to no wait but for the first input."""
    problem = problem_of(Costs(), loop(2), 4, cap=3)
    makespan, _ = tabu_search(OpTable(problem), sequential_orders(problem), 400, Random(0), 13.0, lambda: False)
    assert makespan == 13


def test_tabu_search_ends_when_time_is_up() -> None:
    problem = problem_of(Costs(), loop(2), 4, cap=3)
    words = sequential_orders(problem)
    assert tabu_search(OpTable(problem), words, 400, Random(0), 0.0, lambda: True) == (evaluate(problem, words), words)


def test_backwards_are_fused_where_that_is_faster() -> None:
    problem = problem_of(Costs(f=1, i=1, w=1, b=1), loop(1), 6, cap=2)
    split: Orders = [[0, 1, 3] * 6]
    makespan, words = tabu_search(OpTable(problem), split, 400, Random(0), 0.0, lambda: False)
    assert makespan == 12
    assert Counter(words[0]) == {0: 6, 2: 6}


def test_what_there_is_room_for_is_kept_where_that_may_be_chosen() -> None:
    """Two micro-batches at a time, all recomputed: where it may be chosen, none is."""
    every, chosen = (make_problem(Costs(), loop(1), 4, 2.0, None, how)[0] for how in (True, None))
    words: Orders = [[5, 5, 4, 1, 3, 4, 1, 3] * 2]
    assert evaluate(every, words) == 16
    assert tabu_search(OpTable(every), words, 0, Random(0), 0.0, lambda: False) == (16, words)
    assert tabu_search(OpTable(chosen), words, 0, Random(0), 0.0, lambda: False) == (12, [[0, 0, 1, 3, 1, 3] * 2])


def test_an_order_in_which_a_recompute_comes_too_late() -> None:
    problem = make_problem(Costs(), loop(1), 2, 2.0, None, True)[0]
    for late in ([5, 1, 4, 3, 5, 4, 1, 3], [4, 5, 1, 3, 5, 4, 1, 3], [5, 5, 4, 1, 3, 1, 4, 3]):
        assert evaluate(problem, [late]) == math.inf
    assert evaluate(problem, [[5, 5, 4, 1, 3, 4, 1, 3]]) == 8


# Periods ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(cases(), st.integers(0, 2**16))
def test_in_turn_is_the_order_of_the_wishes(case: dict[str, Any], seed: int) -> None:
    problem = of_case(case).relaxed_to_fit()
    random = Random(seed)
    policy = random_policy(problem, random)
    if not policy.period:
        return
    count, m = problem.num_stages, problem.m
    for stages, word in zip(problem.local, in_turn(problem, policy), strict=True):
        again = {s for s in stages if problem.again[s]}
        assert Counter(letter for letter in word if letter >= 3 * count) == {
            kind * count + s: m for kind in (4, 5) for s in again
        }
        word = [letter % (5 * count) for letter in word if not 4 * count <= letter < 5 * count]
        assert Counter(letter if letter < 2 * count else letter - count for letter in word) == {
            line: m for s in stages for line in (s, count + s)
        }
        done: Counter[int] = Counter()
        times = []
        for letter in word:
            line = letter if letter < 2 * count else letter - count
            k = done[line]
            done[line] += 1
            times.append(
                policy.wishes[line] + k // policy.group * policy.group * policy.period + k % policy.group * policy.step
            )
        if policy.group == 1:
            assert all(b >= a - 1e-6 for a, b in pairwise(times))


@pytest.mark.parametrize("placement", [loop(4), loop(4, 2), vee(4), (0, 1, 2, 2, 0)])
def test_packed_work_never_meets(placement: tuple[int, ...]) -> None:
    costs = Costs(f=1.0, i=1.3, w=0.7, latency=0.1)
    problem = problem_of(costs, placement, 6, cap=2.0 * max(map(placement.count, placement)))
    count, random, packed = problem.num_stages, Random(0), 0
    for _ in range(60):
        policy = pack(problem, random)
        if policy is None:
            continue
        packed += 1
        for src, dst, time in problem.arcs:
            assert policy.wishes[dst] >= policy.wishes[src] + problem.durations[src] + time - 1e-6
            back = policy.wishes[count + dst] + problem.durations[count + dst] + time
            assert policy.wishes[count + src] >= back - 1e-6
        for stages in problem.local:
            lines = [line for s in stages for line in (s, count + s)]
            spans = sorted((policy.wishes[line] % policy.period, problem.durations[line]) for line in lines)
            follow = [*spans[1:], (spans[0][0] + policy.period, 0.0)]
            assert all(at + length <= then + 1e-6 for (at, length), (then, _) in zip(spans, follow, strict=True))
    assert packed > 10


def test_a_period_leads_where_memory_is_short() -> None:
    """Vocabulary layers at both ends, half of 1F1B's memory: a packed period holds the pace of the busiest rank."""
    times = (0.7, *[0.5] * 6, 1.0)
    costs = Costs(f=times, i=times, w=times, activation=0.5)
    problem = problem_of(costs, loop(4, 2), 16, cap=2)
    random = Random(0)
    packed = (pack(problem, random) for _ in range(300))
    best = min(
        place_weight_grads(problem, in_turn(problem, policy), policy.overrun) for policy in packed if policy is not None
    )
    assert best < 1.06 * problem.m * max(problem.work) + 3


# More micro-batches ----------------------------------------------------------------------------------------------


def test_a_complete_order_is_repeated_with_its_weight_gradients() -> None:
    few, many = (problem_of(Costs(), loop(2), m, cap=2) for m in (8, 20))
    _, words = list_schedule(few, default_policy(few))
    makespan, words = tabu_search(OpTable(few), words, 300, Random(0), 25.0, lambda: False)
    found = extend(many, words, 8, None, makespan)
    assert found is not None
    takes, longer = found
    assert fits_all(many, longer)
    assert all(Counter(word) == dict.fromkeys(word, 20) for word in longer)
    assert evaluate(many, longer) == takes == makespan + 12 * 3


def test_a_kernel_of_a_complete_order_has_its_weight_gradients() -> None:
    """The third micro-batch, in the middle, has none: another is repeated."""
    words: Orders = [[0, 1, 3, 0, 1, 3, 0, 1, 0, 1, 3, 3]]
    found = extend(problem_of(Costs(), loop(1), 9, cap=9), words, 4, None, 12.0)
    assert found is not None
    assert Counter(found[1][0]) == {0: 9, 1: 9, 3: 9}


def test_policies_without_a_period() -> None:
    problem = problem_of(Costs(f=0, i=0, w=0), loop(2), 3)
    assert all(len(word) == 6 for word in in_turn(problem, Policy([0.0] * 4, 0.0)))
