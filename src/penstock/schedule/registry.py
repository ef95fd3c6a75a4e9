"""The registry of schedules: each name with its generator, and the facts for listings, tables and the planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from penstock.errors import ScheduleError, did_you_mean
from penstock.schedule.schedule import Schedule

Make = TypeVar("Make", bound=Callable[..., Schedule])


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule that can be built for any number of ranks and micro-batches."""

    make: Callable[..., Schedule]  # of (p, m), or of (p, m, v) if the number of stages per rank is a parameter
    description: str
    stages_per_rank: int | None  # None: the parameter v
    default_v: int  # stages per rank by default
    # Largest peak memory of a rank for m >= 2p, in activations of a micro-batch: an expression of p, m and v.
    memory: str

    @property
    def takes_v(self) -> bool:
        return self.stages_per_rank is None


_kinds: dict[str, ScheduleKind] = {}

SCHEDULES: Mapping[str, ScheduleKind] = MappingProxyType(_kinds)
"""Every registered schedule by its name."""


def register(
    name: str, description: str, *, memory: str, v: int | None = 1, default_v: int = 1
) -> Callable[[Make], Make]:
    """Register the decorated function as the schedule ``name``.

    ``v`` is the number of stages per rank. If the function has it as a parameter, ``v`` is None and ``default_v`` is
    the default. ``memory`` is the expression in ``ScheduleKind``.
    """

    def decorator(make: Make) -> Make:
        _kinds[name] = ScheduleKind(make, description, v, v or default_v, memory)
        return make

    return decorator


def build(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    """Build the schedule ``name`` for ``p`` ranks, ``m`` micro-batches and ``v`` stages per rank, if that is free.

    Case and punctuation in the name are ignored: ``"ZB-H1"`` is ``"zb_h1"``.
    """
    name = canonical_name(name)
    kind = SCHEDULES[name]
    for what, number in (("rank (p)", p), ("micro-batch (m)", m), ("stage per rank (v)", v)):
        if number is not None and number < 1:
            raise ScheduleError(f"schedule {name!r} needs at least 1 {what}, not {number}")
    if v is not None and kind.takes_v:
        return kind.make(p, m, v)
    if v not in (None, kind.stages_per_rank):
        free = ", ".join(repr(other) for other, k in SCHEDULES.items() if k.takes_v)
        raise ScheduleError(
            f"v={v} does not fit schedule {name!r}, whose number of stages per rank is {kind.stages_per_rank}: "
            f"leave v out, or choose one that takes any v ({free})"
        )
    return kind.make(p, m)


def canonical_name(name: str) -> str:
    """The key of ``SCHEDULES`` for any spelling of a name."""

    def normalized(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    known = {normalized(own): own for own in SCHEDULES}
    if normalized(name) in known:
        return known[normalized(name)]
    listed = f": there are {', '.join(map(repr, SCHEDULES))}"
    raise ScheduleError(f"there is no schedule {name!r}{did_you_mean(name.lower(), SCHEDULES, otherwise=listed)}")
