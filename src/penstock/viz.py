"""Drawings of schedules, plans and traces: text for terminals, SVG for documents, HTML for notebooks.

rank 0  F0F1F2F3········B0--F4B1--      one row per rank, time from left to right; letters and colours
rank 1  ··F0F1F2····B0--F3B1--F4··      show the kind of action, numbers the micro-batch
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from html import escape
from math import ceil, floor
from typing import TYPE_CHECKING, NamedTuple, TextIO
from xml.sax.saxutils import quoteattr

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.errors import PenstockError, ScheduleError
from penstock.format import count_noun
from penstock.schedule.schedule import ACTION_NAMES, COMPUTE, Schedule
from penstock.schedule.simulate import Simulation, simulate
from penstock.schedule.verify import MemoryReport

if TYPE_CHECKING:
    from penstock.profile.planner.result import PlanResult
    from penstock.profile.trace import Trace
    from penstock.split.plan import Plan

# Four shades of each kind, from dark to light, for the stages of a rank. White text is legible on the first two, black
# text on the others.
_SHADES = {
    "F": ("#1d4f91", "#2f6db5", "#8db8ea", "#c3dcf8"),
    "B": ("#226b35", "#2d7f43", "#8fcf9e", "#c6e9cd"),
    "I": ("#0b6a72", "#12808a", "#7fd0d6", "#bdeaed"),
    "W": ("#8f4a06", "#ab5a0a", "#f0b25e", "#f9d9ab"),
    "R": ("#6c3483", "#8347a0", "#cba3dd", "#e5d0ef"),
}
_MIN_WIDTH = 40  # columns of a text drawing


def _chunks(schedule: Schedule) -> dict[int, int]:
    """The index of each stage among the stages of its rank."""
    return {s: c for r in range(schedule.num_ranks) for c, s in enumerate(schedule.stages_of(r))}


def _shade(chunk: int, num_chunks: int) -> int:
    """The shade of a stage; the shades are distributed over the stages of a rank."""
    return chunk * 3 // (num_chunks - 1) if num_chunks > 1 else 1


def _text_style(kind: str, chunk: int, num_chunks: int) -> str:
    shade = _shade(chunk, num_chunks)
    return f"{'black' if shade > 1 else 'bright_white'} on {_SHADES[kind][shade]}"


# A Gantt chart in columns -------------------------------------------------------------------------------------


class _Cell(NamedTuple):
    """Columns ``begin`` to ``end`` of a row: an action, or (without a micro-batch) the main kind of several actions."""

    begin: int
    end: int
    kind: str
    chunk: int
    microbatch: int | None


class _Gantt:
    """A simulation in ``width`` columns, with one row per rank."""

    def __init__(self, simulation: Simulation, width: int) -> None:
        self.simulation, self.schedule = simulation, simulation.schedule
        self.chunks = _chunks(self.schedule)
        self.num_chunks = 1 + max(self.chunks.values())
        self.digits = len(str(self.schedule.num_microbatches - 1))
        # The shortest action takes a whole number of columns: as many as fit, up to a legible width. If none fits, a
        # column represents several actions.
        durations = simulation.costs.durations(self.schedule.num_stages)
        times = sorted(t for kind in self.schedule.kinds for t in durations[kind])
        total = 0.0  # actions that make up less than a twentieth of the time may be narrower
        shortest = next((t for t in times if (total := total + t) > 0.05 * sum(times)), 1.0)
        makespan = simulation.makespan or 1.0
        self.unit = min(floor(width * shortest / makespan + 1e-9), self.digits + 3)
        self.scale = self.unit / shortest if self.unit else width / makespan
        self.columns = min(width, ceil(makespan * self.scale - 1e-9))

    def cells(self, rank: int) -> list[_Cell]:
        if not self.unit:
            return self._aggregate(rank)
        times = zip(self.simulation.starts[rank], self.simulation.ends[rank], strict=True)
        return [
            _Cell(self._column(start), self._column(end), action.kind, self.chunks[action.stage], action.microbatch)
            for action, (start, end) in zip(self.schedule.orders[rank], times, strict=True)
        ]

    def _column(self, time: float) -> int:
        return min(self.columns, floor(time * self.scale + 0.5 + 1e-6))

    def _aggregate(self, rank: int) -> list[_Cell]:
        """Choose one kind of action, or idle, for every column. Over several columns, each kind has its share."""
        idle = ("", 0)
        filled: list[dict[tuple[str, int], float]] = [{idle: 1.0} for _ in range(self.columns)]
        starts, ends = self.simulation.starts[rank], self.simulation.ends[rank]
        for action, start, end in zip(self.schedule.orders[rank], starts, ends, strict=True):
            begin, stop = start * self.scale, end * self.scale
            key = (action.kind, self.chunks[action.stage])
            for column in range(floor(begin), min(self.columns, ceil(stop))):
                part = min(stop, column + 1) - max(begin, column)
                filled[column][key] = filled[column].get(key, 0.0) + part
                filled[column][idle] -= part
        cells = []
        owed: dict[tuple[str, int], float] = {}  # time of each kind that no column represents yet
        for column, parts in enumerate(filled):
            for key, part in parts.items():
                owed[key] = owed.get(key, 0.0) + part
            shown = max((key for key in parts if parts[key] > 1e-9), key=lambda key: owed[key])
            owed[shown] -= 1
            if shown != idle:
                cells.append(_Cell(column, column + 1, *shown, None))
        return cells

    def axis(self) -> str:
        """A time axis with round numbers."""
        step = next(s * 10**e for e in range(-9, 10) for s in (1, 2, 5) if s * 10**e * self.scale >= 10)
        axis = ""
        for n in range(int(self.columns / (step * self.scale)) + 1):
            mark, column = f"{n * step:g}", round(n * step * self.scale)
            if column + len(mark) <= self.columns:
                axis = axis.ljust(column) + mark
        return axis


# Text ---------------------------------------------------------------------------------------------------------


def to_text_lines(simulation: Simulation, width: int = 80) -> str:
    """The drawing as plain text: one letter per kind, in lower case for every second stage of a rank."""
    console = Console(file=io.StringIO(), width=max(width, _MIN_WIDTH), force_terminal=False, highlight=False)
    with console.capture() as capture:
        _print(console, simulation)
    return capture.get().rstrip("\n")


def print_schedule(simulation: Simulation, file: TextIO | None = None, width: int | None = None) -> None:
    """Print the drawing, in colours if the terminal supports them."""
    _print(Console(file=file, width=width, highlight=False), simulation)


def _print(console: Console, simulation: Simulation) -> None:
    """Print title, chart, legend, table and summary."""
    schedule = simulation.schedule
    console.print(Text(describe_schedule(schedule), "bold"), end="\n\n", no_wrap=True, overflow="crop")
    for line in _text_chart(simulation, max(console.width, _MIN_WIDTH)):
        console.print(line, no_wrap=True, overflow="crop")
    num_chunks = 1 + max(_chunks(schedule).values())
    legend = [
        Text.assemble((kind, _text_style(kind, 0, num_chunks)), f" {ACTION_NAMES[kind]}")
        for kind in COMPUTE
        if kind in schedule.kinds
    ]
    legend.append(Text.assemble(("·", "dim"), " idle"))
    if num_chunks > 1:
        legend.append(Text("lower case: every second stage of a rank", "dim"))
    console.print("\n", Text("  ").join(legend), "\n", sep="")
    console.print(memory_table(schedule, simulation.report, simulation), "")
    numbers = [("bubble", f"{simulation.bubble:.1%}"), ("simulated time", f"{simulation.makespan:.6g}")]
    if abs(simulation.span_bubble - simulation.bubble) >= 5e-4:
        numbers.insert(1, ("without a barrier between steps", f"{simulation.span_bubble:.1%}"))
    console.print(Text("   ").join(Text.assemble(f"{name} ", (value, "bold")) for name, value in numbers))


def describe_schedule(schedule: Schedule) -> str:
    return (
        f"{schedule.name}: {count_noun(schedule.num_ranks, 'rank')}, {count_noun(schedule.num_stages, 'stage')}, "
        f"{count_noun(schedule.num_microbatches, 'micro-batch')}"
    )


def _text_chart(simulation: Simulation, width: int) -> Iterator[Text]:
    """One row per rank, and an axis. A cell has the letter of its kind, and its micro-batch if that fits."""
    label = len(f"rank {simulation.schedule.num_ranks - 1}") + 2
    gantt = _Gantt(simulation, width - label)
    below = gantt.unit == gantt.digits  # a number that does not fit beside its letter is in the line below

    def number(cell: _Cell, width: int) -> str:
        text = "" if cell.microbatch is None else str(cell.microbatch)
        return text if len(text) <= width else ""

    def text(cell: _Cell) -> str:
        letter = cell.kind.lower() if cell.chunk % 2 else cell.kind
        return letter if below else letter + number(cell, cell.end - cell.begin - 1)

    def row(start: Text, cells: list[_Cell], write: Callable[[_Cell], str], idle: str, fill: str) -> Text:
        at = 0
        for cell in cells:
            if cell.end > cell.begin:
                start.append(idle * (cell.begin - at), "dim")
                style = _text_style(cell.kind, cell.chunk, gantt.num_chunks)
                start.append(write(cell).ljust(cell.end - cell.begin, fill), style)
                at = cell.end
        start.append(idle * (gantt.columns - at), "dim")
        start.rstrip()
        return start

    for rank in range(simulation.schedule.num_ranks):
        cells = gantt.cells(rank)
        yield row(Text.assemble((f"rank {rank}".ljust(label), "bold")), cells, text, "·", "-")
        if below:
            yield row(Text(" " * label), cells, lambda cell: number(cell, cell.end - cell.begin), " ", " ")
    yield Text.assemble(" " * label, (gantt.axis(), "dim"))


def memory_table(schedule: Schedule, report: MemoryReport, simulation: Simulation | None = None) -> Table:
    """A table with the peak memory of each rank and, with a simulation, its busy and idle time."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    times = ["busy", "idle"] if simulation is not None else []
    for name in ("rank", "stages", *times, "in flight", "activations", "deferred W"):
        table.add_column(name, justify="left" if name == "stages" else "right", no_wrap=name != "stages")
    peaks = zip(report.peak_in_flight, report.peak_activations, report.peak_deferred, strict=True)
    for rank, (flight, share, deferred) in enumerate(peaks):
        row = [str(rank), " ".join(map(str, schedule.stages_of(rank)))]
        if simulation is not None:
            row += [f"{simulation.busy[rank]:.6g}", f"{simulation.bubbles[rank]:.1%}"]
        table.add_row(*row, str(flight), f"{share:.4g}", str(deferred))
    return table


# SVG ----------------------------------------------------------------------------------------------------------

_UNIT = 26.0  # legible width of an action
_MAX_WIDTH = 960  # of the chart
_ROW, _GAP, _LETTER = 22, 4, 7  # heights, and the approximate width of a letter

# As a file, the drawing follows the viewer's colour scheme. In a page, currentColor is the colour of the page.
_SVG_STYLE = (
    ":root.penstock{color:#1f2328}@media(prefers-color-scheme:dark){:root.penstock{color:#e6edf3}}"
    ".penstock text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:currentColor}"
    ".penstock .c{text-anchor:middle}.penstock .l{fill:#fff}.penstock .d{fill:#111}"
)


class _Box(NamedTuple):
    x: float
    width: float
    kind: str
    shade: int
    text: str


def to_svg(simulation: Simulation) -> str:
    """The drawing of a simulated schedule as an ``<svg>`` element, for a file or a page.

    It scales with the page, is legible on light and dark backgrounds, and has a description, and a tooltip per action.
    If there are too many actions for its width, a column shows the main kind of its actions, without tooltips.
    """
    schedule = simulation.schedule
    chunks = _chunks(schedule)
    num_chunks = 1 + max(chunks.values())
    if max(map(len, schedule.orders)) > _MAX_WIDTH / 3:
        gantt = _Gantt(simulation, _MAX_WIDTH)
        scale = _MAX_WIDTH / (simulation.makespan or 1.0)
        rows = [
            [_Box(cell.begin, cell.end - cell.begin, cell.kind, _shade(cell.chunk, num_chunks), "") for cell in cells]
            for cells in map(gantt.cells, range(schedule.num_ranks))
        ]
    else:
        durations = simulation.costs.durations(schedule.num_stages)
        shortest = min((t for kind in schedule.kinds for t in durations[kind] if t), default=1.0)
        scale = min(_UNIT / shortest, _MAX_WIDTH / simulation.makespan) if simulation.makespan else 1.0
        rows = [
            [
                _Box(start * scale, (end - start) * scale, a.kind, _shade(chunks[a.stage], num_chunks), str(a))
                for a, start, end in zip(order, starts, ends, strict=True)
            ]
            for order, starts, ends in zip(schedule.orders, simulation.starts, simulation.ends, strict=True)
        ]
    left = _LETTER * len(f"rank {schedule.num_ranks - 1}") + 12
    legend, legend_width = _svg_legend(simulation)
    width = left + max(simulation.makespan * scale, legend_width)
    height = schedule.num_ranks * (_ROW + _GAP) + 30
    title = _printable(describe_schedule(schedule))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="penstock" role="img" aria-label={quoteattr(title)} '
        f'viewBox="0 0 {_svg_number(width)} {height}" width="{_svg_number(width)}" style="max-width:100%;height:auto">',
        f"<title>{escape(title, quote=False)}</title>",
        f"<desc>One row for each of {schedule.num_ranks} ranks, time from left to right. {simulation.bubble:.1%} of "
        "the ranks' time is idle.</desc>",
        f"<style>{_SVG_STYLE}</style>",
    ]
    for rank, boxes in enumerate(rows):
        y = rank * (_ROW + _GAP)
        lines.append(f'<text x="0" y="{y + 15}">rank {rank}</text>')
        lines.extend(_svg_box(box._replace(x=left + box.x), y) for box in boxes if box.width)
    lines.append(f'<g transform="translate({left},{height - 22})">{legend}</g>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _svg_box(box: _Box, y: float) -> str:
    """A rectangle with its action as tooltip and, if that fits, a label: F0, or 0."""
    tip = f"<title>{box.text}</title>" if box.text else ""
    inset = 0.5 if box.width > 4 else 0
    x, width, fill = _svg_number(box.x), _svg_number(box.width - inset), _SHADES[box.kind][box.shade]
    rect = f'<rect x="{x}" y="{y}" width="{width}" height="{_ROW}" fill="{fill}">{tip}</rect>'
    without_stage = box.text.lstrip("0123456789")
    for text in (without_stage, without_stage[1:]):
        if text and _LETTER * len(text) + 3 <= box.width:
            middle, colour = _svg_number(box.x + box.width / 2), "l" if box.shade < 2 else "d"
            return f'{rect}<text class="c {colour}" x="{middle}" y="{y + 15}">{text}</text>'
    return rect


def _svg_legend(simulation: Simulation) -> tuple[str, float]:
    """The legend, with the colours of the kinds and the bubble, and its width."""
    parts, x = [], 0.0
    for kind in COMPUTE:
        if kind in simulation.schedule.kinds:
            parts.append(f'<rect x="{_svg_number(x)}" y="0" width="12" height="12" fill="{_SHADES[kind][1]}"/>')
            parts.append(f'<text x="{_svg_number(x + 17)}" y="11">{kind} {ACTION_NAMES[kind]}</text>')
            x += 17 + _LETTER * (len(ACTION_NAMES[kind]) + 4)
    bubble = f"bubble {simulation.bubble:.1%}"
    parts.append(f'<text x="{_svg_number(x)}" y="11">{bubble}</text>')
    return "".join(parts), x + _LETTER * len(bubble) + 8


def _svg_number(number: float) -> str:
    return f"{round(number, 2):g}" if abs(number) < 1e5 else f"{number:.0f}"


# Notebooks ----------------------------------------------------------------------------------------------------

_MAX_ACTIONS, _MAX_BOXES = 50_000, 6_000  # larger drawings take seconds and megabytes


def schedule_html(schedule: Schedule) -> str:
    """The drawing of a schedule with unit costs, or the error if it cannot run."""
    try:
        return _html("", simulate(schedule)) if _is_drawable(schedule) else _too_large(schedule)
    except ScheduleError as error:
        return _html(f"{describe_schedule(schedule)}\n{error}")


def simulation_html(simulation: Simulation) -> str:
    """The drawing of a simulation, and the time and memory of each rank."""
    if not _is_drawable(simulation.schedule):
        return _too_large(simulation.schedule, f"bubble {simulation.bubble:.1%}")
    text = to_text_lines(simulation, 100)
    return _html(text[text.index("rank  stages") :], simulation)


def trace_html(trace: Trace) -> str:
    """The summary of a trace, and the drawing of a step in which each action takes its median time."""
    try:
        simulation = trace.simulation() if _is_drawable(trace.order) else None
    except PenstockError:  # only the records of one rank, or of the forward of a call
        simulation = None
    return _html(str(trace), simulation)


def plan_result_html(result: PlanResult) -> str:
    """The text of a result, and the drawing of the predicted step."""
    return _html(str(result), result.simulation() if _is_drawable(result.schedule) else None)


def plan_html(plan: Plan) -> str:
    return _html(str(plan))


def _is_drawable(schedule: Schedule) -> bool:
    lengths = [len(order) for order in schedule.orders]
    return sum(lengths) <= _MAX_ACTIONS and sum(min(length, 1000) for length in lengths) <= _MAX_BOXES


def _too_large(schedule: Schedule, *more: str) -> str:
    actions = sum(map(len, schedule.orders))
    return _html("\n".join((describe_schedule(schedule), f"{actions:,} actions: too many for a picture", *more)))


def _html(text: str, simulation: Simulation | None = None) -> str:
    """The drawing of a simulation above a text."""
    drawing = "" if simulation is None else to_svg(simulation)
    return f"<div>{drawing}<pre>{escape(_printable(text))}</pre></div>"


def _printable(text: str) -> str:
    return "".join(sign if sign.isprintable() or sign == "\n" else "�" for sign in text)
