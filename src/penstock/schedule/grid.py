"""The part of a schedule around a fault, drawn as text: one row per rank, an arrow at the wrong cell.

          5    6     7    8
rank 0:  0F5  0B0   0F6  0B1
rank 1:  1B0  1F3  [1F3] 1B1  <-- here
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.schedule.schedule import Schedule

__all__ = ["grid"]

_BEFORE, _AFTER = 5, 3
"""Columns shown to the left and to the right of the marked one: a fault is mostly explained by its past."""


def grid(schedule: Schedule, marks: Mapping[int, tuple[int, str]]) -> str:
    """The orders around ``marks``: rank -> (position in its order, what to write beside the arrow).

    Where several ranks are marked, their marked cells are lined up in one column; the position in each
    rank's order is then written beside the row.
    """
    centres = {position for position, _ in marks.values()}
    common = min(centres, default=0)  # the column that ranks without a mark are shown around
    aligned = len(centres) <= 1
    rows: list[list[str]] = []
    for rank, order in enumerate(schedule.orders):
        position, _ = marks.get(rank, (common, ""))
        cells = []
        for column in range(position - _BEFORE, position + _AFTER + 1):
            text = str(order[column]) if 0 <= column < len(order) else ""
            marked = rank in marks and column == position
            cells.append(f"[{text or '-'}]" if marked else f" {text} ")
        rows.append(cells)
    header = [f" {c} " if c >= 0 else "" for c in range(common - _BEFORE, common + _AFTER + 1)]
    shown = [i for i in range(_BEFORE + _AFTER + 1) if any(row[i].strip() for row in rows)]
    widths = {i: max(len(row[i]) for row in [*rows, header]) for i in shown}
    label = max(len(f"rank {rank}: ") for rank in range(max(1, schedule.num_ranks)))

    lines = []
    if aligned:
        lines.append(" " * label + "".join(header[i].center(widths[i]) for i in shown).rstrip())
    for rank, cells in enumerate(rows):
        line = f"rank {rank}: ".ljust(label) + "".join(cells[i].center(widths[i]) for i in shown)
        if rank in marks:
            position, remark = marks[rank]
            place = "" if aligned else f" (position {position})"
            line = f"{line} <-- here{place}{': ' if remark else ''}{remark}"
        lines.append(line.rstrip())
    return "\n".join(lines)
