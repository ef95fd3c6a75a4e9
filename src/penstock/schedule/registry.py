"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from penstock.errors import ScheduleError
from penstock.schedule.dualpipe_v import dualpipev
from penstock.schedule.fill_drain import forward_only, gpipe, looped_bfs, sharded
from penstock.schedule.interleaved import interleaved
from penstock.schedule.one_f_one_b import one_f_one_b
from penstock.schedule.schedule import Schedule
from penstock.schedule.v_shape import v_half, v_min, zbv
from penstock.schedule.zero_bubble import zb_h1, zb_h2

__all__ = ["SCHEDULES", "ScheduleKind", "build", "canonical_name"]


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule that can be built for any number of ranks and micro-batches."""

    make: Callable[..., Schedule]
    """``make(p, m)``, or ``make(p, m, v)`` where the number of stages per rank is free."""
    description: str
    stages_per_rank: int | None
    """How many stages every rank holds; None where that is the caller's choice, v."""

    @property
    def takes_v(self) -> bool:
        return self.stages_per_rank is None


SCHEDULES: Mapping[str, ScheduleKind] = MappingProxyType(
    {
        "gpipe": ScheduleKind(gpipe, "all forwards, then all backwards", 1),
        "1f1b": ScheduleKind(one_f_one_b, "one forward, one backward in turn; p activations", 1),
        "interleaved": ScheduleKind(interleaved, "1F1B over v stages per rank; 1/v of its bubble", None),
        "looped_bfs": ScheduleKind(looped_bfs, "GPipe over v stages per rank, breadth first", None),
        "zb_h1": ScheduleKind(zb_h1, "split backward; a third of 1F1B's bubble in its memory", 1),
        "zb_h2": ScheduleKind(zb_h2, "split backward; no pause once begun, twice 1F1B's memory", 1),
        "zbv": ScheduleKind(zbv, "split backward on a V; no pause once begun, 1F1B's memory", 2),
        "dualpipev": ScheduleKind(dualpipev, "on a V, forwards beside backwards, in eight phases", 2),
        "v_half": ScheduleKind(v_half, "on a V, about half of 1F1B's memory", 2),
        "v_min": ScheduleKind(v_min, "on a V, about a third of 1F1B's memory", 2),
        "sharded": ScheduleKind(sharded, "one micro-batch at a time, nothing overlaps", None),
        "forward_only": ScheduleKind(forward_only, "no backward: evaluation", None),
    }
)


def build(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    """The schedule ``name`` for ``p`` ranks, ``m`` micro-batches and, where it is free, ``v`` stages per rank.

    Only the letters and digits of the name count, in any case: ``"ZB-H1"`` is ``"zb_h1"``.
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
    """The name as it stands in ``SCHEDULES``, from any spelling of it."""

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    known = {plain(own): own for own in SCHEDULES}
    if plain(name) in known:
        return known[plain(name)]
    near = [repr(known[match]) for match in get_close_matches(plain(name), known)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(map(repr, SCHEDULES))}"
    raise ScheduleError(f"there is no schedule {name!r}: {hint}")
