"""Schedules as plain data: made, verified, simulated, lowered and written without a device or a process."""

from __future__ import annotations

from penstock.schedule.action import Action
from penstock.schedule.auto import Found, auto
from penstock.schedule.dualpipev import dualpipev
from penstock.schedule.forward_only import forward_only
from penstock.schedule.gpipe import gpipe
from penstock.schedule.interleaved import interleaved
from penstock.schedule.looped_bfs import looped_bfs
from penstock.schedule.one_f_one_b import one_f_one_b
from penstock.schedule.registry import SCHEDULES, ScheduleKind, build, find
from penstock.schedule.schedule import Schedule
from penstock.schedule.sharded import sharded
from penstock.schedule.simulate import Costs, Simulation, simulate
from penstock.schedule.text import from_text, to_text
from penstock.schedule.torch_csv import from_csv, to_csv
from penstock.schedule.verify import Report, verify
from penstock.schedule.vshape import v_half, v_min, zbv
from penstock.schedule.zero_bubble import zb_h1, zb_h2

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Found",
    "Report",
    "Schedule",
    "ScheduleKind",
    "Simulation",
    "auto",
    "build",
    "dualpipev",
    "find",
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
