"""The rows of a Gantt chart as text in styles: one row per rank, time from left to right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil, floor
from typing import NamedTuple

from penstock.schedule.simulate import Simulation

__all__ = ["Line", "gantt", "shade"]

Line = list[tuple[str, str]]
"""Pieces of a line: (text, style), where a style is a kind and a shade as in 'F2', or a word as 'idle'."""


def gantt(simulation: Simulation, width: int, *, letters: bool) -> list[Line]:
    """One row per rank and an axis, at most ``width`` wide.

    With ``letters`` a cell says its kind (in lower case for every second stage of a rank); without, its style
    does. It says its micro-batch where that fits.
    """
    return _Gantt(simulation, width, letters=letters).lines()


def shade(kind: str, chunk: int, most_chunks: int) -> str:
    """The style of a cell: the shades spread over the stages of a rank."""
    return f"{kind}{chunk * 3 // (most_chunks - 1) if most_chunks > 1 else 1}"


def _typical(times: list[float]) -> float:
    """The shortest time that matters: what is shorter makes up less than a twentieth of all."""
    past, times = 0.0, sorted(times)
    return next((t for t in times if (past := past + t) > 0.05 * sum(times)), 1.0)


class _Cell(NamedTuple):
    """Columns ``begin`` to ``end`` of a row: one action, or (no micro-batch) what several mainly are."""

    begin: int
    end: int
    kind: str
    chunk: int
    microbatch: int | None


class _Gantt:
    """One row per rank. A column is one step of time."""

    def __init__(self, simulation: Simulation, width: int, *, letters: bool) -> None:
        self.simulation = simulation
        self.letters = letters
        schedule = simulation.schedule
        self.chunks = {s: c for r in range(schedule.num_ranks) for c, s in enumerate(schedule.stages_of(r))}
        self.most_chunks = 1 + max(self.chunks.values())
        self.digits = len(str(schedule.num_microbatches - 1))
        self.label = len(f"rank {schedule.num_ranks - 1}") + 2
        # An action must be whole columns wide to look regular: as many as fit, up to what reads well.
        # Where not even one fits, a column stands for several actions.
        times = simulation.costs.durations(schedule.num_stages)
        shortest = _typical([t for kind in schedule.kinds for t in times[kind]])
        room = width - self.label
        makespan = simulation.makespan or 1.0
        self.unit = min(floor(room * shortest / makespan + 1e-9), self.digits + 3)
        self.scale = self.unit / shortest if self.unit else room / makespan
        self.columns = min(room, ceil(makespan * self.scale - 1e-9))
        # Where a number does not fit beside its letter, it goes below.
        self.below = letters and self.unit == self.digits

    def lines(self) -> list[Line]:
        lines: list[Line] = []
        for rank in range(self.simulation.schedule.num_ranks):
            cells = self._cells(rank) if self.unit else self._aggregate(rank)
            lines.append([(f"rank {rank}".ljust(self.label), "label"), *self._row(cells, self._text)])
            if self.below:
                lines.append([(" " * self.label, ""), *self._row(cells, self._number, idle=" ")])
        return [*lines, [(" " * self.label, ""), (self._axis(), "note")]]

    def _cells(self, rank: int) -> list[_Cell]:
        """Every action where it happens, to the nearest column."""
        order, chunks = self.simulation.schedule.orders[rank], self.chunks
        times = zip(self.simulation.starts[rank], self.simulation.ends[rank], strict=True)
        return [
            _Cell(self._column(start), self._column(end), a.kind, chunks[a.stage], a.microbatch)
            for a, (start, end) in zip(order, times, strict=True)
        ]

    def _column(self, time: float) -> int:
        return min(self.columns, floor(time * self.scale + 0.5 + 1e-6))

    def _aggregate(self, rank: int) -> list[_Cell]:
        """One kind of work, or none, for every column: over several columns, each gets its share."""
        idle = ("", 0)
        filled: list[dict[tuple[str, int], float]] = [{idle: 1.0} for _ in range(self.columns)]
        starts, ends = self.simulation.starts[rank], self.simulation.ends[rank]
        for action, start, end in zip(self.simulation.schedule.orders[rank], starts, ends, strict=True):
            begin, stop = start * self.scale, end * self.scale
            key = (action.kind, self.chunks[action.stage])
            for column in range(floor(begin), min(self.columns, ceil(stop))):
                part = min(stop, column + 1) - max(begin, column)
                filled[column][key] = filled[column].get(key, 0.0) + part
                filled[column][idle] -= part
        cells = []
        owed: dict[tuple[str, int], float] = {}  # what was there and has not been shown yet
        for column, parts in enumerate(filled):
            for key, part in parts.items():
                owed[key] = owed.get(key, 0.0) + part
            shown = max((key for key in parts if parts[key] > 1e-9), key=lambda key: owed[key])
            owed[shown] -= 1
            if shown != idle:
                cells.append(_Cell(column, column + 1, *shown, None))
        return cells

    def _row(self, cells: Iterable[_Cell], write: Callable[[_Cell], str], idle: str = "·") -> Line:
        line: Line = []
        at = 0
        for cell in cells:
            if cell.end <= cell.begin:
                continue
            if cell.begin > at:
                line.append((idle * (cell.begin - at), "idle"))
            line.append((write(cell), shade(cell.kind, cell.chunk, self.most_chunks)))
            at = cell.end
        line.append((idle * (self.columns - at), "idle"))
        return line

    def _text(self, cell: _Cell) -> str:
        if not self.letters:
            return self._number(cell)
        text = cell.kind.lower() if cell.chunk % 2 else cell.kind
        if not self.below:
            text += self._number(cell, len(text)).rstrip()
        return text.ljust(cell.end - cell.begin, "-")

    def _number(self, cell: _Cell, taken: int = 0) -> str:
        width = cell.end - cell.begin - taken
        text = "" if cell.microbatch is None else str(cell.microbatch)
        return (text if len(text) <= width else "").ljust(width)

    def _axis(self) -> str:
        """Round numbers below the columns at which they are reached."""
        step = next(s * 10**e for e in range(-9, 10) for s in (1, 2, 5) if s * 10**e * self.scale >= 10)
        axis = ""
        for n in range(int(self.columns / (step * self.scale)) + 1):
            mark = f"{n * step:g}"
            column = round(n * step * self.scale)
            if column + len(mark) <= self.columns:
                axis = axis.ljust(column) + mark
        return axis
