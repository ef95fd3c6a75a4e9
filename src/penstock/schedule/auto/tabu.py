"""Improve an order by tabu search: at each step the best move at a block of its longest path, though it may be worse.

A block is a run of consecutive work of one rank on the path that decides the makespan. To shorten the path, work of
a block must leave it at one of its ends. What a move has turned round stays so for some steps.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from penstock.schedule.auto.graph import Graph
from penstock.schedule.auto.problem import SLACK, Problem, Words

__all__ = ["improve"]

_REACH = 7
"""From how far inside a block work is moved to its end."""

_AT_ONCE = 3
_TRIES = 10

_TENURE = (12, 24)
"""For how many steps a move is not undone."""


def improve(
    problem: Problem, words: Words, steps: int, random: Random, goal: float, expired: Callable[[], bool]
) -> tuple[float, Words]:
    """The best order found in so many steps; sooner where the goal is reached or time is up."""
    graph = Graph(problem, words)
    best, best_words = graph.makespan, words
    tabu: dict[tuple[int, int], int] = {}
    for step in range(steps):
        if best <= goal or (step % 8 == 0 and expired()):
            break
        touched: set[int] = set()
        for time, rank, origin, to, part in _moves(graph, random, tabu, step, best)[:_TRIES]:
            if touched and (len(touched) == _AT_ONCE or rank in touched or time >= graph.makespan):
                continue
            order = graph.orders[rank]
            work, passed = order[origin], order[min(origin, to) : max(origin, to) + 1]
            if not graph.move(rank, origin, to, part):
                continue
            touched.add(rank)
            until = step + random.randint(*_TENURE)
            for other in passed:
                tabu[(other, work) if to < origin else (work, other)] = until
        if not touched:
            tabu.clear()
            _shake(graph, random)
        graph.update()
        if graph.makespan < best * (1 - SLACK):
            best, best_words = graph.makespan, graph.words
    return best, best_words


def _moves(
    graph: Graph, random: Random, tabu: dict[tuple[int, int], int], step: int, best: float
) -> list[tuple[float, int, int, int, list[int]]]:
    """What can be done at the blocks of a longest path, with its estimate, the best first."""
    moves = []
    blocks = _blocks(graph, random)
    for number, (rank, first, last) in enumerate(blocks):
        order = graph.orders[rank]
        tries = []
        if number > 0:
            tries += [(origin, first) for origin in range(first + 1, min(first + _REACH, last) + 1)]
        if number < len(blocks) - 1 and not (tries and last == first + 1):
            tries += [(origin, last) for origin in range(max(first, last - _REACH), last)]
        for origin, to in tries:
            part = graph.moved(rank, origin, to)
            if part is None:
                continue
            low = min(origin, to)
            time = graph.estimate(rank, low, part)
            if time >= best:
                work = order[origin]
                if to < origin:
                    barred = any(tabu.get((work, other), 0) > step for other in part)
                else:
                    barred = any(tabu.get((other, work), 0) > step for other in part)
                if barred:
                    continue
            moves.append((time * (1 + 1e-7 * random.random()), rank, origin, to, part))
    moves.sort(key=lambda move: move[0])
    return moves


def _blocks(graph: Graph, random: Random) -> list[tuple[int, int, int]]:
    """The blocks of one longest path, drawn at random, from its beginning: rank, first and last place."""
    end, duration, nothing = graph.end, graph.duration, graph.nothing
    slack = SLACK * graph.makespan
    work = random.choice([order[-1] for order in graph.orders if end[order[-1]] >= graph.makespan - slack])
    blocks = []
    last = graph.place[work]
    while True:
        start = end[work] - duration[work] - slack
        before, source = graph.before[work], nothing
        for other, time in graph.sources[work]:
            if end[other] + time >= start:
                source = other
        if before != nothing and end[before] >= start and (source == nothing or random.random() < 0.5):
            work = before
            continue
        blocks.append((graph.rank[work], graph.place[work], last))
        if source == nothing:
            break
        work = source
        last = graph.place[work]
    blocks.reverse()
    return blocks


def _shake(graph: Graph, random: Random) -> None:
    """A few neighbours change places, wherever that may be."""
    for _ in range(3):
        rank = random.randrange(len(graph.orders))
        at = random.randrange(len(graph.orders[rank]) - 1)
        part = graph.moved(rank, at, at + 1)
        if part is not None and graph.estimate(rank, at, part) <= graph.makespan * 1.03:
            graph.move(rank, at, at + 1, part)
