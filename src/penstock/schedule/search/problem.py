"""The problem of the search: durations, placement, dependencies and the memory cap of each rank.

The search encodes the order of a rank as a list of op codes, ``kind * num_stages + stage``. The kinds are

    F  forward             I  input gradient      B  full backward
    W  weight gradient     R  recompute           C  forward that keeps only its checkpoint, for R to recompute

Encoded orders have no micro-batch numbers: within one op code, the micro-batches are in ascending order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.errors import ScheduleError
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Edge, Schedule, edges_of

F, I, B, W, R, C = range(6)  # noqa: E741
KINDS = "FIBWRF"
"""The kind of action of each kind of op."""

Orders = list[list[int]]
"""For each rank, its order as op codes."""

TOLERANCE = 1e-9
"""Relative tolerance for comparing sums of the same numbers in another order."""


@dataclass(frozen=True)
class Problem:
    """The numbers of the problem, as flat tuples for the inner loops."""

    placement: tuple[int, ...]
    m: int
    durations: tuple[float, ...]  # by op
    arcs: tuple[tuple[int, int, float], ...]  # source stage, destination stage, transfer time
    # By stage: the memory reserved at F, which is the larger of the memory before I and the memory between I and W; and
    # the fractions of it that are held before I, and between I and W.
    activation: tuple[float, ...]
    before_i: tuple[float, ...]
    keep: tuple[float, ...]
    cap: tuple[float, ...]  # by rank
    contended: bool  # transfers queue for a channel: ``evaluate`` is an estimate, ``simulate`` is exact
    checkpoint: tuple[float, ...]  # by stage: the fraction of ``activation`` that is held between C and R
    recomputed: tuple[bool, ...]  # by stage: whether its micro-batches are recomputed
    recompute_optional: bool = False  # the search may keep some micro-batches of the recomputed stages

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        return len(self.cap)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """By rank: its stages."""
        ranks = range(self.num_ranks)
        return tuple(tuple(s for s, owner in enumerate(self.placement) if owner == rank) for rank in ranks)

    @cached_property
    def memory_change(self) -> tuple[float, ...]:
        """By op: the change of the rank's memory from the start to the end of the op."""
        changes = [
            (size, -size * (1 - keep), -size, -size * keep, size - size * part, size * part)
            for size, keep, part in zip(self.activation, self.keep, self.checkpoint, strict=True)
        ]
        return tuple(change for kind in zip(*changes, strict=True) for change in kind)

    @cached_property
    def memory_need(self) -> tuple[float, ...]:
        """By op: the free memory that it requires."""
        count, none = self.num_stages, (0.0,) * self.num_stages
        return (*self.activation, *none, *none, *none, *self.memory_change[R * count : C * count], *self.activation)

    @cached_property
    def fusing_pays(self) -> tuple[bool, ...]:
        """By stage: whether B takes less time than I and W together."""
        return tuple(
            self.duration(B, s) < (self.duration(I, s) + self.duration(W, s)) * (1 - TOLERANCE)
            for s in range(self.num_stages)
        )

    @cached_property
    def recompute_times(self) -> tuple[float, ...]:
        """By stage: the time of a recompute that is not optional."""
        forced = [recomputed and not self.recompute_optional for recomputed in self.recomputed]
        return tuple(self.duration(R, s) if forced[s] else 0.0 for s in range(self.num_stages))

    @cached_property
    def work(self) -> tuple[float, ...]:
        """By rank: the least time of all its actions on one micro-batch."""
        times = []
        for s in range(self.num_stages):
            backward = min(self.duration(B, s), self.duration(I, s) + self.duration(W, s))
            times.append(self.duration(F, s) + backward + self.recompute_times[s])
        return tuple(sum(times[s] for s in stages) for stages in self.stages_of)

    @cached_property
    def least_memory(self) -> tuple[float, ...]:
        """By rank: its peak memory with one micro-batch at a time."""
        return tuple(map(self.memory_from, self.stages_of))

    @property
    def feasible(self) -> bool:
        """Whether every rank has memory for one micro-batch in all its stages."""
        return all(need <= cap * (1 + TOLERANCE) for need, cap in zip(self.least_memory, self.cap, strict=True))

    def duration(self, kind: int, stage: int) -> float:
        return self.durations[kind * self.num_stages + stage]

    def memory_from(self, stages: Sequence[int]) -> float:
        """The peak memory of one micro-batch on these stages of a rank."""
        need = 0.0
        for s in reversed(stages):
            need = max(self.activation[s], self.held_after_forward(s) + need)
        return need

    def held_after_forward(self, stage: int) -> float:
        """The memory of one micro-batch on a stage after its forward."""
        return self.activation[stage] * (self.checkpoint[stage] if self.recomputed[stage] else 1.0)

    def with_recomputed(self, stages: Iterable[int]) -> Problem:
        """The problem with exactly these stages recomputed."""
        chosen = set(stages)
        return replace(self, recomputed=tuple(s in chosen for s in range(self.num_stages)), recompute_optional=False)

    def with_full_backwards(self) -> Problem:
        """The problem restricted to orders with W directly after I, where only the memory before I counts."""
        if min(self.before_i) == 1:
            return self
        sizes = tuple(size * part for size, part in zip(self.activation, self.before_i, strict=True))
        checkpoints = tuple(part / before for part, before in zip(self.checkpoint, self.before_i, strict=True))
        ones = (1.0,) * self.num_stages
        return replace(self, activation=sizes, before_i=ones, keep=ones, checkpoint=checkpoints)

    def relaxed_to_fit(self) -> Problem:
        """The problem itself, if one micro-batch at a time fits. Otherwise the problem with full backwards: I takes the
        time of B, W takes no time, and no memory is held between them.
        """
        tightest = self.with_recomputed(range(self.num_stages)) if self.recompute_optional else self
        if tightest.feasible:
            return self
        count, times = self.num_stages, self.durations
        backwards = times[B * count : W * count]
        times = (*times[:count], *backwards, *backwards, *(0.0,) * count, *times[R * count :])
        return replace(self.with_full_backwards(), durations=times)


def make_problem(
    costs: Costs,
    placement: Sequence[int],
    m: int,
    cap: float | Sequence[float] | None,
    edges: Iterable[Edge] | None,
    recompute: Iterable[int] | bool | None = False,
) -> tuple[Problem, tuple[Edge, ...]]:
    """Validate the arguments of ``auto``; return the problem and its edges."""
    placement = tuple(placement)
    if not placement:
        raise ScheduleError("auto needs at least 1 stage: the placement is empty")
    if m < 1:
        raise ScheduleError(f"auto needs at least 1 micro-batch, not {m}")
    count, ranks = len(placement), max(placement) + 1
    wrong = [rank for rank in placement if rank < 0] or sorted(set(range(ranks)) - set(placement))
    if wrong:
        raise ScheduleError(
            f"rank {wrong[0]} of the placement {placement} "
            + ("holds no stage: use fewer ranks, or place a stage there" if wrong[0] >= 0 else "does not exist")
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
    chosen = set(range(count)) if recompute is None or recompute is True else set(recompute or ())
    unknown = sorted(chosen - set(range(count)))
    if unknown:
        raise ScheduleError(f"recompute names stage {unknown[0]}, but there are {count} stages (0..{count - 1})")
    keeps = costs.of_stages("keep", count)
    before_i = [1 / max(1.0, keep) for keep in keeps]
    problem = Problem(
        placement,
        m,
        tuple(time for kind in KINDS for time in times[kind]),
        tuple(arcs),
        tuple(size / part for size, part in zip(costs.of_stages("activation", count), before_i, strict=True)),
        tuple(before_i),
        tuple(min(1.0, keep) for keep in keeps),
        (0.0,) * ranks,
        contended,
        tuple(part * before for part, before in zip(costs.of_stages("checkpoint", count), before_i, strict=True)),
        tuple(s in chosen for s in range(count)),
        recompute is None,
    )
    if cap is None:
        # The largest peak of a rank with 1F1B. The r-th of p ranks holds min(m, p - r) micro-batches in all its stages;
        # if stages are recomputed, one complete activation is added.
        kept = problem.with_recomputed(()) if problem.recompute_optional else problem
        peaks = []
        for position, stages in enumerate(sorted(kept.stages_of)):
            complete = max(kept.activation[s] - kept.held_after_forward(s) for s in stages)
            peaks.append(min(m, ranks - position) * sum(map(kept.held_after_forward, stages)) + complete)
        caps = (max(peaks),) * ranks
    else:
        caps = (float(cap),) * ranks if isinstance(cap, int | float) else tuple(map(float, cap))
    if len(caps) != ranks:
        raise ScheduleError(f"cap has {len(caps)} numbers, there are {ranks} ranks: give one number, or {ranks}")
    unlimited = (m * sum(problem.activation[s] for s in stages) for stages in problem.stages_of)
    caps = tuple(most if cap == math.inf else cap for cap, most in zip(caps, unlimited, strict=True))
    problem = replace(problem, cap=caps)
    full = problem.with_full_backwards()
    if not full.feasible:  # in a chain of stages, no order needs less memory than one micro-batch in all stages
        lacks = [need - cap for need, cap in zip(full.least_memory, caps, strict=True)]
        rank = max(range(ranks), key=lambda rank: lacks[rank])
        each = ", ".join(f"{need:.4g}" for need in full.least_memory)
        raise ScheduleError(
            f"no order fits: rank {rank} needs at least {full.least_memory[rank]:.4g} (one micro-batch in stages "
            f"{', '.join(map(str, full.stages_of[rank]))}), but its cap is {caps[rank]:.4g}, {lacks[rank]:.4g} too "
            f"little. The least for all ranks: {each}. Raise the cap, "
            + ("or use more ranks" if all(full.recomputed) else "use more ranks, or recompute")
        )
    return problem, edges
