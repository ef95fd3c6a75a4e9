"""Tabu search: each step makes the best move at a block of the critical path, even if it makes the order worse.

Orders are a graph of nodes, which moves update incrementally. A node is an op on one micro-batch. It depends on its
inputs and on its predecessor on its rank. The longest paths from the start to each node and from the node to the end
give an estimate of the makespan after a move.

A block is a run of consecutive nodes of one rank on the critical path. Only moving a node out of its block, at one of
its ends, can shorten the path. The pairs of nodes that a move reverses are tabu for some steps.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from penstock.schedule.search.orders import microbatches
from penstock.schedule.search.problem import TOLERANCE, B, C, F, I, Orders, Problem, R, W

_LINES = (0, 1, 1, 2, 3, 0)
"""The line of each kind of op."""


class NodeTable:
    """The nodes of a problem, common to all its orders.

    Node numbers are ``line * m + micro-batch``. The lines are F, the backward (I or B), W and R of each stage.
    """

    def __init__(self, problem: Problem) -> None:
        count, m = problem.num_stages, problem.m
        self.problem = problem
        self.none = 4 * count * m
        """A node before the first and after the last node of every rank."""
        ops = [kind * count + s for kind in (F, I, W, R) for s in range(count)]
        self.rank = [problem.placement[op % count] for op in ops for _ in range(m)]
        self.line = [line for line in range(4 * count) for _ in range(m)]
        self.microbatch = [*range(m)] * (4 * count)
        self.pair = [*range(count * m)] * 4
        """The same number for all nodes of one stage and micro-batch."""
        self.ops = [op for op in ops for _ in range(m)]
        self.shortest = [
            min(problem.duration(kind, s) for s in stages for kind in range(6)) for stages in problem.stages_of
        ]
        """By rank: the duration of its shortest op."""
        self.needs = [problem.memory_need[op] for op in self.ops]
        sources: list[list[tuple[int, float]]] = [[] for _ in range(self.none)]
        targets: list[list[tuple[int, float]]] = [[] for _ in range(self.none)]
        for src, dst, time in problem.arcs:
            for source, target in ((src, dst), (count + dst, count + src)):
                for k in range(m):
                    sources[target * m + k].append((source * m + k, time))
                    targets[source * m + k].append((target * m + k, time))
        self.sources = [tuple(each) for each in sources]
        self.targets = [tuple(each) for each in targets]

    def number(self, orders: Orders) -> tuple[list[list[int]], list[int]]:
        """The order of each rank as nodes, and the op of each node."""
        count, m = self.problem.num_stages, self.problem.m
        ops = list(self.ops)
        numbered = []
        for order, ks in zip(orders, microbatches(self.problem, orders), strict=True):
            nodes = [(_LINES[op // count] * count + op % count) * m + k for op, k in zip(order, ks, strict=True)]
            for node, op in zip(nodes, order, strict=True):
                ops[node] = op
            numbered.append(nodes)
        return numbered, ops


class OpGraph:
    """The graph of complete orders, W included, that fit the cap and do not deadlock.

    Moves leave ``end`` and ``tail`` out of date until ``update``.
    """

    def __init__(self, table: NodeTable, orders: Orders) -> None:
        self.table, self.problem = table, table.problem
        problem = table.problem
        self.stages, self.m = problem.num_stages, problem.m
        self.memory_limit = [cap * (1 + TOLERANCE) for cap in problem.cap]
        self.none, self.rank, self.needs = table.none, table.rank, table.needs
        self.sources, self.targets = table.sources, table.targets
        self.orders, self.ops = table.number(orders)
        self.duration = [*(problem.durations[op] for op in self.ops), 0.0]
        self.change = [problem.memory_change[op] for op in self.ops]
        self.place = [0] * self.none  # position in the rank's order
        self.held = [0.0] * (self.none + 1)  # memory after the node
        self.before, self.after = [self.none] * self.none, [self.none] * self.none
        for order in self.orders:
            self._link(order, 0, len(order) - 1)
        self.sequence: list[int] = []  # all nodes, each after its inputs and its predecessor
        missing = [len(each) for each in self.sources]
        ready = list(range(len(self.orders)))
        position = [0] * len(self.orders)
        while ready:
            rank = ready.pop()
            order = self.orders[rank]
            while position[rank] < len(order) and not missing[order[position[rank]]]:
                node = order[position[rank]]
                position[rank] += 1
                self.sequence.append(node)
                for other, _ in self.targets[node]:
                    missing[other] -= 1
                    if self.rank[other] != rank:
                        ready.append(self.rank[other])
        self.at = [0] * self.none  # position in the sequence
        for i, node in enumerate(self.sequence):
            self.at[node] = i
        self.end, self.tail = [0.0] * (self.none + 1), [0.0] * (self.none + 1)
        """By node: the longest path from the start to its end, and from its start to the end."""
        self._first, self._last = 0, len(self.sequence) - 1  # the part of the sequence that changed
        self.update()

    @property
    def encoded(self) -> Orders:
        return [[self.ops[node] for node in order] for order in self.orders]

    def kind(self, node: int) -> int:
        return self.ops[node] // self.stages

    def _link(self, order: list[int], low: int, high: int) -> None:
        """Set the neighbours, places and memory of the nodes ``order[low : high + 1]``."""
        before = order[low - 1] if low else self.none
        held = self.held[before]
        for i in range(low, high + 1):
            node = order[i]
            self.place[node] = i
            self.before[node] = before
            if before != self.none:
                self.after[before] = node
            held += self.change[node]
            self.held[node] = held
            before = node
        after = order[high + 1] if high + 1 < len(order) else self.none
        self.after[before] = after
        if after != self.none:
            self.before[after] = before

    def update(self) -> None:
        """Recompute the longest paths and the makespan after moves."""
        before, after, duration, sources, targets = self.before, self.after, self.duration, self.sources, self.targets
        end, tail, sequence = self.end, self.tail, self.sequence
        for node in sequence[self._first :]:
            start = end[before[node]]
            for other, time in sources[node]:
                if end[other] + time > start:
                    start = end[other] + time
            end[node] = start + duration[node]
        for node in reversed(sequence[: self._last + 1]):
            rest = tail[after[node]]
            for other, time in targets[node]:
                if tail[other] + time > rest:
                    rest = tail[other] + time
            tail[node] = rest + duration[node]
        self.makespan = max(end[order[-1]] for order in self.orders)
        self._first, self._last = len(sequence), -1

    def moved(self, rank: int, origin: int, to: int) -> list[int] | None:
        """The slice of a rank's order between two places after the node at ``origin`` moves to ``to``.

        None if the move exceeds the cap, or reverses nodes of fixed order: the same op on two micro-batches, two nodes
        of one stage and micro-batch, or a node and its input.
        """
        order, change, needs = self.orders[rank], self.change, self.needs
        lines, microbatch = self.table.line, self.table.microbatch
        node = order[origin]
        line, k = lines[node], microbatch[node]
        low, high = (to, origin) if to < origin else (origin, to)
        part = order[low : high + 1]
        part.remove(node)
        for other in part:
            if lines[other] == line:
                return None
            if microbatch[other] == k and (
                (lines[other] - line) % self.stages == 0
                or any(near == other for near, _ in (*self.sources[node], *self.targets[node]))
            ):
                return None
        part.insert(to - low, node)
        held, limit = self.held[order[low - 1]] if low else 0.0, self.memory_limit[rank]
        for other in part:
            if needs[other] and held + needs[other] > limit:
                return None
            held += change[other]
        return part

    def estimate(self, rank: int, low: int, part: list[int]) -> float:
        """The longest path through a new slice of an order from place ``low``, with all other nodes unchanged."""
        end, tail, duration = self.end, self.tail, self.duration
        order = self.orders[rank]
        now = end[order[low - 1]] if low else 0.0
        ends = []
        for node in part:
            for other, time in self.sources[node]:
                if end[other] + time > now:
                    now = end[other] + time
            now += duration[node]
            ends.append(now)
        high = low + len(part)
        rest = tail[order[high]] if high < len(order) else 0.0
        longest = 0.0
        for i in range(len(part) - 1, -1, -1):
            node = part[i]
            for other, time in self.targets[node]:
                if tail[other] + time > rest:
                    rest = tail[other] + time
            if ends[i] + rest > longest:
                longest = ends[i] + rest
            rest += duration[node]
        return longest

    def move(self, rank: int, origin: int, to: int, part: list[int]) -> bool:
        """Replace a slice of the order with ``part``; False, without a change, if that would close a cycle."""
        order = self.orders[rank]
        low, high = min(origin, to), max(origin, to)
        first, last = self.at[order[low]], self.at[order[high]]
        window = self.sequence[first : last + 1]
        node = order[origin]
        passed = set(part)
        passed.discard(node)
        moving = {node}
        # Nodes that depend on the node (or that it depends on) move with it in the sequence, past the passed nodes.
        if to > origin:
            near, neighbour = self.sources, self.before
            scan = window[1:]
        else:
            near, neighbour = self.targets, self.after
            scan = window[-2::-1]
        for other in scan:
            if other in passed:
                if any(source in moving for source, _ in near[other]):
                    return False
            elif neighbour[other] in moving or any(source in moving for source, _ in near[other]):
                moving.add(other)
        stay = [other for other in window if other not in moving]
        along = [other for other in window if other in moving]
        window = stay + along if to > origin else along + stay
        self.sequence[first : last + 1] = window
        for i, other in enumerate(window, first):
            self.at[other] = i
        order[low : high + 1] = part
        self._link(order, low, high)
        self._first, self._last = min(self._first, first), max(self._last, last)
        return True

    def fuse(self, backward: int) -> int:
        """Fuse an I and its W to a B; return the place of the W."""
        return self._remove(backward + self.stages * self.m, backward, backward // self.m + self.stages)

    def split(self, backward: int, place: int | None = None) -> None:
        """Split a B into I and W, with the W at ``place`` of the order, or directly after the I."""
        place = self.place[backward] + 1 if place is None else place
        self._insert(backward + self.stages * self.m, place, backward, backward // self.m)

    def keep(self, forward: int) -> int | None:
        """Remove a recompute; return its place. None, without a change, if that exceeds the cap."""
        rank, recompute = self.rank[forward], forward + 3 * self.stages * self.m
        limit, held = self.memory_limit[rank] - self.change[recompute], self.held
        before = forward
        for other in self.orders[rank][self.place[forward] + 1 : self.place[recompute]]:
            if self.needs[other] and held[before] + self.needs[other] > limit:
                return None
            before = other
        return self._remove(recompute, forward, forward // self.m)

    def recompute(self, forward: int, place: int | None = None) -> None:
        """Recompute a micro-batch, with its R at ``place`` of the order, or directly before its backward."""
        place = self.place[forward + self.stages * self.m] if place is None else place
        self._insert(forward + 3 * self.stages * self.m, place, forward, C * self.stages + forward // self.m)

    def _remove(self, node: int, other: int, op: int) -> int:
        """Remove a node, and change the op of the earlier node ``other``; return the place of the removed node."""
        place, at = self.place[node], self.at[node]
        del self.orders[self.rank[node]][place], self.sequence[at]
        self._change_op(other, op, at)
        return place

    def _insert(self, node: int, place: int, other: int, op: int) -> None:
        """Insert a node, in the sequence after its predecessor, and change the op of the earlier node ``other``."""
        order = self.orders[self.rank[node]]
        at = self.at[order[place - 1]] + 1
        order.insert(place, node)
        self.sequence.insert(at, node)
        self._change_op(other, op, at)

    def _change_op(self, node: int, op: int, last: int) -> None:
        """Change the op of ``node``, and relink after an insertion or removal at ``last`` of the sequence."""
        self.ops[node] = op
        self.duration[node], self.change[node] = self.problem.durations[op], self.problem.memory_change[op]
        order, first = self.orders[self.rank[node]], self.at[node]
        self._link(order, self.place[node], len(order) - 1)
        for i in range(first, len(self.sequence)):
            self.at[self.sequence[i]] = i
        self._first, self._last = min(self._first, first), max(self._last, min(last, len(self.sequence) - 1))


_Block = tuple[int, int, int]
"""Rank, first and last place in its order."""

_REACH = 7  # largest distance of a node from the end of its block for a move to this end
_TRIES = 10  # moves tried per step, best first
_MOVES_PER_STEP = 3  # on different ranks; moves after the first must shorten the path
_FUSE_RATE = 0.3  # the fraction of steps that fuse or split a backward, where fusing pays
_RECOMPUTE_RATE = 0.3  # the fraction of steps that add or remove a recompute, where those are optional
_TENURE = (20, 40)  # the range of the number of steps for which a reversed pair is tabu


def tabu_search(
    table: NodeTable, orders: Orders, steps: int, random: Random, goal: float, expired: Callable[[], bool]
) -> tuple[float, Orders]:
    """The best makespan and orders of up to ``steps`` steps; fewer if the goal is reached or the time has expired."""
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
    """The graph of the orders, without the optional recomputes that memory does not require."""
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
    """Make the best move, and also moves on other ranks if they shorten the path."""
    changed_ranks: set[int] = set()
    for time, rank, origin, to, part in _moves(graph, blocks, random, tabu, step, best)[:_TRIES]:
        if changed_ranks and (len(changed_ranks) == _MOVES_PER_STEP or rank in changed_ranks or time >= graph.makespan):
            continue
        order = graph.orders[rank]
        node, passed = order[origin], order[to:origin] or order[origin + 1 : to + 1]
        if graph.move(rank, origin, to, part):  # False if it would close a cycle
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
    """Fuse an I and a W on the path, or split a B, unless that increases the makespan."""
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
    """Remove a recompute on the path, if memory allows; or add one, unless that increases the makespan."""
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
    """Moves at the ends of blocks: (estimated makespan, rank, origin, destination, new slice), best first."""
    moves = []
    for number, (rank, first, last) in enumerate(blocks):
        candidates = []
        if number > 0:
            candidates += [(origin, first) for origin in range(first + 1, min(first + _REACH, last) + 1)]
        if number < len(blocks) - 1 and not (candidates and last == first + 1):
            candidates += [(origin, last) for origin in range(max(first, last - _REACH), last)]
        for origin, to in candidates:
            part = graph.moved(rank, origin, to)
            if part is None:
                continue
            time = graph.estimate(rank, min(origin, to), part)
            if time >= best:
                node = graph.orders[rank][origin]
                if any(tabu.get((node, other) if to < origin else (other, node), 0) > step for other in part):
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
