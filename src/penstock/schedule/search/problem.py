"""What the search works on: the work of each stage, where it lives, what it waits for, what a rank may keep.

An order is a word per rank. Its letters are classes of work, numbers from 0 to 6S - 1 for S stages:

    F of stage s: s      I of stage s: S + s      B of stage s: 2S + s      W of stage s: 3S + s
                         R of stage s: 4S + s     F of stage s that drops what it made, for R to bring back: 5S + s

All micro-batches are alike, so within a class they come in their order and a word needs no micro-batch numbers. Which
of them are recomputed is plain from the forwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from penstock.errors import ScheduleError
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Edge, Schedule, edges_of

__all__ = ["TOLERANCE", "Orders", "Problem", "connect_arcs", "make_problem"]

T = TypeVar("T")

Orders = list[list[int]]
"""For each rank, its order as classes of work."""

TOLERANCE = 1e-9
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
    """By stage, what is counted from F on: all that it keeps, before I or after it."""
    before: tuple[float, ...]
    """By stage, the fraction of that which is really there before I."""
    keep: tuple[float, ...]
    """By stage, the fraction that is there between I and W."""
    cap: tuple[float, ...]
    """By rank."""
    contended: bool
    """Whether values queue for a channel: then ``evaluate`` is an estimate, and ``simulate`` has the last word."""
    checkpoint: tuple[float, ...]
    """By stage, the fraction of an activation that is held between F and R."""
    again: tuple[bool, ...]
    """By stage, whether its forwards drop what they made."""
    loose: bool = False
    """Whether forwards of those stages may keep it, one or the other or all."""

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
        """By class, what the rank keeps more once the work is over: below zero for a backward."""
        sizes = self.activation
        held = [size * part for size, part in zip(sizes, self.checkpoint, strict=True)]
        return (
            *sizes,
            *(-size * (1 - keep) for size, keep in zip(sizes, self.keep, strict=True)),
            *(-size for size in sizes),
            *(-size * keep for size, keep in zip(sizes, self.keep, strict=True)),
            *(size - part for size, part in zip(sizes, held, strict=True)),
            *held,
        )

    @cached_property
    def needs(self) -> tuple[float, ...]:
        """By class, the room that there must be for it."""
        count, none = self.num_stages, (0.0,) * self.num_stages
        return (*self.activation, *none, *none, *none, *self.takes[4 * count : 5 * count], *self.activation)

    @cached_property
    def fuses(self) -> tuple[bool, ...]:
        """By stage, whether B takes less time than I and W."""
        count, times = self.num_stages, self.durations
        return tuple(
            times[2 * count + s] < (times[count + s] + times[3 * count + s]) * (1 - TOLERANCE) for s in range(count)
        )

    @cached_property
    def work(self) -> tuple[float, ...]:
        """By rank, the least time that all its work on one micro-batch takes."""
        count, times = self.num_stages, self.durations
        return tuple(
            sum(
                times[s]
                + min(times[2 * count + s], times[count + s] + times[3 * count + s])
                + (times[4 * count + s] if self.again[s] and not self.loose else 0.0)
                for s in stages
            )
            for stages in self.local
        )

    @cached_property
    def least(self) -> tuple[float, ...]:
        """By rank, what it keeps when there is one micro-batch at a time."""
        return tuple(self.memory_from(stages) for stages in self.local)

    def memory_from(self, stages: Sequence[int]) -> float:
        """What some stages of a rank need, one after the other, for one micro-batch."""
        need = 0.0
        for s in reversed(stages):
            need = max(self.activation[s], self.held(s) + need)
        return need

    def held(self, stage: int) -> float:
        """What a stage keeps of a micro-batch after its forward."""
        return self.activation[stage] * (self.checkpoint[stage] if self.again[stage] else 1.0)

    def with_m(self, m: int) -> Problem:
        return replace(self, m=m)

    def with_full_backwards(self) -> Problem:
        """The problem of orders in which nothing waits for W: with what is really there before I."""
        if min(self.before) == 1:
            return self
        sizes = tuple(size * part for size, part in zip(self.activation, self.before, strict=True))
        held = tuple(part / own for part, own in zip(self.checkpoint, self.before, strict=True))
        ones = (1.0,) * self.num_stages
        return replace(self, activation=sizes, before=ones, keep=ones, checkpoint=held)

    def relaxed_to_fit(self) -> Problem:
        """The problem, if one micro-batch at a time fits; else the one in which W takes no time, and I that of B: for
        orders of whole backwards, in which nothing waits.
        """
        tried = self.with_recomputed(range(self.num_stages)) if self.loose else self
        if tried.fits:
            return self
        count, times = self.num_stages, self.durations
        whole = times[2 * count : 3 * count]
        times = (*times[:count], *whole, *whole, *(0.0,) * count, *times[4 * count :])
        return replace(self.with_full_backwards(), durations=times)

    @property
    def fits(self) -> bool:
        """Whether every rank has room for one micro-batch in all its stages."""
        return all(need <= cap * (1 + TOLERANCE) for need, cap in zip(self.least, self.cap, strict=True))

    def with_recomputed(self, stages: Iterable[int]) -> Problem:
        """With all forwards of these stages recomputed, and of no others."""
        chosen = set(stages)
        return replace(self, again=tuple(s in chosen for s in range(self.num_stages)), loose=False)


def connect_arcs(
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
    recompute: Iterable[int] | bool | None = False,
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
        raise ScheduleError(
            f"rank {strange[0]} of the placement {placement} "
            + ("holds no stage: use fewer ranks, or place a stage there" if strange[0] >= 0 else "does not exist")
        )
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
    keeps = costs.of_stages("keep", count)
    before = [1 / max(1.0, keep) for keep in keeps]
    problem = Problem(
        placement,
        m,
        (*times["F"], *times["I"], *times["B"], *times["W"], *times["R"], *times["F"]),
        tuple(arcs),
        tuple(size / part for size, part in zip(costs.of_stages("activation", count), before, strict=True)),
        tuple(before),
        tuple(min(1.0, keep) for keep in keeps),
        (0.0,) * ranks,
        contended,
        tuple(part * own for part, own in zip(costs.of_stages("checkpoint", count), before, strict=True)),
        _recomputed(recompute, count),
        recompute is None,
    )
    problem = replace(problem, cap=_caps(problem, cap))
    _check_memory(problem.with_full_backwards())
    return problem, edges


def _recomputed(recompute: Iterable[int] | bool | None, count: int) -> tuple[bool, ...]:
    if recompute is None or isinstance(recompute, bool):
        return (recompute is not False,) * count
    chosen = set(recompute)
    strange = sorted(chosen - set(range(count)))
    if strange:
        raise ScheduleError(f"recompute names stage {strange[0]}, but there are {count} stages (0..{count - 1})")
    return tuple(s in chosen for s in range(count))


def _caps(problem: Problem, cap: float | Sequence[float] | None) -> tuple[float, ...]:
    ranks = problem.num_ranks
    if cap is None:
        return (_peak_of_1f1b(problem),) * ranks
    caps = (float(cap),) * ranks if isinstance(cap, int | float) else tuple(map(float, cap))
    if len(caps) != ranks:
        raise ScheduleError(f"cap has {len(caps)} numbers, there are {ranks} ranks: give one number, or {ranks}")
    most = (problem.m * sum(problem.activation[s] for s in stages) for stages in problem.local)  # it never keeps more
    return tuple(every if cap == math.inf else cap for cap, every in zip(caps, most, strict=True))


def _peak_of_1f1b(problem: Problem) -> float:
    """What 1F1B's fullest rank keeps: p - r micro-batches (at most m) on the r-th rank, of all that its stages keep; of
    stages that are recomputed one more whole.
    """
    turns = sorted(range(problem.num_ranks), key=lambda rank: problem.local[rank][0])
    if problem.loose:
        problem = problem.with_recomputed(())
    kept = []
    for turn, rank in enumerate(turns):
        stages = problem.local[rank]
        whole = max(problem.activation[s] - problem.held(s) for s in stages)
        kept.append(min(problem.m, len(turns) - turn) * sum(map(problem.held, stages)) + whole)
    return max(kept)


def _check_memory(problem: Problem) -> None:
    """Every rank has room for one micro-batch in all its stages: in a chain of stages, no order does with less."""
    short = [
        (need - cap, rank)
        for rank, (need, cap) in enumerate(zip(problem.least, problem.cap, strict=True))
        if not need <= cap * (1 + TOLERANCE)
    ]
    if not short:
        return
    lack, rank = max(short, key=lambda entry: entry[0])
    each = ", ".join(f"{need:.4g}" for need in problem.least)
    raise ScheduleError(
        f"no order fits: rank {rank} keeps at least {problem.least[rank]:.4g} (one micro-batch in stages "
        f"{', '.join(map(str, problem.local[rank]))}) and may keep {problem.cap[rank]:.4g}, {lack:.4g} too little. "
        f"The least for all ranks: {each}. Raise the cap, "
        + ("or cut the model finer" if all(problem.again) else "cut the model finer, or recompute")
    )
