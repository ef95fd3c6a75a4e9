"""Schedules as plain data: made, verified, simulated, lowered and written without a device or a process."""

from __future__ import annotations

from penstock.schedule.dualpipe_v import dualpipev
from penstock.schedule.fill_drain import forward_only, gpipe, looped_bfs, sharded
from penstock.schedule.interleaved import interleaved
from penstock.schedule.one_f_one_b import one_f_one_b
from penstock.schedule.registry import SCHEDULES, ScheduleKind, build, canonical_name
from penstock.schedule.schedule import Action, Schedule
from penstock.schedule.search import SearchResult, auto
from penstock.schedule.simulate import Costs, Simulation, simulate
from penstock.schedule.text import from_csv, from_text, to_csv, to_text
from penstock.schedule.v_shape import v_half, v_min, zbv
from penstock.schedule.verify import MemoryReport, verify
from penstock.schedule.zero_bubble import zb_h1, zb_h2

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "MemoryReport",
    "Schedule",
    "ScheduleKind",
    "SearchResult",
    "Simulation",
    "auto",
    "build",
    "canonical_name",
    "dualpipev",
    "forward_only",
    "from_csv",
    "from_text",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "one_f_one_b",
    "sharded",
    "simulate",
    "to_csv",
    "to_text",
    "v_half",
    "v_min",
    "verify",
    "zb_h1",
    "zb_h2",
    "zbv",
]
