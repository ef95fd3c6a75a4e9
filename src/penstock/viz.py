"""Drawings of schedules, plans and traces: text for terminals, SVG for documents, HTML for notebooks.

rank 0  F0F1F2F3········B0--F4B1--      one row per rank, time from left to right; colours or letters
rank 1  ··F0F1F2····B0--F3B1--F4··      show the kind of action, numbers the micro-batch
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor
from typing import TYPE_CHECKING, NamedTuple, TextIO
from xml.sax.saxutils import escape as xml_escape
from xml.sax.saxutils import quoteattr

from rich.console import Console
from rich.text import Text

from penstock.errors import PenstockError, ScheduleError
from penstock.schedule.schedule import COMPUTE, Schedule
from penstock.schedule.simulate import Simulation, simulate
from penstock.schedule.verify import MemoryReport

if TYPE_CHECKING:
    from penstock.profile.planner.result import PlanResult
    from penstock.profile.trace import Trace
    from penstock.split.plan import Plan

KINDS = {"F": "forward", "R": "recompute", "B": "backward", "I": "input gradient", "W": "weight gradient"}

# Four shades of each kind, dark to light, for the stages of a rank: of a terminal's 256 colours, and for SVG.
# White text is legible on the first two, black text on the others.
_TEXT_SHADES = {
    "F": (25, 32, 75, 153),
    "B": (28, 34, 113, 157),
    "I": (30, 37, 80, 159),
    "W": (130, 166, 214, 222),
    "R": (90, 133, 176, 225),
}
_SVG_SHADES = {
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
    """The shades are spread over the stages of a rank."""
    return chunk * 3 // (num_chunks - 1) if num_chunks > 1 else 1


def _text_style(kind: str, chunk: int, num_chunks: int) -> str:
    shade = _shade(chunk, num_chunks)
    return f"{'black' if shade > 1 else 'bright_white'} on color({_TEXT_SHADES[kind][shade]})"


# A Gantt chart in columns -------------------------------------------------------------------------------------


class _Cell(NamedTuple):
    """Columns ``begin`` to ``end`` of a row: one action, or (no micro-batch) the main kind of several."""

    begin: int
    end: int
    kind: str
    chunk: int
    microbatch: int | None


class _Gantt:
    """A simulation in ``width`` columns: one row per rank, a column is one step of time."""

    def __init__(self, simulation: Simulation, width: int) -> None:
        self.simulation, self.schedule = simulation, simulation.schedule
        self.chunks = _chunks(self.schedule)
        self.num_chunks = 1 + max(self.chunks.values())
        self.digits = len(str(self.schedule.num_microbatches - 1))
        # An action must be whole columns wide to look regular: as many as fit, up to a width that reads well.
        # Where not even one fits, a column stands for several actions.
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
        """One kind of action, or idle, for every column. Over several columns each kind gets its share."""
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
        owed: dict[tuple[str, int], float] = {}  # time of each kind that no column has shown yet
        for column, parts in enumerate(filled):
            for key, part in parts.items():
                owed[key] = owed.get(key, 0.0) + part
            shown = max((key for key in parts if parts[key] > 1e-9), key=lambda key: owed[key])
            owed[shown] -= 1
            if shown != idle:
                cells.append(_Cell(column, column + 1, *shown, None))
        return cells

    def axis(self) -> str:
        """Round numbers below the columns of their times."""
        step = next(s * 10**e for e in range(-9, 10) for s in (1, 2, 5) if s * 10**e * self.scale >= 10)
        axis = ""
        for n in range(int(self.columns / (step * self.scale)) + 1):
            mark, column = f"{n * step:g}", round(n * step * self.scale)
            if column + len(mark) <= self.columns:
                axis = axis.ljust(column) + mark
        return axis


# Text ---------------------------------------------------------------------------------------------------------


def to_text_lines(simulation: Simulation, width: int = 80) -> str:
    """The drawing as plain text: a letter for each kind, in lower case for every second stage of a rank."""
    return "\n".join(line.plain.rstrip() for line in _text_lines(simulation, width, letters=True))


def to_rich(simulation: Simulation, width: int = 80) -> Text:
    """The drawing in colours, to print with ``rich``: a lighter shade for each further stage of a rank."""
    lines = _text_lines(simulation, width, letters=False)
    return Text("\n", no_wrap=True, overflow="crop", end="").join(lines)


def print_schedule(simulation: Simulation, file: TextIO | None = None, width: int | None = None) -> None:
    """Print the drawing: in colours on a terminal that has them, otherwise as text."""
    file = file or sys.stdout
    console = Console(file=file, width=width, highlight=False)
    if console.is_terminal and console.color_system and not console.no_color:
        console.print(to_rich(simulation, console.width))
    else:
        print_text(to_text_lines(simulation, width or shutil.get_terminal_size((80, 24)).columns), file)


def print_text(text: str, file: TextIO) -> None:
    """Print ``text``; characters that the encoding of ``file`` does not have are replaced."""
    try:
        text.encode(getattr(file, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = text.replace("·", ".").replace("…", "~").encode("ascii", "replace").decode()
    print(text, file=file)


def describe_schedule(schedule: Schedule) -> str:
    """A schedule in a line."""
    return (
        f"{schedule.name}: {count_noun(schedule.num_ranks, 'rank')}, {count_noun(schedule.num_stages, 'stage')}, "
        f"{count_noun(schedule.num_microbatches, 'micro-batch')}"
    )


def count_noun(number: int, noun: str) -> str:
    """``1 stage``, ``2 stages``."""
    plural = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def _text_lines(simulation: Simulation, width: int, *, letters: bool) -> list[Text]:
    """Title, chart, legend, table and summary; no line is wider than ``width``."""
    width = max(width, _MIN_WIDTH)
    schedule = simulation.schedule
    header, *table = align_columns(memory_rows(schedule, simulation.report, simulation), width)
    numbers = [Text.assemble(f"{name} ", (value, "bold")) for name, value in _summary(simulation)]
    lines = [
        *(Text(describe_schedule(schedule), "bold"), Text()),
        *(*_text_chart(simulation, width, letters=letters), Text()),
        *(*_wrap_items(_text_legend(schedule, letters=letters), width), Text()),
        *(Text(header, "bold"), *map(Text, table), Text()),
        *_wrap_items(numbers, width, gap="   "),
    ]
    for line in lines:
        line.truncate(width)
    return lines


def _text_chart(simulation: Simulation, width: int, *, letters: bool) -> Iterator[Text]:
    """A row per rank, and an axis.

    With ``letters`` a cell has the letter of its kind (in lower case for every second stage of a rank); without, its
    colours. It has its micro-batch where that fits.
    """
    label = len(f"rank {simulation.schedule.num_ranks - 1}") + 2
    gantt = _Gantt(simulation, width - label)
    below = letters and gantt.unit == gantt.digits  # where a number does not fit beside its letter, it goes below

    def number(cell: _Cell, width: int) -> str:
        text = "" if cell.microbatch is None else str(cell.microbatch)
        return (text if len(text) <= width else "").ljust(width)

    def text(cell: _Cell) -> str:
        width = cell.end - cell.begin
        if not letters:
            return number(cell, width)
        letter = cell.kind.lower() if cell.chunk % 2 else cell.kind
        return (letter if below else letter + number(cell, width - 1).rstrip()).ljust(width, "-")

    def row(start: Text, cells: list[_Cell], write: Callable[[_Cell], str], idle: str) -> Text:
        at = 0
        for cell in cells:
            if cell.end > cell.begin:
                start.append(idle * (cell.begin - at), "dim")
                start.append(write(cell), _text_style(cell.kind, cell.chunk, gantt.num_chunks))
                at = cell.end
        return start.append(idle * (gantt.columns - at), "dim")

    for rank in range(simulation.schedule.num_ranks):
        cells = gantt.cells(rank)
        yield row(Text.assemble((f"rank {rank}".ljust(label), "bold")), cells, text, "·")
        if below:
            yield row(Text(" " * label), cells, lambda cell: number(cell, cell.end - cell.begin), " ")
    yield Text.assemble(" " * label, (gantt.axis(), "dim"))


def _text_legend(schedule: Schedule, *, letters: bool) -> Iterator[Text]:
    num_chunks = 1 + max(_chunks(schedule).values())
    kinds = [kind for kind in COMPUTE if kind in schedule.kinds]
    for kind in kinds:
        swatch = kind if letters else f" {kind} "
        yield Text.assemble((swatch, _text_style(kind, 0, num_chunks)), f" {KINDS[kind]}")
    yield Text.assemble(("·", "dim"), " idle")
    if num_chunks > 1 and letters:
        yield Text.assemble(("lower case: every second stage of a rank", "dim"))
    elif num_chunks > 1:
        shades = [(" ", _text_style(kinds[0], chunk, num_chunks)) for chunk in range(min(num_chunks, 4))]
        yield Text.assemble(*shades, " first to last stage of a rank")


def _wrap_items(items: Sequence[Text] | Iterator[Text], width: int, gap: str = "  ") -> list[Text]:
    """Items one after the other, on as many lines as they need."""
    lines = [Text()]
    for item in items:
        if lines[-1] and len(lines[-1]) + len(gap) + len(item) > width:
            lines.append(Text())
        lines[-1].append(gap if lines[-1] else "").append_text(item)
    return lines


def _summary(simulation: Simulation) -> list[tuple[str, str]]:
    numbers = [("bubble", f"{simulation.bubble:.1%}"), ("simulated time", f"{simulation.makespan:.6g}")]
    if abs(simulation.span_bubble - simulation.bubble) >= 5e-4:
        numbers.insert(1, ("without a barrier between steps", f"{simulation.span_bubble:.1%}"))
    return numbers


def memory_rows(schedule: Schedule, report: MemoryReport, simulation: Simulation | None = None) -> list[list[str]]:
    """The peak memory of each rank, as a table with a header; with a simulation, its busy and idle time, too."""
    header = ["rank", "stages", "in flight", "activations", "deferred W"]
    peaks = zip(report.peak_in_flight, report.peak_activations, report.peak_deferred, strict=True)
    rows = [
        [str(rank), " ".join(map(str, schedule.stages_of(rank))), str(flight), f"{share:.4g}", str(deferred)]
        for rank, (flight, share, deferred) in enumerate(peaks)
    ]
    if simulation is not None:
        header[2:2] = ["busy", "idle"]
        for row, busy, bubble in zip(rows, simulation.busy, simulation.bubbles, strict=True):
            row[2:2] = [f"{busy:.6g}", f"{bubble:.1%}"]
    return [header, *rows]


def align_columns(rows: list[list[str]], width: int) -> list[str]:
    """Rows in columns: the second, which may be long, on the left and shortened to fit, all others on the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rest = sum(widths) - widths[1] + 2 * (len(widths) - 1)
    widths[1] = min(widths[1], max(len(rows[0][1]), width - rest))
    lines = []
    for row in rows:
        cells = [cell.rjust(w) for cell, w in zip(row, widths, strict=True)]
        cells[1] = row[1].ljust(widths[1]) if len(row[1]) <= widths[1] else row[1][: widths[1] - 1] + "…"
        lines.append("  ".join(cells))
    return lines


# SVG ----------------------------------------------------------------------------------------------------------

_UNIT = 26.0  # width of an action that reads well
_MAX_WIDTH = 960  # of the chart
_ROW, _GAP, _LETTER = 22, 4, 7  # heights, and the approximate width of a letter

# As a file of its own the drawing follows the viewer's colour scheme; in a page, currentColor is the page's.
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
    """The drawing of a simulated schedule as an ``<svg>`` element: a file of its own, or a part of a page.

    It scales with the page, is legible on light and dark, has a description, and a tooltip for every action. Where
    there are too many actions for its width, a column shows the main kind of its actions, without tooltips.
    """
    schedule = simulation.schedule
    crowded = max(map(len, schedule.orders)) > _MAX_WIDTH / 3
    if crowded:
        rows, chart_width = _column_boxes(simulation), float(_MAX_WIDTH)
    else:
        durations = simulation.costs.durations(schedule.num_stages)
        shortest = min((t for kind in schedule.kinds for t in durations[kind] if t), default=1.0)
        scale = min(_UNIT / shortest, _MAX_WIDTH / simulation.makespan) if simulation.makespan else 1.0
        rows, chart_width = _action_boxes(simulation, scale), simulation.makespan * scale
    left = _LETTER * len(f"rank {schedule.num_ranks - 1}") + 12
    legend, legend_width = _svg_legend(simulation)
    width = left + max(chart_width, legend_width)
    height = schedule.num_ranks * (_ROW + _GAP) + 30
    title = "".join(letter if letter.isprintable() else "�" for letter in describe_schedule(schedule))
    words = (
        f"One row for each of {schedule.num_ranks} ranks, time from left to right. "
        f"{simulation.bubble:.1%} of the ranks' time is idle."
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="penstock" role="img" aria-label={quoteattr(title)} '
        f'viewBox="0 0 {_svg_number(width)} {height}" width="{_svg_number(width)}" style="max-width:100%;height:auto">',
        f"<title>{xml_escape(title)}</title>",
        f"<desc>{xml_escape(words)}</desc>",
        f"<style>{_SVG_STYLE}</style>",
    ]
    for rank, boxes in enumerate(rows):
        y = rank * (_ROW + _GAP)
        lines.append(f'<text x="0" y="{y + 15}">rank {rank}</text>')
        lines.extend(_svg_box(box._replace(x=left + box.x), y) for box in boxes)
    lines.append(f'<g transform="translate({left},{height - 22})">{legend}</g>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _action_boxes(simulation: Simulation, scale: float) -> Iterator[list[_Box]]:
    chunks = _chunks(simulation.schedule)
    num_chunks = 1 + max(chunks.values())
    for order, starts, ends in zip(simulation.schedule.orders, simulation.starts, simulation.ends, strict=True):
        yield [
            _Box(start * scale, (end - start) * scale, a.kind, _shade(chunks[a.stage], num_chunks), str(a))
            for a, start, end in zip(order, starts, ends, strict=True)
            if end > start
        ]


def _column_boxes(simulation: Simulation) -> Iterator[list[_Box]]:
    """The columns of a text drawing; equal neighbours are one box."""
    gantt = _Gantt(simulation, _MAX_WIDTH)
    for rank in range(simulation.schedule.num_ranks):
        boxes: list[_Box] = []
        for cell in gantt.cells(rank):
            box = _Box(cell.begin, cell.end - cell.begin, cell.kind, _shade(cell.chunk, gantt.num_chunks), "")
            if boxes and boxes[-1][2:] == box[2:] and boxes[-1].x + boxes[-1].width == box.x:
                boxes[-1] = boxes[-1]._replace(width=boxes[-1].width + box.width)
            elif box.width:
                boxes.append(box)
        yield boxes


def _svg_box(box: _Box, y: float) -> str:
    """A rectangle, its action as a tooltip, and as much of the action as fits: F0, or 0."""
    tip = f"<title>{box.text}</title>" if box.text else ""
    inset = 0.5 if box.width > 4 else 0
    x, width, fill = _svg_number(box.x), _svg_number(box.width - inset), _SVG_SHADES[box.kind][box.shade]
    rect = f'<rect x="{x}" y="{y}" width="{width}" height="{_ROW}" fill="{fill}">{tip}</rect>'
    without_stage = box.text.lstrip("0123456789")
    for text in (without_stage, without_stage[1:]):
        if text and _LETTER * len(text) + 3 <= box.width:
            middle, colour = _svg_number(box.x + box.width / 2), "l" if box.shade < 2 else "d"
            return f'{rect}<text class="c {colour}" x="{middle}" y="{y + 15}">{text}</text>'
    return rect


def _svg_legend(simulation: Simulation) -> tuple[str, float]:
    """The colours of the kinds and the bubble; and its width."""
    parts, x = [], 0.0
    for kind in COMPUTE:
        if kind in simulation.schedule.kinds:
            parts.append(f'<rect x="{_svg_number(x)}" y="0" width="12" height="12" fill="{_SVG_SHADES[kind][1]}"/>')
            parts.append(f'<text x="{_svg_number(x + 17)}" y="11">{kind} {KINDS[kind]}</text>')
            x += 17 + _LETTER * (len(KINDS[kind]) + 4)
    bubble = f"bubble {simulation.bubble:.1%}"
    parts.append(f'<text x="{_svg_number(x)}" y="11">{bubble}</text>')
    return "".join(parts), x + _LETTER * len(bubble) + 8


def _svg_number(number: float) -> str:
    return f"{round(number, 2):g}" if abs(number) < 1e5 else f"{number:.0f}"


# Notebooks ----------------------------------------------------------------------------------------------------

_MAX_ACTIONS, _MAX_BOXES = 50_000, 6_000  # a larger drawing takes seconds, and megabytes
_MAX_STAGES = 40  # of the drawing of a plan
_MAX_ROWS = 100  # of a table
_BOX, _SPACE, _HEIGHT = 56, 24, 26  # of the drawing of a plan: width of a stage, distance to the next, height


def schedule_html(schedule: Schedule) -> str:
    """The drawing of a schedule with actions of equal time, the reason why it cannot run, or a summary."""
    if not _is_drawable(schedule):
        return _html_summary(schedule, [])
    try:
        return f"<div>{to_svg(simulate(schedule))}</div>"
    except ScheduleError as error:
        return f"<div><p>{_html(describe_schedule(schedule))}</p><pre>{_html(str(error), lines=True)}</pre></div>"


def schedule_svg(schedule: Schedule) -> str | None:
    """The drawing of a schedule alone; None where it is too large or cannot run."""
    try:
        return to_svg(simulate(schedule)) if _is_drawable(schedule) else None
    except ScheduleError:
        return None


def simulation_html(simulation: Simulation) -> str:
    """The drawing, and the time and the memory of each rank; or a summary."""
    numbers = [
        ("bubble", f"{simulation.bubble:.1%}"),
        ("without a barrier between steps", f"{simulation.span_bubble:.1%}"),
        ("simulated time", f"{simulation.makespan:.6g}"),
    ]
    if not _is_drawable(simulation.schedule):
        return _html_summary(simulation.schedule, numbers)
    header, *rows = memory_rows(simulation.schedule, simulation.report, simulation)
    words = ", ".join(f"{name} {value}" for name, value in numbers)
    return f"<div>{to_svg(simulation)}{_html_table(header, rows)}<p>{_html(words)}</p></div>"


def simulation_svg(simulation: Simulation) -> str | None:
    """The drawing of a simulation alone; None where it is too large."""
    return to_svg(simulation) if _is_drawable(simulation.schedule) else None


def trace_html(trace: Trace) -> str:
    """The summary of a trace, and the drawing of a step in which each action takes its median time."""
    text = f"<pre>{_html(str(trace), lines=True)}</pre>"
    try:
        simulation = trace.simulation() if _is_drawable(trace.order) else None
    except PenstockError:  # a trace of one rank, or of half a call
        simulation = None
    if simulation is None:
        return f"<div>{text}</div>"
    return f"<div>{text}{to_svg(simulation)}<p>A step with the median time of each action.</p></div>"


def plan_result_html(result: PlanResult) -> str:
    """Its text; the drawing of the predicted step; the time of each stage and the memory of each rank."""
    costs, memory = result.best.costs, result.memory
    parts = [f"<pre>{_html(str(result), lines=True)}</pre>"]
    if costs is not None:
        if _is_drawable(result.schedule):
            parts += [to_svg(result.simulation()), "<p>A step with the time that each action should take.</p>"]
        times = costs.durations(result.schedule.num_stages)
        rows = []
        longest = max(f + b for f, b in zip(times["F"], times["B"], strict=True))
        for stage, rank in enumerate(result.schedule.placement):
            forward, backward = times["F"][stage], times["B"][stage]
            numbers = [_html_number(forward * 1e3), _html_number(backward * 1e3)]
            rows.append([str(stage), str(rank), *numbers, _bar(forward + backward, longest)])
        parts.append(_html_table(["stage", "rank", "forward, ms", "backward, ms", "of a micro-batch"], rows))
    peaks = [[str(rank), _html_number(size / 2**20), _bar(size, max(memory))] for rank, size in enumerate(memory)]
    parts.append(_html_table(["rank", "memory, MiB", "at its peak"], peaks))
    return f"<div>{''.join(parts)}</div>"


def plan_html(plan: Plan) -> str:
    """A row for each stage, and a drawing of the edges between them and the parameters that they share."""
    rows = []
    for index, stage in enumerate(plan.stages):
        device = plan.devices[index] if plan.devices is not None else ""
        where = "-" if plan.ranks is None else f"{plan.ranks[index]} {device}".strip()
        layers = " ".join(stage.layers)
        if len(layers) > 60:
            layers = f"{stage.layers[0]} … {stage.layers[-1]} ({len(stage.layers)} layers)"
        to = " ".join(map(str, plan.targets(index))) or "-"
        rows.append([str(index), where, layers, f"{stage.parameters:,}", f"{stage.bytes:,}", to])
    ties = [f"<p>tie: {_html(' = '.join(t.names))} (stages {', '.join(map(str, t.stages))})</p>" for t in plan.ties]
    if len(ties) > _MAX_ROWS:
        ties = [*ties[:_MAX_ROWS], f"<p>and {len(ties) - _MAX_ROWS} more ties</p>"]
    drawing = _plan_svg(plan) if plan.num_stages <= _MAX_STAGES else ""
    table = _html_table(["stage", "rank", "layers", "parameters", "bytes", "sends to"], rows)
    return f"<div>{drawing}{table}{''.join(ties)}</div>"


def _is_drawable(schedule: Schedule) -> bool:
    lengths = [len(order) for order in schedule.orders]
    return sum(lengths) <= _MAX_ACTIONS and sum(min(length, 1000) for length in lengths) <= _MAX_BOXES


def _html_summary(schedule: Schedule, more: Sequence[tuple[str, str]]) -> str:
    """In place of a drawing of too many actions."""
    actions = sum(map(len, schedule.orders))
    rows = [("actions", f"{actions:,}: too many for a picture"), ("kinds", " ".join(sorted(schedule.kinds))), *more]
    return f"<div><p>{_html(describe_schedule(schedule))}</p>{_html_table((), rows)}</div>"


class _Markup(str):
    """A cell of a table that is HTML already."""


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The middle of very many rows is left out."""

    def row(cells: Sequence[str], tag: str) -> str:
        shown = (cell if isinstance(cell, _Markup) else _html(cell) for cell in cells)
        return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in shown)}</tr>"

    if len(rows) > _MAX_ROWS:
        gap = ["…", f"{len(rows) - _MAX_ROWS} more", *[""] * (len(rows[0]) - 2)]
        rows = [*rows[: _MAX_ROWS - 10], gap, *rows[-10:]]
    head = f"<thead>{row(header, 'th')}</thead>" if header else ""
    body = "".join(row(cells, "td") for cells in rows)
    return f'<table style="color:inherit">{head}<tbody>{body}</tbody></table>'


def _html_number(number: float) -> str:
    return f"{number:.4g}" if number < 1000 else f"{number:,.0f}"


def _bar(number: float, largest: float) -> _Markup:
    width = round(120 * number / largest, 1) if largest else 0
    return _Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" aria-hidden="true" width="120" height="10">'
        f'<rect width="{width}" height="10" rx="2" fill="currentColor" opacity="0.55"/></svg>'
    )


def _plan_svg(plan: Plan) -> str:
    """Stages in a row. Edges that skip stages go above them; tied stages are joined below, dashed.

    It is drawn in the colour of the page's text.
    """
    top = 8 + _rise(max((edge.dst - edge.src for edge in plan.edges), default=1))
    spans = [pair for tie in plan.ties for pair in pairwise(sorted(tie.stages))]
    deepest = max((_rise(last - first + 1) for first, last in spans), default=0)
    width, height = plan.num_stages * (_BOX + _SPACE) - _SPACE + 8, top + _HEIGHT + deepest + 8
    parts = []
    for index in range(plan.num_stages):
        x = _left(index)
        parts.append(
            f'<rect x="{x}" y="{top}" width="{_BOX}" height="{_HEIGHT}" rx="4"/>'
            f'<text x="{x + _BOX // 2}" y="{top + 17}" text-anchor="middle" font-family="monospace" font-size="12" '
            f'fill="currentColor" stroke="none">{index}</text>'
        )
    parts += [_plan_edge(edge.src, edge.dst, top) for edge in plan.edges]
    for first, last in dict.fromkeys(spans):
        begin, end, y = _left(first) + _BOX // 2, _left(last) + _BOX // 2, top + _HEIGHT
        depth = y + _rise(last - first + 1) * 4 // 3
        line = f"M{begin} {y}C{begin} {depth} {end} {depth} {end} {y}"
        title = f"<title>tied: stages {first} and {last}</title>"
        parts.append(f'<path d="{line}" stroke-dasharray="4 3">{title}</path>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{plan.num_stages} stages" '
        f'viewBox="0 0 {width} {height}" width="{width}" style="max-width:100%;height:auto" fill="none" '
        f'stroke="currentColor">{"".join(parts)}</svg>'
    )


def _left(stage: int) -> int:
    return 4 + stage * (_BOX + _SPACE)


def _rise(span: int) -> int:
    """The distance of an arc from the row of stages: it grows with the span; the next stage is reached straight."""
    return 0 if span < 2 else 10 + min(60, 6 * span)


def _plan_edge(src: int, dst: int, top: int) -> str:
    """An arrow from one stage to a later one."""
    rise, middle = _rise(dst - src), top + _HEIGHT // 2
    if rise:
        begin, end = _left(src) + _BOX - 12, _left(dst) + 12
        line = f"M{begin} {top}C{begin} {top - rise * 4 // 3} {end} {top - rise * 4 // 3} {end} {top}"
        head = f"M{end - 4} {top - 6}L{end} {top}L{end + 4} {top - 6}"
    else:
        begin, end = _left(src) + _BOX, _left(dst)
        line = f"M{begin} {middle}L{end} {middle}"
        head = f"M{end - 6} {middle - 4}L{end} {middle}L{end - 6} {middle + 4}"
    return f'<path d="{line}{head}"><title>stage {src} to stage {dst}</title></path>'


def _html(text: str, *, lines: bool = False) -> str:
    """Escaped text, without unprintable characters."""
    return escape("".join(sign if sign.isprintable() or (lines and sign == "\n") else "�" for sign in text))
