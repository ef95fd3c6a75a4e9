"""Recompute as part of a schedule: an ``R`` before each backward whose forward is run again.

1f1b, rank 1     1F0 1F1 1B0 1F2 1B1 …        keeps the activations of two forwards
always           1F0 1F1 1R0 1B0 1F2 1R1 1B1  keeps two inputs, and the activations of one forward
                             └ runs while the gradient is still in transit
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.schedule.schedule import BACKWARD, Action, Schedule

MODES = ("never", "except_last", "always")

Recompute = str | Sequence[str] | Mapping[int, str]
"""One mode for all stages, one per stage, or a mapping from stages to modes; other stages are "never"."""


def recompute_modes(recompute: Recompute, stages: int) -> tuple[str, ...]:
    """The mode of each stage."""
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
    """The schedule with an ``R`` right before each backward of the micro-batches selected by ``modes``.

    ``R`` and backward are adjacent, so a rank holds at most one recomputed micro-batch. ``R`` has no inputs from other
    ranks, so it runs while the rank waits for the gradient. ``"except_last"`` does not recompute the last micro-batch,
    whose activations are kept. Recomputes that the schedule already has are unchanged.
    """
    present = {(a.stage, a.microbatch) for order in schedule.orders for a in order if a.kind == "R"}
    last = schedule.num_microbatches - 1
    orders = []
    for order in schedule.orders:
        out: list[Action] = []
        for action in order:
            stage, kind, k = action
            selected = modes[stage] == "always" or (modes[stage] == "except_last" and k < last)
            if kind in BACKWARD and selected and (stage, k) not in present:
                out.append(Action(stage, "R", k))
            out.append(action)
        orders.append(tuple(out))
    return replace(schedule, orders=tuple(orders))
