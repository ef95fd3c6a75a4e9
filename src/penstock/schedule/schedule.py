"""Schedules as plain data: actions, their order on each rank, the placement of stages, and their dependencies.

The text form of an action is its stage, kind and micro-batch: ``2F0`` is the forward of stage 2 on micro-batch 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from penstock import _registry
from penstock.errors import ScheduleError

ACTION_NAMES = {"F": "forward", "R": "recompute", "B": "backward", "I": "input gradient", "W": "weight gradient"}
COMPUTE = tuple(ACTION_NAMES)
"""Kinds of actions; ``B`` is a full backward."""

BACKWARD = ("B", "I")
"""Kinds that compute the gradient of a stage's inputs from the gradient of its outputs."""

Edge = tuple[int, int]
"""A value sent from one stage to a later one: (source stage, destination stage)."""

_ACTION = re.compile(r"(\d{1,9})([FRBIW])(\d{1,9})")


class Action(NamedTuple):
    """One unit of work: a stage, a kind of action and a micro-batch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text[:40]!r} is not an action: expected stage, kind ({', '.join(COMPUTE)}) and micro-batch, as in "
                "'2F0'"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), kind, int(microbatch))


@dataclass(frozen=True)
class Schedule:
    """The order of actions on each rank.

    ``placement[s]`` is the rank that holds stage ``s``; ``orders[r]`` are the actions of rank ``r``, in order.
    Idle time is not part of a schedule: a rank starts an action when the previous one is done and its inputs have
    arrived.
    """

    name: str
    placement: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @cached_property
    def kinds(self) -> frozenset[str]:
        return frozenset(action.kind for order in self.orders for action in order)

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs with a recomputed forward."""
        return frozenset((a.stage, a.microbatch) for order in self.orders for a in order if a.kind == "R")

    @property
    def trains(self) -> bool:
        return bool(self.kinds - {"F"})

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on ``rank``, in the order of the model."""
        return tuple(s for s, r in enumerate(self.placement) if r == rank)

    def first(self, num_microbatches: int) -> Schedule:
        """The same order, restricted to the first ``num_microbatches``.

        The schedule stays valid, because no action depends on another micro-batch.
        """
        if num_microbatches > self.num_microbatches:
            raise ScheduleError(
                f"schedule {self.name!r} is for {self.num_microbatches} micro-batches, not for {num_microbatches}"
            )
        orders = tuple(tuple(a for a in order if a.microbatch < num_microbatches) for order in self.orders)
        return replace(self, orders=orders, num_microbatches=num_microbatches)

    @classmethod
    def of(
        cls, name: str, placement: Sequence[int], orders: Iterable[Iterable[Action]], num_microbatches: int
    ) -> Schedule:
        """Build a schedule from any iterables."""
        return cls(name, tuple(placement), tuple(tuple(order) for order in orders), num_microbatches)

    def __str__(self) -> str:
        """The text form, which ``penstock.schedule.from_text`` reads."""
        lines = [" ".join(map(str, order)) or "-" for order in self.orders]
        return "\n".join([f"# name: {self.name}", *lines, ""])

    def _repr_html_(self) -> str:
        return str(_registry.viz().schedule_html(self))


# Placements of stages on ranks.
#
#     loop, 2 ranks x 2        V, 2 ranks x 2
#
#     rank 0: stages 0 2       rank 0: stages 0 3
#     rank 1: stages 1 3       rank 1: stages 1 2


def loop(p: int, v: int = 1) -> tuple[int, ...]:
    """``v`` stages on each of ``p`` ranks, round-robin: stage ``s`` is on rank ``s mod p``."""
    return tuple(s % p for s in range(p * v))


def vee(p: int) -> tuple[int, ...]:
    """Two stages on each of ``p`` ranks, in a V: the first rank has the first and the last stage."""
    return (*range(p), *reversed(range(p)))


def edges_of(schedule: Schedule, edges: Iterable[Edge] | None = None) -> tuple[Edge, ...]:
    """Validate edges and remove duplicates. By default, each stage has an edge to the next one."""
    num_stages = schedule.num_stages
    if edges is None:
        return tuple((s, s + 1) for s in range(num_stages - 1))
    unique = tuple(dict.fromkeys(edges))
    for src, dst in unique:
        if not 0 <= src < dst < num_stages:
            raise ScheduleError(
                f"edge {src}->{dst} is not possible: an edge connects a stage to a later one, "
                f"and there are {num_stages} stages (0..{num_stages - 1})"
            )
    return unique


def neighbours(num_stages: int, edges: Iterable[Edge]) -> tuple[list[list[int]], list[list[int]]]:
    """The source stages of each stage, and the target stages of each stage."""
    sources: list[list[int]] = [[] for _ in range(num_stages)]
    targets: list[list[int]] = [[] for _ in range(num_stages)]
    for src, dst in edges:
        sources[dst].append(src)
        targets[src].append(dst)
    return sources, targets


def topological_runs(
    schedule: Schedule, edges: Iterable[Edge]
) -> tuple[list[tuple[int, int, int]], dict[int, tuple[int, int]]]:
    """Sort a schedule's actions topologically, and find the ranks that are blocked forever, in linear time.

    The order is a list of runs (rank, begin, end) for ``orders[rank][begin:end]``. For a blocked rank, the result is
    the position of the action that cannot start, and the stage whose action on the same micro-batch is missing.

    A forward depends on the forwards of the source stages, a backward on the backwards of the target stages. Sends do
    not block and receives are posted in the sender's order, so ranks have no other dependencies. ``verify`` checks the
    dependencies within a stage.
    """
    m, size = schedule.num_microbatches, schedule.num_stages * schedule.num_microbatches
    sources, targets = neighbours(schedule.num_stages, edges)
    done = bytearray(2 * size)  # forward of stage s on micro-batch k at s*m + k, backward at size + s*m + k
    position = [0] * schedule.num_ranks
    waiting: dict[int, list[int]] = {}  # index in done -> blocked ranks
    blocked: dict[int, tuple[int, int]] = {}
    runs = []
    ready = list(reversed(range(schedule.num_ranks)))
    while ready:
        rank = ready.pop()
        order = schedule.orders[rank]
        begin = at = position[rank]
        while at < len(order):
            stage, kind, microbatch = order[at]
            if kind == "F":
                needed, half = sources[stage], 0
            elif kind in BACKWARD:
                needed, half = targets[stage], size
            else:
                at += 1
                continue
            for other in needed:
                if not done[half + other * m + microbatch]:
                    waiting.setdefault(half + other * m + microbatch, []).append(rank)
                    blocked[rank] = (at, other)
                    break
            else:
                done[half + stage * m + microbatch] = 1
                for other in waiting.pop(half + stage * m + microbatch, ()):
                    del blocked[other]
                    ready.append(other)
                at += 1
                continue
            break
        position[rank] = at
        if at > begin:
            runs.append((rank, begin, at))
    return runs, blocked


def merge_ranks(schedule: Schedule, edges: Iterable[Edge], merged: Sequence[int]) -> Schedule:
    """Run the same actions on fewer ranks: rank ``merged[r]`` runs the actions of rank ``r``, in their order.

    The actions of an original rank are contiguous up to an action that depends on another rank. So GPipe runs its
    stages one after another::

        rank 0: 0F0 0F1 .   .   .   0B0 0B1        rank 0: 0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1
        rank 1: .   1F0 1F1 1B0 1B1
    """
    orders: list[list[Action]] = [[] for _ in range(max(merged) + 1)]
    for rank, begin, end in topological_runs(schedule, edges)[0]:
        orders[merged[rank]].extend(schedule.orders[rank][begin:end])
    placement = [merged[rank] for rank in schedule.placement]
    return Schedule.of(schedule.name, placement, orders, schedule.num_microbatches)


# Recompute as part of a schedule: an ``R`` before the backward of each recomputed forward.
#
#     1f1b, rank 1     1F0 1F1 1B0 1F2 1B1 …        keeps the activations of two forwards
#     always           1F0 1F1 1R0 1B0 1F2 1R1 1B1  keeps two inputs, and the activations of one forward
#                                  └ runs while the gradient is in transit

MODES = ("never", "except_last", "always")

Recompute = str | Sequence[str] | Mapping[int, str]
"""One mode for all stages, one mode per stage, or a mapping from stages to modes with "never" as the default."""


def recompute_modes(recompute: Recompute, stages: int) -> tuple[str, ...]:
    if isinstance(recompute, str):
        modes = [recompute] * stages
    elif isinstance(recompute, Mapping):
        unknown = [stage for stage in recompute if stage not in range(stages)]
        if unknown:
            raise ScheduleError(f"recompute names stage {unknown[0]}, but there are {stages} stages (0..{stages - 1})")
        modes = [recompute.get(stage, "never") for stage in range(stages)]
    elif isinstance(recompute, Sequence):
        modes = list(recompute)
        if len(modes) != stages:
            raise ScheduleError(f"recompute has {len(modes)} modes, but there are {stages} stages: give one for each")
    else:
        modes = [recompute]
    for mode in modes:
        if mode not in MODES:
            raise ScheduleError(f"recompute must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
    return tuple(modes)


def with_recompute(schedule: Schedule, modes: Sequence[str]) -> Schedule:
    """Insert an ``R`` directly before each backward of the micro-batches selected by ``modes``.

    ``R`` and backward are adjacent, so a rank holds at most one recomputed micro-batch. ``R`` has no inputs from other
    ranks, so it runs while the rank waits for the gradient. ``"except_last"`` keeps the activations of the last
    micro-batch. Recomputes that the schedule already has are unchanged.
    """
    last = schedule.num_microbatches - 1
    orders = []
    for order in schedule.orders:
        out: list[Action] = []
        for action in order:
            stage, kind, k = action
            selected = modes[stage] == "always" or (modes[stage] == "except_last" and k < last)
            if kind in BACKWARD and selected and (stage, k) not in schedule.recomputed:
                out.append(Action(stage, "R", k))
            out.append(action)
        orders.append(tuple(out))
    return replace(schedule, orders=tuple(orders))
