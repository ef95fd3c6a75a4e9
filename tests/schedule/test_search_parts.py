"""The parts of the search: the graph that moves keep up to date, justification, tabu search, and extending orders."""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule import Costs
from penstock.schedule.schedule import loop, vee
from penstock.schedule.search import extend
from penstock.schedule.search.justify import Justification, justify
from penstock.schedule.search.lower_bound import recompute_choices
from penstock.schedule.search.orders import sequential_orders
from penstock.schedule.search.place_weight_grads import evaluate, list_schedule
from penstock.schedule.search.problem import B, F, Orders, Problem, make_problem
from penstock.schedule.search.tabu import NodeTable, OpGraph, tabu_search
from tests.schedule.memory_check import fits_all
from tests.schedule.test_search import cases
from tests.schedule.test_search import problem_of as of_case

pytestmark = pytest.mark.slow


def first_order(problem: Problem) -> Orders:
    """Orders that fit, without a search."""
    return list_schedule(recompute_choices(problem)[0])[1]


def problem_of(costs: Costs, placement: tuple[int, ...], m: int, cap: float | None = None) -> Problem:
    return make_problem(costs, placement, m, cap, None)[0]


def encoded(*rows: str) -> Orders:
    """One stage per rank, written as ``F F I W``; ``C`` is a forward that is recomputed by ``R``."""
    return [["FIBWRC".index(kind) * len(rows) + rank for kind in row.split()] for rank, row in enumerate(rows)]


def check(graph: OpGraph) -> None:
    """The graph agrees with an evaluation of its orders."""
    assert fits_all(graph.problem, graph.encoded)
    assert graph.makespan == pytest.approx(evaluate(graph.problem, graph.encoded))
    for nodes, ops in zip(graph.orders, graph.encoded, strict=True):
        held = 0.0
        for node, op in zip(nodes, ops, strict=True):
            held += graph.problem.memory_change[op]
            assert graph.held[node] == pytest.approx(held)
            assert graph.end[node] - graph.duration[node] + graph.tail[node] <= graph.makespan * (1 + 1e-9)


# The graph -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(cases(), st.integers(0, 2**16))
def test_moves_keep_the_graph_right(case: dict[str, Any], seed: int) -> None:
    problem = of_case(case).relaxed_to_fit()
    random = Random(seed)
    graph = OpGraph(NodeTable(problem), first_order(problem))
    check(graph)
    for _ in range(25):
        rank = random.randrange(problem.num_ranks)
        origin, to = (random.randrange(len(graph.orders[rank])) for _ in range(2))
        part = graph.moved(rank, origin, to) if origin != to else None
        if part is not None:
            before = graph.encoded
            if not graph.move(rank, origin, to, part):
                assert graph.encoded == before
                order = graph.orders[rank]
                low = min(origin, to)
                moved = order[:low] + part + order[low + len(part) :]
                graph.orders, kept = [*graph.orders[:rank], moved, *graph.orders[rank + 1 :]], graph.orders
                assert evaluate(problem, graph.encoded) == math.inf  # it would have been a deadlock
                graph.orders = kept
        graph.update()
        check(graph)


@settings(deadline=None, max_examples=60)
@given(cases(), st.integers(0, 2**16))
def test_a_backward_is_fused_and_split_again(case: dict[str, Any], seed: int) -> None:
    problem = of_case(case).relaxed_to_fit()
    graph = OpGraph(NodeTable(problem), first_order(problem))
    random, half = Random(seed), problem.num_stages * problem.m
    for _ in range(10):
        backward = half + random.randrange(half)
        before = graph.encoded
        if graph.kind(backward) == B:
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
            assert graph.encoded == before


@settings(deadline=None, max_examples=60)
@given(cases(), st.integers(0, 2**16))
def test_a_micro_batch_is_recomputed_and_kept_again(case: dict[str, Any], seed: int) -> None:
    problem = of_case(case).relaxed_to_fit()
    graph = OpGraph(NodeTable(problem), first_order(problem))
    random, half = Random(seed), problem.num_stages * problem.m
    for _ in range(10):
        forward = random.randrange(half)
        before, makespan = graph.encoded, graph.makespan
        if graph.kind(forward) == F:
            graph.recompute(forward)
            graph.update()
            check(graph)
            assert graph.keep(forward) is not None
            graph.update()
            assert graph.encoded == before
            assert graph.makespan == pytest.approx(makespan)
            continue
        place = graph.keep(forward)
        graph.update()
        check(graph)
        if place is None:
            assert graph.encoded == before
            continue
        assert graph.makespan <= makespan * (1 + 1e-9)
        if random.random() < 0.5:
            graph.recompute(forward, place)
            graph.update()
            check(graph)
            assert graph.encoded == before


def test_moves_keep_given_orders() -> None:
    """Of rank 0 of a V, F F of two micro-batches, F and I, I and W, and F of the two stages of the turn."""
    problem = problem_of(Costs(), vee(1), 2)
    graph = OpGraph(NodeTable(problem), sequential_orders(problem))
    kinds = [[work // 2 for work in order] for order in graph.orders]
    assert kinds == [[0, 1, 3, 5, 2, 4, 0, 1, 3, 5, 2, 4]]  # F0 F1 I1 W1 I0 W0, twice
    for origin, to in ((1, 0), (2, 1), (3, 2), (0, 6), (4, 2), (5, 4), (10, 8)):
        assert graph.moved(0, origin, to) is None
    assert graph.moved(0, 4, 3) is not None  # I0 before W1


def test_no_move_breaks_the_cap() -> None:
    problem = problem_of(Costs(), loop(1), 3, cap=1)
    graph = OpGraph(NodeTable(problem), sequential_orders(problem))
    assert graph.moved(0, 3, 2) is None  # the second F before the W of the first
    roomy = problem_of(Costs(), loop(1), 3, cap=2)
    assert OpGraph(NodeTable(roomy), sequential_orders(roomy)).moved(0, 3, 2) is not None


def test_estimate_of_a_move() -> None:
    """The W of rank 1 moves behind its second I, and off the critical path."""
    problem = problem_of(Costs(), loop(2), 2, cap=4)
    graph = OpGraph(NodeTable(problem), encoded("F F I W I W", "F I W F I W"))
    assert graph.makespan == 8
    part = graph.moved(1, 2, 4)
    assert part is not None
    estimate = graph.estimate(1, 2, part)
    assert graph.move(1, 2, 4, part)
    graph.update()
    assert graph.makespan == estimate == 7


# Justification -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(cases(), st.integers(0, 2**16))
def test_justification_is_never_worse(case: dict[str, Any], seed: int) -> None:
    """For any order: here, after random moves."""
    problem = of_case(case).relaxed_to_fit()
    random, table = Random(seed), NodeTable(problem)
    graph = OpGraph(table, first_order(problem))
    for _ in range(20):
        rank = random.randrange(problem.num_ranks)
        origin, to = (random.randrange(len(graph.orders[rank])) for _ in range(2))
        part = graph.moved(rank, origin, to) if origin != to else None
        if part is not None:
            graph.move(rank, origin, to, part)
    orders = graph.encoded
    order = Justification(table, orders)
    assert order.early_orders() == orders
    makespan = order.makespan
    assert makespan == pytest.approx(evaluate(problem, orders))
    for turn in range(6):
        order.run_pass()
        assert order.makespan <= makespan * (1 + 1e-9)
        makespan = order.makespan
        if turn % 2:
            better = order.early_orders()
            assert fits_all(problem, better)
            assert order.makespan == pytest.approx(evaluate(problem, better))


def test_ops_move_into_gaps_in_both_directions() -> None:
    """F F I . I W W of rank 0: a W goes where it waited. Late, the second F of rank 1 leaves the first I alone."""
    problem = problem_of(Costs(), loop(2), 2, cap=4)
    makespan, orders = justify(NodeTable(problem), encoded("F F I I W W", "F I W F I W"), 4, lambda: False)
    assert makespan == 7
    assert orders == encoded("F F I W I W", "F I F I W W")


def test_justification_keeps_the_cap() -> None:
    """With room for one micro-batch nothing is passed; with room for two the second F is done while rank 0 waits."""
    tight, roomy = (problem_of(Costs(), loop(2), 2, cap=cap) for cap in (1, 2))
    orders = sequential_orders(tight)
    assert justify(NodeTable(tight), orders, 8, lambda: False) == (evaluate(tight, orders), orders)
    assert justify(NodeTable(roomy), orders, 8, lambda: False)[0] < evaluate(roomy, orders)


# Tabu search -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(cases(), st.integers(0, 2**16))
def test_tabu_search_is_never_worse(case: dict[str, Any], seed: int) -> None:
    problem = of_case(case).relaxed_to_fit()
    orders = first_order(problem)
    begin = evaluate(problem, orders)
    makespan, better = tabu_search(NodeTable(problem), orders, 40, Random(seed), 0.0, lambda: False)
    assert fits_all(problem, better)
    assert makespan == pytest.approx(evaluate(problem, better))
    assert makespan <= begin * (1 + 1e-9)


def test_tabu_search_finds_the_best_order_from_a_bad_one() -> None:
    """From one micro-batch at a time to no wait except for the first input."""
    problem = problem_of(Costs(), loop(2), 4, cap=3)
    makespan, _ = tabu_search(NodeTable(problem), sequential_orders(problem), 400, Random(0), 13.0, lambda: False)
    assert makespan == 13


def test_tabu_search_ends_when_time_expires() -> None:
    problem = problem_of(Costs(), loop(2), 4, cap=3)
    orders = sequential_orders(problem)
    assert tabu_search(NodeTable(problem), orders, 400, Random(0), 0.0, lambda: True) == (
        evaluate(problem, orders),
        orders,
    )


def test_backwards_are_fused_where_that_is_faster() -> None:
    problem = problem_of(Costs(f=1, i=1, w=1, b=1), loop(1), 6, cap=2)
    split = encoded("F I W " * 6)
    makespan, orders = tabu_search(NodeTable(problem), split, 400, Random(0), 0.0, lambda: False)
    assert makespan == 12
    assert Counter(orders[0]) == {0: 6, 2: 6}


def test_needless_optional_recomputes_are_dropped() -> None:
    """Two micro-batches at a time, all recomputed: if recomputing is optional, none is."""
    every, chosen = (make_problem(Costs(), loop(1), 4, 2.0, None, how)[0] for how in (True, None))
    orders = encoded("C C R I W R I W " * 2)
    assert evaluate(every, orders) == 16
    assert tabu_search(NodeTable(every), orders, 0, Random(0), 0.0, lambda: False) == (16, orders)
    assert tabu_search(NodeTable(chosen), orders, 0, Random(0), 0.0, lambda: False) == (
        12,
        encoded("F F I W I W " * 2),
    )


def test_recompute_after_its_backward_is_infeasible() -> None:
    problem = make_problem(Costs(), loop(1), 2, 2.0, None, True)[0]
    for late in ("C I R W C R I W", "R C I W C R I W", "C C R I W I R W"):
        assert evaluate(problem, encoded(late)) == math.inf
    assert evaluate(problem, encoded("C C R I W R I W")) == 8


# More micro-batches ----------------------------------------------------------------------------------------------


def test_extend_with_weight_gradients() -> None:
    few, many = (problem_of(Costs(), loop(2), m, cap=2) for m in (8, 20))
    _, orders = list_schedule(few)
    makespan, orders = tabu_search(NodeTable(few), orders, 300, Random(0), 25.0, lambda: False)
    found = extend(many, orders, 8, None, makespan)
    assert found is not None
    takes, longer = found
    assert fits_all(many, longer)
    assert all(Counter(order) == dict.fromkeys(order, 20) for order in longer)
    assert evaluate(many, longer) == takes == makespan + 12 * 3


def test_kernel_has_its_weight_gradients() -> None:
    """The third micro-batch has no W next to it: the kernel of another one is repeated."""
    orders = encoded("F I W F I W F I F I W W")
    found = extend(problem_of(Costs(), loop(1), 9, cap=9), orders, 4, None, 12.0)
    assert found is not None
    assert Counter(found[1][0]) == {0: 9, 1: 9, 3: 9}
