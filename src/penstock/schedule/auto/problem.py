"""What the search works on: the work of each stage, where it lives, what it waits for, what a rank may keep.

An order is a word per rank. Its letters are classes of work, numbers from 0 to 4S - 1 for S stages:

    F of stage s: s      I of stage s: S + s      B of stage s: 2S + s      W of stage s: 3S + s

All micro-batches are alike, so within a class they come in their order and a word needs no micro-batch numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from penstock.errors import ScheduleError
from penstock.schedule.costs import Costs
from penstock.schedule.flow import Edge, edges_of
from penstock.schedule.schedule import Schedule

__all__ = ["SLACK", "Problem", "Words", "connect", "make_problem"]

T = TypeVar("T")

Words = list[list[int]]
"""For each rank, its order as classes of work."""

SLACK = 1e-9
"""Sums of the same numbers in another order may differ by this, relative to what they are compared with."""


@dataclass(frozen=True)
class Problem:
    """Plain numbers, ready for the inner loops. Lists by stage are called after the stage's work."""

    placement: tuple[int, ...]
    m: int
    durations: tuple[float, ...]
    """By class."""
    arcs: tuple[tuple[int, int, float], ...]
    """(source stage, destination stage, time that a value takes from one to the other)."""
    activation: tuple[float, ...]
    keep: float
    cap: tuple[float, ...]
    """By rank."""
    contended: bool
    """Whether values queue for a channel: then ``evaluate`` is an estimate, and ``simulate`` has the last word."""

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        return len(self.cap)

    @cached_property
    def local(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        found: list[list[int]] = [[] for _ in self.cap]
        for stage, rank in enumerate(self.placement):
            found[rank].append(stage)
        return tuple(map(tuple, found))

    @cached_property
    def takes(self) -> tuple[float, ...]:
        """By class, what the rank keeps more when the work starts (F) or is over (all else, below zero)."""
        sizes = self.activation
        return (
            *sizes,
            *(-size * (1 - self.keep) for size in sizes),
            *(-size for size in sizes),
            *(-size * self.keep for size in sizes),
        )

    @cached_property
    def fuses(self) -> tuple[bool, ...]:
        """By stage, whether B takes less time than I and W."""
        count, times = self.num_stages, self.durations
        return tuple(
            times[2 * count + s] < (times[count + s] + times[3 * count + s]) * (1 - SLACK) for s in range(count)
        )

    @cached_property
    def work(self) -> tuple[float, ...]:
        """By rank, the least time that all its work on one micro-batch takes."""
        count, times = self.num_stages, self.durations
        return tuple(
            sum(times[s] + min(times[2 * count + s], times[count + s] + times[3 * count + s]) for s in stages)
            for stages in self.local
        )

    @cached_property
    def least(self) -> tuple[float, ...]:
        """By rank, what it keeps when there is one micro-batch at a time: all that its stages keep of it."""
        return tuple(sum(self.activation[s] for s in stages) for stages in self.local)

    def with_m(self, m: int) -> Problem:
        return replace(self, m=m)


def connect(
    problem: Problem, wires: Sequence[list[T]]
) -> tuple[list[list[list[T]]], list[list[tuple[list[T], float, int]]]]:
    """For F and I of each stage, the wires they wait for, and those they send on, with the time and the rank at the
    other end. ``wires`` holds two lists of arrivals for each arc, forth and back.
    """
    count, placement = problem.num_stages, problem.placement
    incoming: list[list[list[T]]] = [[] for _ in range(2 * count)]
    outgoing: list[list[tuple[list[T], float, int]]] = [[] for _ in range(2 * count)]
    for number, (src, dst, time) in enumerate(problem.arcs):
        forth, back = wires[2 * number], wires[2 * number + 1]
        incoming[dst].append(forth)
        outgoing[src].append((forth, time, placement[dst]))
        incoming[count + src].append(back)
        outgoing[count + dst].append((back, time, placement[src]))
    return incoming, outgoing


def make_problem(
    costs: Costs,
    placement: Sequence[int],
    m: int,
    cap: float | Sequence[float] | None,
    edges: Iterable[Edge] | None,
) -> tuple[Problem, tuple[Edge, ...]]:
    """The problem, checked, and its edges."""
    placement = tuple(placement)
    if not placement:
        raise ScheduleError("auto needs at least 1 stage: the placement is empty")
    if m < 1:
        raise ScheduleError(f"auto needs at least 1 micro-batch, not {m}")
    count, ranks = len(placement), max(placement) + 1
    strange = [rank for rank in placement if rank < 0] or sorted(set(range(ranks)) - set(placement))
    if strange:
        raise ScheduleError(f"rank {strange[0]} of the placement {placement} " + (
            "holds no stage: use fewer ranks, or place a stage there" if strange[0] >= 0 else "does not exist"
        ))
    edges = edges_of(Schedule("auto", placement, ((),) * ranks, m), edges)
    times = costs.durations(count)
    arcs, contended = [], False
    for edge in edges:
        time = 0.0
        if placement[edge[0]] != placement[edge[1]]:
            transfer = costs.of_edge("bytes", edge) / costs.of_edge("bandwidth", edge)
            contended |= transfer > 0
            time = transfer + costs.of_edge("latency", edge)
        arcs.append((*edge, time))
    # To the search, a stage keeps from F on what it will keep from I on, if that is more: no order has more than that.
    keeps = costs.of_stages("keep", count)
    problem = Problem(
        placement,
        m,
        (*times["F"], *times["I"], *times["B"], *times["W"]),
        tuple(arcs),
        tuple(size * max(1.0, keep) for size, keep in zip(costs.of_stages("activation", count), keeps, strict=True)),
        max(min(1.0, keep) for keep in keeps),
        (0.0,) * ranks,
        contended,
    )
    problem = replace(problem, cap=_caps(problem, cap))
    _check_room(problem)
    return problem, edges


def _caps(problem: Problem, cap: float | Sequence[float] | None) -> tuple[float, ...]:
    ranks = problem.num_ranks
    if cap is None:
        return (_like_1f1b(problem),) * ranks
    caps = (float(cap),) * ranks if isinstance(cap, int | float) else tuple(map(float, cap))
    if len(caps) != ranks:
        raise ScheduleError(f"cap has {len(caps)} numbers, there are {ranks} ranks: give one number, or {ranks}")
    most = (problem.m * kept for kept in problem.least)  # of all micro-batches: what no limit comes to
    return tuple(every if cap == math.inf else cap for cap, every in zip(caps, most, strict=True))


def _like_1f1b(problem: Problem) -> float:
    """What 1F1B's fullest rank keeps: p - r micro-batches (at most m) on the r-th rank, of all that its stages keep."""
    turns = sorted(range(problem.num_ranks), key=lambda rank: problem.local[rank][0])
    counts = {rank: min(problem.m, len(turns) - turn) for turn, rank in enumerate(turns)}
    return max(counts[rank] * kept for rank, kept in enumerate(problem.least))


def _check_room(problem: Problem) -> None:
    """Every rank has room for one micro-batch in all its stages: in a chain of stages, no order does with less."""
    short = [
        (need - cap, rank)
        for rank, (need, cap) in enumerate(zip(problem.least, problem.cap, strict=True))
        if not need <= cap * (1 + SLACK)
    ]
    if not short:
        return
    lack, rank = max(short, key=lambda entry: entry[0])
    each = ", ".join(f"{need:.4g}" for need in problem.least)
    raise ScheduleError(
        f"no order fits: rank {rank} keeps at least {problem.least[rank]:.4g} (one micro-batch in stages "
        f"{', '.join(map(str, problem.local[rank]))}) and may keep {problem.cap[rank]:.4g}, {lack:.4g} too little. "
        f"The least for all ranks: {each}. Raise the cap, cut the model finer, or recompute"
    )


