"""Tabu search: at each step the best move at a block of the critical path, even if it makes the order worse.

A block is a run of consecutive nodes of one rank on the critical path. To shorten the path, a node must leave its block
at one of the ends. The pairs of nodes that a move reverses are tabu for some steps.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from penstock.schedule.search.op_graph import NodeTable, OpGraph
from penstock.schedule.search.problem import TOLERANCE, B, C, F, Orders

_Block = tuple[int, int, int]
"""Rank, first and last place in its order."""

_REACH = 7  # how far from the end of a block a node may be that moves there
_TRIES = 10  # moves tried per step, best first
_MOVES_PER_STEP = 3  # on different ranks; those after the first only if they shorten the path
_FUSE_RATE = 0.3  # the fraction of steps that fuse or split a backward, where fusing pays
_RECOMPUTE_RATE = 0.3  # the fraction of steps that add or remove a recompute, where those are optional
_TENURE = (20, 40)  # the range of the number of steps for which a reversed pair is tabu


def tabu_search(
    table: NodeTable, orders: Orders, steps: int, random: Random, goal: float, expired: Callable[[], bool]
) -> tuple[float, Orders]:
    """The best orders of ``steps`` steps, fewer if the goal is reached or time has expired, with their makespan."""
    problem = table.problem
    graph = _drop_needless_recomputes(table, orders)
    best, best_orders = graph.makespan, graph.encoded
    fusing_pays = any(problem.fusing_pays)
    tabu: dict[tuple[int, int], int] = {}
    for step in range(steps):
        if best <= goal or (step % 8 == 0 and expired()):
            break
        blocks = _blocks(graph, random)
        if fusing_pays and random.random() < _FUSE_RATE:
            _fuse_or_split(graph, random, blocks)
        elif problem.recompute_optional and random.random() < _RECOMPUTE_RATE:
            _add_or_remove_recompute(graph, random, blocks)
        else:
            _make_moves(graph, random, blocks, tabu, step, best)
        if graph.makespan < best * (1 - TOLERANCE):
            best, best_orders = graph.makespan, graph.encoded
    if problem.recompute_optional:
        graph = _drop_needless_recomputes(table, best_orders)
        best, best_orders = graph.makespan, graph.encoded
    return best, best_orders


def _drop_needless_recomputes(table: NodeTable, orders: Orders) -> OpGraph:
    """The graph of the orders, without optional recomputes for whose activations there is memory."""
    graph = OpGraph(table, orders)
    if table.problem.recompute_optional:
        for forward in range(graph.stages * graph.m):
            if graph.kind(forward) == C:
                graph.keep(forward)
        graph.update()
    return graph


def _make_moves(
    graph: OpGraph, random: Random, blocks: list[_Block], tabu: dict[tuple[int, int], int], step: int, best: float
) -> None:
    """Make the best move, and with it moves on other ranks that shorten the path, too."""
    changed_ranks: set[int] = set()
    for time, rank, origin, to, part in _moves(graph, blocks, random, tabu, step, best)[:_TRIES]:
        if changed_ranks and (len(changed_ranks) == _MOVES_PER_STEP or rank in changed_ranks or time >= graph.makespan):
            continue
        order = graph.orders[rank]
        node, passed = order[origin], order[to:origin] or order[origin + 1 : to + 1]
        if graph.move(rank, origin, to, part):  # it may turn out to close a cycle
            changed_ranks.add(rank)
            until = step + random.randint(*_TENURE)
            for other in passed:
                tabu[(other, node) if to < origin else (node, other)] = until
    if not changed_ranks:
        tabu.clear()
        for _ in range(3):  # swap random neighbours, to leave a local optimum without moves
            rank = random.randrange(len(graph.orders))
            at = random.randrange(len(graph.orders[rank]) - 1)
            swapped = graph.moved(rank, at, at + 1)
            if swapped is not None and graph.estimate(rank, at, swapped) <= graph.makespan * 1.03:
                graph.move(rank, at, at + 1, swapped)
    graph.update()


def _fuse_or_split(graph: OpGraph, random: Random, blocks: list[_Block]) -> None:
    """Fuse an I and a W on the path, or split a B, unless that takes longer."""
    rank, first, last = random.choice(blocks)
    node, half = graph.orders[rank][random.randint(first, last)], graph.stages * graph.m
    if not half <= node < 3 * half or not graph.problem.fusing_pays[node // graph.m % graph.stages]:
        return
    backward, makespan = node if node < 2 * half else node - half, graph.makespan
    if graph.kind(backward) == B:
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


def _add_or_remove_recompute(graph: OpGraph, random: Random, blocks: list[_Block]) -> None:
    """Remove a recompute on the path, if there is memory; or add one, if that takes no longer."""
    rank, first, last = random.choice(blocks)
    node, half = graph.orders[rank][random.randint(first, last)], graph.stages * graph.m
    if node >= 3 * half:
        graph.keep(node - 3 * half)
    elif node < half and graph.kind(node) == F and graph.problem.recomputed[node // graph.m]:
        makespan = graph.makespan
        graph.recompute(node)
        graph.update()
        if graph.makespan > makespan * (1 + TOLERANCE):
            graph.keep(node)
    graph.update()


def _moves(
    graph: OpGraph, blocks: list[_Block], random: Random, tabu: dict[tuple[int, int], int], step: int, best: float
) -> list[tuple[float, int, int, int, list[int]]]:
    """The moves at the blocks: (estimated makespan, rank, origin, destination, new slice), best first."""
    moves = []
    for number, (rank, first, last) in enumerate(blocks):
        order = graph.orders[rank]
        candidates = []
        if number > 0:
            candidates += [(origin, first) for origin in range(first + 1, min(first + _REACH, last) + 1)]
        if number < len(blocks) - 1 and not (candidates and last == first + 1):
            candidates += [(origin, last) for origin in range(max(first, last - _REACH), last)]
        for origin, to in candidates:
            part = graph.moved(rank, origin, to)
            if part is None:
                continue
            low = min(origin, to)
            time = graph.estimate(rank, low, part)
            if time >= best:
                node = order[origin]
                if to < origin:
                    is_tabu = any(tabu.get((node, other), 0) > step for other in part)
                else:
                    is_tabu = any(tabu.get((other, node), 0) > step for other in part)
                if is_tabu:
                    continue
            moves.append((time * (1 + 1e-7 * random.random()), rank, origin, to, part))
    moves.sort(key=lambda move: move[0])
    return moves


def _blocks(graph: OpGraph, random: Random) -> list[_Block]:
    """The blocks of one critical path, chosen at random, from its start."""
    end, duration, none = graph.end, graph.duration, graph.none
    tolerance = TOLERANCE * graph.makespan
    node = random.choice([order[-1] for order in graph.orders if end[order[-1]] >= graph.makespan - tolerance])
    blocks = []
    last = graph.place[node]
    while True:
        start = end[node] - duration[node] - tolerance
        before, source = graph.before[node], none
        for other, time in graph.sources[node]:
            if end[other] + time >= start:
                source = other
        if before != none and end[before] >= start and (source == none or random.random() < 0.5):
            node = before
            continue
        blocks.append((graph.rank[node], graph.place[node], last))
        if source == none:
            break
        node = source
        last = graph.place[node]
    blocks.reverse()
    return blocks
