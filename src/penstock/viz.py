"""A simulated schedule as a picture for the terminal: who works on what, when, and what it costs.

rank 0  F0F1F2F3········B0--F4B1--      one row per rank, time from left to right; colours (or letters)
rank 1  ··F0F1F2····B0--F3B1--F4··      say the kind of work, numbers the micro-batch
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor
from typing import TYPE_CHECKING, NamedTuple, TextIO
from xml.sax.saxutils import escape as xml_escape
from xml.sax.saxutils import quoteattr

from penstock.errors import PenstockError, ScheduleError
from penstock.schedule.schedule import COMPUTE, Schedule
from penstock.schedule.simulate import Simulation, simulate
from penstock.schedule.verify import MemoryReport

if TYPE_CHECKING:
    from rich.text import Text

    from penstock.profile.planner.result import PlanResult
    from penstock.profile.trace import Trace
    from penstock.split.plan import Plan

__all__ = [
    "KINDS",
    "StyledLine",
    "align_columns",
    "count_noun",
    "describe_schedule",
    "gantt",
    "memory_rows",
    "plan_html",
    "plan_result_html",
    "print_schedule",
    "print_text",
    "schedule_html",
    "schedule_svg",
    "shade_style",
    "simulation_html",
    "simulation_svg",
    "to_rich",
    "to_svg",
    "to_text_lines",
    "trace_html",
]


# The rows of a Gantt chart as text in styles: one row per rank, time from left to right.

StyledLine = list[tuple[str, str]]
"""Pieces of a line: (text, style), where a style is a kind and a shade as in 'F2', or a word as 'idle'."""


def gantt(simulation: Simulation, width: int, *, letters: bool) -> list[StyledLine]:
    """One row per rank and an axis, at most ``width`` wide.

    With ``letters`` a cell says its kind (in lower case for every second stage of a rank); without, its style
    does. It says its micro-batch where that fits.
    """
    return _Gantt(simulation, width, letters=letters).lines()


def shade_style(kind: str, chunk: int, most_chunks: int) -> str:
    """The style of a cell: the shades spread over the stages of a rank."""
    return f"{kind}{chunk * 3 // (most_chunks - 1) if most_chunks > 1 else 1}"


def _median_duration(times: list[float]) -> float:
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
        shortest = _median_duration([t for kind in schedule.kinds for t in times[kind]])
        room = width - self.label
        makespan = simulation.makespan or 1.0
        self.unit = min(floor(room * shortest / makespan + 1e-9), self.digits + 3)
        self.scale = self.unit / shortest if self.unit else room / makespan
        self.columns = min(room, ceil(makespan * self.scale - 1e-9))
        # Where a number does not fit beside its letter, it goes below.
        self.below = letters and self.unit == self.digits

    def lines(self) -> list[StyledLine]:
        lines: list[StyledLine] = []
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

    def _row(self, cells: Iterable[_Cell], write: Callable[[_Cell], str], idle: str = "·") -> StyledLine:
        line: StyledLine = []
        at = 0
        for cell in cells:
            if cell.end <= cell.begin:
                continue
            if cell.begin > at:
                line.append((idle * (cell.begin - at), "idle"))
            line.append((write(cell), shade_style(cell.kind, cell.chunk, self.most_chunks)))
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


KINDS = {"F": "forward", "R": "recompute", "B": "backward", "I": "input gradient", "W": "weight gradient"}

# Four shades of each kind (of the 256 colours of a terminal), dark to light: the stages of a rank.
_TEXT_SHADES = {
    "F": (25, 32, 75, 153),
    "B": (28, 34, 113, 157),
    "I": (30, 37, 80, 159),
    "W": (130, 166, 214, 222),
    "R": (90, 133, 176, 225),
}
_STYLES = {"idle": "dim", "label": "bold", "note": "dim", "title": "bold"}
_SMALLEST = 40
"""Columns below which nothing sensible fits."""


def to_text_lines(simulation: Simulation, width: int = 80) -> str:
    """The picture as text alone: a letter for each kind, in lower case for every second stage of a rank."""
    lines = ("".join(text for text, _ in line).rstrip() for line in _gantt_lines(simulation, width, letters=True))
    return "\n".join(lines)


def to_rich(simulation: Simulation, width: int = 80) -> Text:
    """The picture in colours, to print with ``rich``: a lighter shade for each further stage of a rank."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="crop", end="")
    for number, line in enumerate(_gantt_lines(simulation, width, letters=False)):
        if number:
            text.append("\n")
        for piece, style in line:
            text.append(piece, _rich_style(style))
    return text


def print_schedule(simulation: Simulation, file: TextIO | None = None, width: int | None = None) -> None:
    """Print the picture: in colours on a terminal that has them (and with ``rich``), otherwise as text."""
    file = file or sys.stdout
    try:
        from rich.console import Console
    except ImportError:
        console = None
    else:
        console = Console(file=file, width=width, highlight=False)
    if console is not None and console.is_terminal and console.color_system and not console.no_color:
        console.print(to_rich(simulation, console.width))
        return
    print_text(to_text_lines(simulation, width or shutil.get_terminal_size((80, 24)).columns), file)


def print_text(text: str, file: TextIO) -> None:
    """Print ``text``, without the signs that ``file``'s encoding does not have."""
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


def _gantt_lines(simulation: Simulation, width: int, *, letters: bool) -> list[StyledLine]:
    """All lines, none wider than ``width``."""
    width = max(width, _SMALLEST)
    lines: list[StyledLine] = [[(describe_schedule(simulation.schedule), "title")], []]
    lines += gantt(simulation, width, letters=letters)
    lines += [[], *_text_legend(simulation, width, letters=letters), []]
    lines += _rank_table(simulation, width)
    lines += [[], *_text_summary(simulation, width)]
    return [_crop(line, width) for line in lines]


def _text_legend(simulation: Simulation, width: int, *, letters: bool) -> list[StyledLine]:
    schedule = simulation.schedule
    most = max(len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks))
    items: list[StyledLine] = []
    for kind in COMPUTE:
        if kind in schedule.kinds:
            swatch = f"{kind}" if letters else f" {kind} "
            items.append([(swatch, shade_style(kind, 0, most)), (f" {KINDS[kind]}", "")])
    items.append([("·", "idle"), (" idle", "")])
    if most > 1 and letters:
        items.append([("lower case: every second stage of a rank", "note")])
    elif most > 1:
        kind = next(k for k in COMPUTE if k in schedule.kinds)
        shades: StyledLine = [(" ", shade_style(kind, chunk, most)) for chunk in range(min(most, 4))]
        items.append([*shades, (" first to last stage of a rank", "")])
    return _wrap_items(items, width)


def _rank_table(simulation: Simulation, width: int) -> list[StyledLine]:
    header, *rows = memory_rows(simulation.schedule, simulation.report)
    header[2:2] = ["busy", "idle"]
    for row, busy, bubble in zip(rows, simulation.busy, simulation.bubbles, strict=True):
        row[2:2] = [_format_number(busy), f"{bubble:.1%}"]
    first, *others = align_columns([header, *rows], width)
    return [[(first, "label")], *([(line, "")] for line in others)]


def memory_rows(schedule: Schedule, report: MemoryReport) -> list[list[str]]:
    """What each rank keeps at its peak, as a table with a header: rank, stages, and the numbers."""
    header = ["rank", "stages", "in flight", "activations", "deferred W"]
    peaks = zip(report.peak_in_flight, report.peak_activations, report.peak_deferred, strict=True)
    rows = [
        [str(rank), " ".join(map(str, schedule.stages_of(rank))), str(flight), f"{share:.4g}", str(deferred)]
        for rank, (flight, share, deferred) in enumerate(peaks)
    ]
    return [header, *rows]


def align_columns(rows: list[list[str]], width: int) -> list[str]:
    """Rows in columns: the second, which may be long, on the left and shortened to fit, all else on the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rest = sum(widths) - widths[1] + 2 * (len(widths) - 1)
    widths[1] = min(widths[1], max(len(rows[0][1]), width - rest))
    lines = []
    for row in rows:
        cells = [cell.rjust(w) for cell, w in zip(row, widths, strict=True)]
        cells[1] = row[1].ljust(widths[1]) if len(row[1]) <= widths[1] else row[1][: widths[1] - 1] + "…"
        lines.append("  ".join(cells))
    return lines


def _text_summary(simulation: Simulation, width: int) -> list[StyledLine]:
    numbers = [
        ("bubble", f"{simulation.bubble:.1%}"),
        ("without a barrier between steps", f"{simulation.span_bubble:.1%}"),
        ("simulated time", _format_number(simulation.makespan)),
    ]
    if abs(simulation.span_bubble - simulation.bubble) < 5e-4:
        del numbers[1]
    return _wrap_items([[(f"{name} ", ""), (value, "title")] for name, value in numbers], width, gap="   ")


def _wrap_items(items: list[StyledLine], width: int, gap: str = "  ") -> list[StyledLine]:
    """Items one after the other, on as many lines as they need."""
    lines: list[StyledLine] = [[]]
    for item in items:
        if lines[-1] and _length(lines[-1]) + len(gap) + _length(item) > width:
            lines.append([])
        lines[-1] += [(gap, ""), *item] if lines[-1] else item
    return lines


def _crop(line: StyledLine, width: int) -> StyledLine:
    kept: StyledLine = []
    for text, style in line:
        kept.append((text[:width], style))
        width -= len(kept[-1][0])
    return kept


def _length(line: StyledLine) -> int:
    return sum(len(text) for text, _ in line)


def _rich_style(style: str) -> str:
    if style[:1] in _TEXT_SHADES and style[1:].isdigit():
        number = int(style[1:])
        return f"{'black' if number > 1 else 'bright_white'} on color({_TEXT_SHADES[style[0]][number]})"
    return _STYLES.get(style, "")


def _format_number(value: float) -> str:
    return f"{value:.6g}"


def count_noun(number: int, noun: str) -> str:
    """``1 stage``, ``2 stages``."""
    plural = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number:,} {noun}{plural if number != 1 else ''}"


# A simulated schedule as a picture for a page or a notebook: SVG, as text, with nothing to install.
#
# rank 0  ▐F0▐F1▐F2▐          ▐B0    ▐      one row per rank, time from left to right; colours say the kind
# rank 1      ▐F0▐F1▐  ▐B0    ▐             of work, shades the stage of a rank, numbers the micro-batch

# Four shades of each kind, dark to light: the stages of a rank. White is read on the first two, black on the others.
_SVG_SHADES = {
    "F": ("#1d4f91", "#2f6db5", "#8db8ea", "#c3dcf8"),
    "B": ("#226b35", "#2d7f43", "#8fcf9e", "#c6e9cd"),
    "I": ("#0b6a72", "#12808a", "#7fd0d6", "#bdeaed"),
    "W": ("#8f4a06", "#ab5a0a", "#f0b25e", "#f9d9ab"),
    "R": ("#6c3483", "#8347a0", "#cba3dd", "#e5d0ef"),
}
_UNIT = 26.0  # the width of an action that reads well
_WIDEST = 960  # of all of them together
_ROW, _GAP, _LETTER = 22, 4, 7  # heights, and about the width of a letter

# As a file of its own the picture has the colours of whoever looks at it; in a page, currentColor is the page's.
_SVG_STYLE = (
    ":root.penstock{color:#1f2328}@media(prefers-color-scheme:dark){:root.penstock{color:#e6edf3}}"
    ".penstock text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:currentColor}"
    ".penstock .c{text-anchor:middle}.penstock .l{fill:#fff}.penstock .d{fill:#111}"
)


class _Box(NamedTuple):
    x: float
    width: float
    style: str  # a kind and a shade, as in 'F2'
    text: str


def to_svg(simulation: Simulation) -> str:
    """The picture of a simulated schedule as an ``<svg>`` element: a file of its own, or a part of a page.

    It scales with the page, reads on light and dark, says in words what it shows, and has a tip for every action. Where
    there are too many actions for its width, a column shows what is mainly done in it, and there are no tips.
    """
    schedule = simulation.schedule
    rows = _columns(simulation) if _is_crowded(simulation) else _actions(simulation)
    left = _LETTER * len(f"rank {schedule.num_ranks - 1}") + 12
    legend, legend_width = _svg_legend(simulation)
    width = left + max(_WIDEST if _is_crowded(simulation) else simulation.makespan * _scale(simulation), legend_width)
    height = schedule.num_ranks * (_ROW + _GAP) + 30
    title = _svg_text(describe_schedule(schedule))
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
        lines.extend(_box(box._replace(x=left + box.x), y) for box in boxes)
    lines.append(f'<g transform="translate({left},{height - 22})">{legend}</g>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _scale(simulation: Simulation) -> float:
    """Units of length for one of time: an action reads well, unless there are too many."""
    times = simulation.costs.durations(simulation.schedule.num_stages)
    shortest = min((t for kind in simulation.schedule.kinds for t in times[kind] if t), default=1.0)
    return min(_UNIT / shortest, _WIDEST / simulation.makespan) if simulation.makespan else 1.0


def _is_crowded(simulation: Simulation) -> bool:
    return max(map(len, simulation.schedule.orders)) > _WIDEST / 3


def _actions(simulation: Simulation) -> Iterator[list[_Box]]:
    """Every action where it happens."""
    schedule, scale = simulation.schedule, _scale(simulation)
    chunks = {s: c for r in range(schedule.num_ranks) for c, s in enumerate(schedule.stages_of(r))}
    most = 1 + max(chunks.values())
    for order, starts, ends in zip(schedule.orders, simulation.starts, simulation.ends, strict=True):
        yield [
            _Box(start * scale, (end - start) * scale, shade_style(a.kind, chunks[a.stage], most), str(a))
            for a, start, end in zip(order, starts, ends, strict=True)
            if end > start
        ]


def _columns(simulation: Simulation) -> Iterator[list[_Box]]:
    """What is mainly done in each column, as the picture for the terminal has it."""
    label = len(f"rank {simulation.schedule.num_ranks - 1}") + 2
    for line in gantt(simulation, label + _WIDEST, letters=False)[:-1]:
        yield _merge_cells(line[1:])


def _merge_cells(line: StyledLine) -> list[_Box]:
    boxes: list[_Box] = []
    x = 0
    for text, style in line:
        if boxes and boxes[-1].style == style and boxes[-1].x + boxes[-1].width == x:
            boxes[-1] = boxes[-1]._replace(width=boxes[-1].width + len(text))
        elif style[:1] in _SVG_SHADES:
            boxes.append(_Box(x, len(text), style, ""))
        x += len(text)
    return boxes


def _box(box: _Box, y: float) -> str:
    """A rectangle, the action that it is as a tip, and as much of its name as fits: F0, or 0."""
    number = int(box.style[1:])
    fill = _SVG_SHADES[box.style[0]][number]
    tip = f"<title>{box.text}</title>" if box.text else ""
    inset = 0.5 if box.width > 4 else 0
    x, width = _svg_number(box.x), _svg_number(box.width - inset)
    rect = f'<rect x="{x}" y="{y}" width="{width}" height="{_ROW}" fill="{fill}">{tip}</rect>'
    stage_less = box.text.lstrip("0123456789")
    for text in (stage_less, stage_less[1:]):
        if text and _LETTER * len(text) + 3 <= box.width:
            shown = "c l" if number < 2 else "c d"
            return f'{rect}<text class="{shown}" x="{_svg_number(box.x + box.width / 2)}" y="{y + 15}">{text}</text>'
    return rect


def _svg_legend(simulation: Simulation) -> tuple[str, float]:
    """Which colour is what, and the bubble; and how wide that is."""
    parts, x = [], 0.0
    for kind in COMPUTE:
        if kind in simulation.schedule.kinds:
            parts.append(f'<rect x="{_svg_number(x)}" y="0" width="12" height="12" fill="{_SVG_SHADES[kind][1]}"/>')
            parts.append(f'<text x="{_svg_number(x + 17)}" y="11">{kind} {KINDS[kind]}</text>')
            x += 17 + _LETTER * (len(KINDS[kind]) + 4)
    bubble = f"bubble {simulation.bubble:.1%}"
    parts.append(f'<text x="{_svg_number(x)}" y="11">{bubble}</text>')
    return "".join(parts), x + _LETTER * len(bubble) + 8


def _svg_text(text: str) -> str:
    """Without what XML cannot have."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def _svg_number(number: float) -> str:
    """A length, to a hundredth."""
    return f"{round(number, 2):g}" if abs(number) < 1e5 else f"{number:.0f}"


# Plans, schedules, simulations, traces as notebooks show them, and what a planner found: HTML with pictures.

_MOST_ACTIONS, _MOST_BOXES = 50_000, 6_000
"""Beyond them a picture takes seconds, and megabytes: it has at most about a thousand boxes for a rank."""

_MOST_STAGES = 40  # in the picture of a plan
_MOST_ROWS = 100  # in a table

_BOX, _APART, _UP = 56, 24, 26  # of a plan's picture: width of a stage, distance to the next, height


def schedule_html(schedule: Schedule) -> str:
    """The picture of a schedule, every action taking the same time; why it cannot run; or a summary."""
    if not _drawable(schedule):
        return _html_summary(schedule, [])
    try:
        return f"<div>{to_svg(simulate(schedule))}</div>"
    except ScheduleError as error:
        reason = _plan_text(str(error), lines=True)
        return f"<div><p>{_plan_text(describe_schedule(schedule))}</p><pre>{reason}</pre></div>"


def schedule_svg(schedule: Schedule) -> str | None:
    """The picture alone, where there is one."""
    try:
        return to_svg(simulate(schedule)) if _drawable(schedule) else None
    except ScheduleError:
        return None


def simulation_html(simulation: Simulation) -> str:
    """The picture, and what each rank does and keeps; or a summary."""
    numbers = [
        ("bubble", f"{simulation.bubble:.1%}"),
        ("without a barrier between steps", f"{simulation.span_bubble:.1%}"),
        ("simulated time", f"{simulation.makespan:.6g}"),
    ]
    if not _drawable(simulation.schedule):
        return _html_summary(simulation.schedule, numbers)
    header, *rows = memory_rows(simulation.schedule, simulation.report)
    header[2:2] = ["busy", "idle"]
    for row, busy, bubble in zip(rows, simulation.busy, simulation.bubbles, strict=True):
        row[2:2] = [f"{busy:.6g}", f"{bubble:.1%}"]
    words = ", ".join(f"{name} {value}" for name, value in numbers)
    return f"<div>{to_svg(simulation)}{_html_table(header, rows)}<p>{_plan_text(words)}</p></div>"


def simulation_svg(simulation: Simulation) -> str | None:
    """The picture alone, where there is one."""
    return to_svg(simulation) if _drawable(simulation.schedule) else None


def trace_html(trace: Trace) -> str:
    """The summary of a trace, and the picture of a step in which each action takes its median time."""
    text = f"<pre>{_plan_text(str(trace), lines=True)}</pre>"
    try:
        simulation = trace.simulation() if _drawable(trace.order) else None
    except PenstockError:  # one rank's part only, or half of a call
        simulation = None
    if simulation is None:
        return f"<div>{text}</div>"
    return f"<div>{text}{to_svg(simulation)}<p>A step with the median time of each action.</p></div>"


def plan_result_html(planned: PlanResult) -> str:
    """What it says; the picture of the step that it expects; what each stage takes, and each rank keeps."""
    costs, memory = planned.best.costs, planned.memory
    parts = [f"<pre>{_plan_text(str(planned), lines=True)}</pre>"]
    if costs is not None:
        if _drawable(planned.schedule):
            parts += [to_svg(planned.simulation()), "<p>A step with the time that each action should take.</p>"]
        times = costs.durations(planned.schedule.num_stages)
        both = [f + b for f, b in zip(times["F"], times["B"], strict=True)]
        rows = [
            [str(stage), str(rank), _html_number(times["F"][stage] * 1e3), _html_number(times["B"][stage] * 1e3)]
            for stage, rank in enumerate(planned.schedule.placement)
        ]
        rows = [[*row, _bar(seconds, max(both))] for row, seconds in zip(rows, both, strict=True)]
        parts.append(_html_table(["stage", "rank", "forward, ms", "backward, ms", "of a micro-batch"], rows))
    peaks = [[str(rank), _html_number(size / 2**20), _bar(size, max(memory))] for rank, size in enumerate(memory)]
    parts.append(_html_table(["rank", "memory, MiB", "at its peak"], peaks))
    return f"<div>{''.join(parts)}</div>"


def plan_html(plan: Plan) -> str:
    """A row for each stage, and a picture of what crosses between them and what they share."""
    rows = []
    for index, stage in enumerate(plan.stages):
        device = plan.devices[index] if plan.devices is not None else ""
        where = "-" if plan.ranks is None else f"{plan.ranks[index]} {device}".strip()
        layers = " ".join(stage.layers)
        if len(layers) > 60:
            layers = f"{stage.layers[0]} … {stage.layers[-1]} ({len(stage.layers)} layers)"
        to = " ".join(map(str, plan.targets(index))) or "-"
        rows.append([str(index), where, layers, f"{stage.parameters:,}", f"{stage.bytes:,}", to])
    ties = [
        f"<p>tie: {_plan_text(' = '.join(tie.names))} (stages {', '.join(map(str, tie.stages))})</p>"
        for tie in plan.ties
    ]
    if len(ties) > _MOST_ROWS:
        ties = [*ties[:_MOST_ROWS], f"<p>and {len(ties) - _MOST_ROWS} more ties</p>"]
    header = ["stage", "rank", "layers", "parameters", "bytes", "sends to"]
    picture = _plan_svg(plan) if plan.num_stages <= _MOST_STAGES else ""
    return f"<div>{picture}{_html_table(header, rows)}{''.join(ties)}</div>"


def _drawable(schedule: Schedule) -> bool:
    lengths = [len(order) for order in schedule.orders]
    return sum(lengths) <= _MOST_ACTIONS and sum(min(length, 1000) for length in lengths) <= _MOST_BOXES


def _html_summary(schedule: Schedule, more: Sequence[tuple[str, str]]) -> str:
    """In place of a picture of too many actions."""
    actions = sum(map(len, schedule.orders))
    rows = [("actions", f"{actions:,}: too many for a picture"), ("kinds", " ".join(sorted(schedule.kinds))), *more]
    return f"<div><p>{_plan_text(describe_schedule(schedule))}</p>{_html_table((), rows)}</div>"


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Of very many rows, the middle is left out."""
    if len(rows) > _MOST_ROWS:
        gap = ["…", f"{len(rows) - _MOST_ROWS} more", *[""] * (len(rows[0]) - 2)]
        rows = [*rows[: _MOST_ROWS - 10], gap, *rows[-10:]]
    head = f"<thead>{_html_row(header, 'th')}</thead>" if header else ""
    body = "".join(_html_row(row, "td") for row in rows)
    return f'<table style="color:inherit">{head}<tbody>{body}</tbody></table>'


def _html_number(number: float) -> str:
    return f"{number:.4g}" if number < 1000 else f"{number:,.0f}"


class _Markup(str):
    """In a cell as it is, and not as text."""


def _html_row(cells: Sequence[str], tag: str) -> str:
    shown = (cell if isinstance(cell, _Markup) else _plan_text(cell) for cell in cells)
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in shown)}</tr>"


def _bar(number: float, most: float) -> _Markup:
    """Beside its number: as long as that is of the largest."""
    width = round(120 * number / most, 1) if most else 0
    return _Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" aria-hidden="true" width="120" height="10">'
        f'<rect width="{width}" height="10" rx="2" fill="currentColor" opacity="0.55"/></svg>'
    )


def _plan_svg(plan: Plan) -> str:
    """Stages in a row: values that skip some of them go above, and what is tied is joined below, dashed.

    It is drawn in the colour of the page's text.
    """
    longest = max((edge.dst - edge.src for edge in plan.edges), default=1)
    top = 8 + _rise(longest)
    spans = [pair for tie in plan.ties for pair in pairwise(sorted(tie.stages))]
    deepest = max((_rise(last - first + 1) for first, last in spans), default=0)
    width, height = plan.num_stages * (_BOX + _APART) - _APART + 8, top + _UP + deepest + 8
    parts = [_stage(index, top) for index in range(plan.num_stages)]
    parts += [_edge(edge.src, edge.dst, top) for edge in plan.edges]
    parts += [_tie(first, last, top + _UP) for first, last in dict.fromkeys(spans)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{plan.num_stages} stages" '
        f'viewBox="0 0 {width} {height}" width="{width}" style="max-width:100%;height:auto" fill="none" '
        f'stroke="currentColor">{"".join(parts)}</svg>'
    )


def _left(stage: int) -> int:
    return 4 + stage * (_BOX + _APART)


def _rise(span: int) -> int:
    """How far a line leaves the row of stages: further if it goes further; the next stage is reached straight on."""
    return 0 if span < 2 else 10 + min(60, 6 * span)


def _stage(index: int, top: int) -> str:
    x = _left(index)
    return (
        f'<rect x="{x}" y="{top}" width="{_BOX}" height="{_UP}" rx="4"/>'
        f'<text x="{x + _BOX // 2}" y="{top + 17}" text-anchor="middle" font-family="monospace" font-size="12" '
        f'fill="currentColor" stroke="none">{index}</text>'
    )


def _edge(src: int, dst: int, top: int) -> str:
    """An arrow from one stage to a later one."""
    rise, middle = _rise(dst - src), top + _UP // 2
    if rise:
        begin, end = _left(src) + _BOX - 12, _left(dst) + 12
        line = f"M{begin} {top}C{begin} {top - rise * 4 // 3} {end} {top - rise * 4 // 3} {end} {top}"
        head = f"M{end - 4} {top - 6}L{end} {top}L{end + 4} {top - 6}"
    else:
        begin, end = _left(src) + _BOX, _left(dst)
        line = f"M{begin} {middle}L{end} {middle}"
        head = f"M{end - 6} {middle - 4}L{end} {middle}L{end - 6} {middle + 4}"
    return f'<path d="{line}{head}"><title>stage {src} to stage {dst}</title></path>'


def _tie(first: int, last: int, bottom: int) -> str:
    begin, end, depth = _left(first) + _BOX // 2, _left(last) + _BOX // 2, _rise(last - first + 1) * 4 // 3
    line = f"M{begin} {bottom}C{begin} {bottom + depth} {end} {bottom + depth} {end} {bottom}"
    return f'<path d="{line}" stroke-dasharray="4 3"><title>tied: stages {first} and {last}</title></path>'


def _plan_text(text: str, *, lines: bool = False) -> str:
    """Safe between tags, without signs that no page can have."""
    return escape("".join(sign if sign.isprintable() or (lines and sign == "\n") else "�" for sign in text))
