"""Text and CSV formats of schedules; the CSV is that of torch.distributed.pipelining.

The text form has one line per rank, with its actions in order:

    # name: 1f1b
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1

Blank lines and other comments are ignored. A rank without actions is a line with a single ``-``.

The CSV has one row per rank, one cell per action, and empty cells for idle time.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from penstock.errors import ScheduleError
from penstock.schedule.schedule import Action, Schedule

_LocatedAction = tuple[str, Action]
"""An action and its location in the file ("line 2, column 5")."""

_NAME = re.compile(r"#\s*name:\s*(.*\S)")


def to_text(schedule: Schedule) -> str:
    """The text form of a schedule; ``from_text`` is its inverse."""
    return str(schedule)


def from_text(text: str) -> Schedule:
    """The inverse of ``to_text``. Without a line ``# name: …``, the schedule's name is "custom"."""
    name = "custom"
    rows: list[list[_LocatedAction]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _NAME.match(line.strip()):
            name = match[1]
        code = line.partition("#")[0]
        cells = [(f"line {number}, column {cell.start() + 1}", cell[0]) for cell in re.finditer(r"\S+", code)]
        if cells:
            rows.append([(place, _parse_action(place, cell)) for place, cell in cells if code.strip() != "-"])
    return _from_rows(name, rows)


def _parse_action(place: str, cell: str) -> Action:
    """Parse one action; an error has its location."""
    try:
        return Action.parse(cell)
    except ScheduleError as error:
        raise ScheduleError(f"{place}: {error}") from None


def _from_rows(name: str, rows: Sequence[Iterable[_LocatedAction]]) -> Schedule:
    """Build a schedule from the rows of its ranks. The row of its actions determines the rank of a stage."""
    orders: list[list[Action]] = [[] for _ in rows]
    rank_of: dict[int, int] = {}
    stages: dict[int, str] = {}  # stage -> location of its first action
    microbatches: dict[int, str] = {}  # micro-batch -> location of its first action
    for rank, row in enumerate(rows):
        for place, action in row:
            owner = rank_of.setdefault(action.stage, rank)
            if owner != rank:
                raise ScheduleError(
                    f"{place}: {action} puts stage {action.stage} on rank {rank}, but it is on rank {owner} "
                    f"already ({stages[action.stage]})"
                )
            stages.setdefault(action.stage, place)
            microbatches.setdefault(action.microbatch, place)
            orders[rank].append(action)
    if not stages:
        raise ScheduleError("there is no action in this schedule; expected one line per rank, as in '0F0 0F1 0B0'")
    for what, seen in (("stage", stages), ("micro-batch", microbatches)):
        gap = next(number for number in range(len(seen) + 1) if number not in seen)
        if gap < max(seen):
            after = min(number for number in seen if number > gap)
            raise ScheduleError(
                f"{seen[after]}: there is a {what} {after}, but no {what} {gap} anywhere; "
                "number them from 0 without gaps"
            )
    placement = [rank_of[s] for s in range(len(rank_of))]
    return Schedule.of(name, placement, orders, len(microbatches))


_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_LOWERED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d+)")
"""Communication that torch adds to a schedule. ``from_csv`` drops it, because ``lower`` adds communication."""


def to_csv(schedule: Schedule) -> str:
    """The CSV form of a schedule, which torch's runtime loads as "compute_only"."""
    if "R" in schedule.kinds:
        raise ScheduleError(
            f"schedule {schedule.name!r} has recompute actions (R), which torch.distributed.pipelining does not "
            "support; write it with to_text"
        )
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(str, order) for order in schedule.orders)
    return out.getvalue()


def from_csv(text: str, name: str = "custom") -> Schedule:
    """Read CSV written by torch, "compute_only" or "compute_comms". Overlapped actions become sequential."""
    try:
        table = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ScheduleError(f"this is not CSV: {error}") from error
    rows: list[list[_LocatedAction]] = []
    for number, cells in enumerate(table, start=1):
        row: list[_LocatedAction] = []
        for column, cell in enumerate(map(str.strip, cells), start=1):
            overlap = _OVERLAP.fullmatch(cell)
            for part in overlap[1].split(";") if overlap else [cell]:
                if part and not _LOWERED.fullmatch(part):
                    place = f"row {number}, column {column}"
                    row.append((place, _parse_action(place, part)))
        rows.append(row)
    while rows and not rows[-1]:
        rows.pop()
    return _from_rows(name, rows)
