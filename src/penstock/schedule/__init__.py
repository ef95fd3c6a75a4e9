"""Schedules as plain data: built, verified, simulated, searched and lowered without a device or a process."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from penstock.schedule.costs import Costs
from penstock.schedule.registry import SCHEDULES, ScheduleKind, build, canonical_name, register
from penstock.schedule.schedule import Action, Schedule, loop, recompute_modes, vee, with_recompute
from penstock.schedule.search import SearchResult, auto
from penstock.schedule.simulate import Simulation, simulate
from penstock.schedule.text import from_csv, from_text, to_csv, to_text
from penstock.schedule.verify import MemoryReport, verify

__all__ = [
    "SCHEDULES", "Action", "Costs", "MemoryReport", "Schedule", "ScheduleKind", "SearchResult", "Simulation", "auto",
    "build", "canonical_name", "from_csv", "from_text", "loop", "recompute_modes", "register", "simulate", "to_csv",
    "to_text", "vee", "verify", "with_recompute",
]  # fmt: skip

# Importing a module registers its schedules. Listings and tables have the families below first, in this order, and the
# schedules of all other modules after them.
_FAMILIES = ("one_f_one_b", "v_shape", "fill_drain")

for _module in dict.fromkeys((*_FAMILIES, *(module.name for module in pkgutil.iter_modules(__path__)))):
    import_module(f"{__name__}.{_module}")
