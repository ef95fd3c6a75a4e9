"""The CSV of torch.distributed.pipelining: a row for each rank, a cell for each action, empty cells for idle time."""

from __future__ import annotations

import csv
import io
import re

from penstock.errors import ScheduleError
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import Located, assemble, parse

__all__ = ["from_csv", "to_csv"]

_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_LOWERED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d+)")
"""What torch adds to a schedule before it runs it. Our own lowering adds its own."""


def to_csv(schedule: Schedule) -> str:
    """What torch's runtime loads as a "compute_only" schedule."""
    if "R" in schedule.kinds:
        raise ScheduleError(
            f"schedule {schedule.name!r} has recompute actions (R), which torch.distributed.pipelining does not know; "
            "write it with to_text instead"
        )
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(str, order) for order in schedule.orders)
    return out.getvalue()


def from_csv(text: str, name: str = "custom") -> Schedule:
    """A schedule that torch wrote, "compute_only" or "compute_comms". Overlapped actions come one after the other."""
    rows: list[list[Located]] = []
    for number, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        row: list[Located] = []
        for column, cell in enumerate(map(str.strip, cells), start=1):
            overlap = _OVERLAP.fullmatch(cell)
            for part in overlap[1].split(";") if overlap else [cell]:
                if part and not _LOWERED.fullmatch(part):
                    place = f"row {number}, column {column}"
                    row.append((place, parse(place, part)))
        rows.append(row)
    while rows and not rows[-1]:
        rows.pop()
    return assemble(name, rows)
