"""Improve an order by tabu search: at each step the best move at a block of its longest path, though it may be worse.

A block is a run of consecutive work of one rank on the path that decides the makespan. To shorten the path, work of
a block must leave it at one of its ends. What a move has turned round stays so for some steps.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from penstock.schedule.search.op_graph import OpGraph, OpTable
from penstock.schedule.search.problem import TOLERANCE, Orders

__all__ = ["tabu_search"]

Block = tuple[int, int, int]
"""Rank, first and last place."""

_REACH = 7
"""From how far inside a block work is moved to its end."""

_AT_ONCE = 3
"""So many moves are made in a step, on different ranks; the others only where they shorten the path."""

_TRIES = 10
"""So many of the best moves are looked at in a step: work may turn out to wait for itself."""

_FUSING = 0.3
"""How often a step is one that fuses or splits a backward, where B takes less time than I and W."""

_KEEPING = 0.3
"""How often a step is one that recomputes a micro-batch or not, where that may be chosen."""

_TENURE = (20, 40)
"""For how many steps a move is not undone."""


def tabu_search(
    pieces: OpTable, words: Orders, steps: int, random: Random, goal: float, expired: Callable[[], bool]
) -> tuple[float, Orders]:
    """The best order found in so many steps; sooner where the goal is reached or time is up."""
    graph = _drop_needless_recomputes(pieces, words)
    best, best_words = graph.makespan, graph.words
    fuses = any(pieces.problem.fuses)
    tabu: dict[tuple[int, int], int] = {}
    for step in range(steps):
        if best <= goal or (step % 8 == 0 and expired()):
            break
        blocks = _blocks(graph, random)
        if fuses and random.random() < _FUSING:
            _fuse_or_split(graph, random, blocks)
        elif pieces.problem.loose and random.random() < _KEEPING:
            _keep_or_drop(graph, random, blocks)
        else:
            _make_moves(graph, random, blocks, tabu, step, best)
        if graph.makespan < best * (1 - TOLERANCE):
            best, best_words = graph.makespan, graph.words
    if pieces.problem.loose:
        graph = _drop_needless_recomputes(pieces, best_words)
        best, best_words = graph.makespan, graph.words
    return best, best_words


def _drop_needless_recomputes(pieces: OpTable, words: Orders) -> OpGraph:
    """An order without the recomputes that it has room to do without, where that may be chosen."""
    graph = OpGraph(pieces, words)
    if pieces.problem.loose:
        for forward, dropped in enumerate(graph.dropped):
            if dropped:
                graph.keep(forward)
        graph.update()
    return graph


def _make_moves(
    graph: OpGraph, random: Random, blocks: list[Block], tabu: dict[tuple[int, int], int], step: int, best: float
) -> None:
    """The best move, and with it some on other ranks that shorten the path, too."""
    touched: set[int] = set()
    for time, rank, origin, to, part in _moves(graph, blocks, random, tabu, step, best)[:_TRIES]:
        if touched and (len(touched) == _AT_ONCE or rank in touched or time >= graph.makespan):
            continue
        order = graph.orders[rank]
        work, passed = order[origin], order[to:origin] or order[origin + 1 : to + 1]
        if not graph.move(rank, origin, to, part):
            continue
        touched.add(rank)
        until = step + random.randint(*_TENURE)
        for other in passed:
            tabu[(other, work) if to < origin else (work, other)] = until
    if not touched:
        tabu.clear()
        _random_swaps(graph, random)
    graph.update()


def _fuse_or_split(graph: OpGraph, random: Random, blocks: list[Block]) -> None:
    """Make a B of an I and a W on the path, or the other way round, unless that takes longer."""
    rank, first, last = random.choice(blocks)
    work, half = graph.orders[rank][random.randint(first, last)], graph.stages * graph.m
    if not half <= work < 3 * half or not graph.problem.fuses[work // graph.m % graph.stages]:
        return
    backward, makespan = work if work < 2 * half else work - half, graph.makespan
    if graph.fused[backward]:
        graph.split(backward)
        graph.update()
        if graph.makespan > makespan * (1 + TOLERANCE):
            graph.fuse(backward)
            graph.update()
    else:
        place = graph.fuse(backward)
        graph.update()
        if graph.makespan > makespan * (1 + TOLERANCE):
            graph.split(backward, place)
            graph.update()


def _keep_or_drop(graph: OpGraph, random: Random, blocks: list[Block]) -> None:
    """Do without a recompute on the path, where there is room; or have one more, if that takes no longer."""
    rank, first, last = random.choice(blocks)
    work, half = graph.orders[rank][random.randint(first, last)], graph.stages * graph.m
    if work >= 3 * half:
        graph.keep(work - 3 * half)
    elif work < half and not graph.dropped[work] and graph.problem.again[work // graph.m]:
        makespan = graph.makespan
        graph.drop(work)
        graph.update()
        if graph.makespan > makespan * (1 + TOLERANCE):
            graph.keep(work)
    graph.update()


def _moves(
    graph: OpGraph, blocks: list[Block], random: Random, tabu: dict[tuple[int, int], int], step: int, best: float
) -> list[tuple[float, int, int, int, list[int]]]:
    """What can be done at the blocks, with its estimate, the best first."""
    moves = []
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


def _blocks(graph: OpGraph, random: Random) -> list[Block]:
    """The blocks of one longest path, drawn at random, from its beginning."""
    end, duration, nothing = graph.end, graph.duration, graph.nothing
    slack = TOLERANCE * graph.makespan
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


def _random_swaps(graph: OpGraph, random: Random) -> None:
    """A few neighbours change places, wherever that may be."""
    for _ in range(3):
        rank = random.randrange(len(graph.orders))
        at = random.randrange(len(graph.orders[rank]) - 1)
        part = graph.moved(rank, at, at + 1)
        if part is not None and graph.estimate(rank, at, part) <= graph.makespan * 1.03:
            graph.move(rank, at, at + 1, part)
