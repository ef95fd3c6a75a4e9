"""Recompute as part of a schedule: an ``R`` before each backward that needs its forward run again.

1f1b, rank 1     1F0 1F1 1B0 1F2 1B1 …        keeps what two forwards made
always           1F0 1F1 1R0 1B0 1F2 1R1 1B1  keeps two inputs, and what one forward made
                             └ runs while the gradient is still on its way
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.schedule.schedule import BACKWARD, Action, Schedule

__all__ = ["MODES", "Recompute", "recompute_modes", "with_recompute"]

MODES = ("never", "except_last", "always")

Recompute = str | Sequence[str] | Mapping[int, str]
"""One mode for all stages, one for each, or some by their stage's number; the rest are "never"."""


def recompute_modes(recompute: Recompute, stages: int) -> tuple[str, ...]:
    """The mode of each stage."""
    if isinstance(recompute, str):
        modes = [recompute] * stages
    elif isinstance(recompute, Mapping):
        strange = [stage for stage in recompute if stage not in range(stages)]
        if strange:
            raise ScheduleError(f"recompute names stage {strange[0]}, but there are {stages} stages (0..{stages - 1})")
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
    """The same schedule with an ``R`` right before each backward of the micro-batches that ``modes`` names.

    Nothing stands between the two, so no rank keeps more than one recomputed micro-batch; and an ``R`` waits for
    nobody, so it runs in the time in which the gradient is awaited. ``"except_last"`` leaves out the last micro-batch:
    one forward less, for what it made kept until its backward. What the schedule recomputes already stays as it is.
    """
    there = {(a.stage, a.microbatch) for order in schedule.orders for a in order if a.kind == "R"}
    last = schedule.num_microbatches - 1

    def wanted(stage: int, microbatch: int) -> bool:
        mode = modes[stage]
        return mode == "always" or (mode == "except_last" and microbatch < last)

    orders = []
    for order in schedule.orders:
        out: list[Action] = []
        for action in order:
            stage, kind, k = action
            if kind in BACKWARD and wanted(stage, k) and (stage, k) not in there:
                out.append(Action(stage, "R", k))
            out.append(action)
        orders.append(tuple(out))
    return replace(schedule, orders=tuple(orders))
