"""A simulated schedule as a picture for the terminal: who works on what, when, and what it costs.

rank 0  F0F1F2F3········B0--F4B1--      one row per rank, time from left to right; colours (or letters)
rank 1  ··F0F1F2····B0--F3B1--F4··      say the kind of work, numbers the micro-batch
"""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, TextIO

from penstock.gantt import Line, gantt, shade
from penstock.schedule.action import COMPUTE
from penstock.schedule.schedule import Schedule
from penstock.schedule.simulate import Simulation
from penstock.schedule.verify import Report

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["KINDS", "coloured", "describe", "kept", "plain", "print_schedule", "print_text", "table"]

KINDS = {"F": "forward", "R": "recompute", "B": "backward", "I": "input gradient", "W": "weight gradient"}

# Four shades of each kind (of the 256 colours of a terminal), dark to light: the stages of a rank.
_SHADES = {
    "F": (25, 32, 75, 153),
    "B": (28, 34, 113, 157),
    "I": (30, 37, 80, 159),
    "W": (130, 166, 214, 222),
    "R": (90, 133, 176, 225),
}
_STYLES = {"idle": "dim", "label": "bold", "note": "dim", "title": "bold"}
_SMALLEST = 40
"""Columns below which nothing sensible fits."""


def plain(simulation: Simulation, width: int = 80) -> str:
    """The picture as text alone: a letter for each kind, in lower case for every second stage of a rank."""
    lines = ("".join(text for text, _ in line).rstrip() for line in _picture(simulation, width, letters=True))
    return "\n".join(lines)


def coloured(simulation: Simulation, width: int = 80) -> Text:
    """The picture in colours, to print with ``rich``: a lighter shade for each further stage of a rank."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="crop", end="")
    for number, line in enumerate(_picture(simulation, width, letters=False)):
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
        console.print(coloured(simulation, console.width))
        return
    print_text(plain(simulation, width or shutil.get_terminal_size((80, 24)).columns), file)


def print_text(text: str, file: TextIO) -> None:
    """Print ``text``, without the signs that ``file``'s encoding does not have."""
    try:
        text.encode(getattr(file, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = text.replace("·", ".").replace("…", "~").encode("ascii", "replace").decode()
    print(text, file=file)


def describe(schedule: Schedule) -> str:
    """A schedule in a line."""
    return (
        f"{schedule.name}: {_count(schedule.num_ranks, 'rank')}, {_count(schedule.num_stages, 'stage')}, "
        f"{_count(schedule.num_microbatches, 'micro-batch')}"
    )


def _picture(simulation: Simulation, width: int, *, letters: bool) -> list[Line]:
    """All lines, none wider than ``width``."""
    width = max(width, _SMALLEST)
    lines: list[Line] = [[(describe(simulation.schedule), "title")], []]
    lines += gantt(simulation, width, letters=letters)
    lines += [[], *_legend(simulation, width, letters=letters), []]
    lines += _table(simulation, width)
    lines += [[], *_summary(simulation, width)]
    return [_crop(line, width) for line in lines]


def _legend(simulation: Simulation, width: int, *, letters: bool) -> list[Line]:
    schedule = simulation.schedule
    most = max(len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks))
    items: list[Line] = []
    for kind in COMPUTE:
        if kind in schedule.kinds:
            swatch = f"{kind}" if letters else f" {kind} "
            items.append([(swatch, shade(kind, 0, most)), (f" {KINDS[kind]}", "")])
    items.append([("·", "idle"), (" idle", "")])
    if most > 1 and letters:
        items.append([("lower case: every second stage of a rank", "note")])
    elif most > 1:
        kind = next(k for k in COMPUTE if k in schedule.kinds)
        shades: Line = [(" ", shade(kind, chunk, most)) for chunk in range(min(most, 4))]
        items.append([*shades, (" first to last stage of a rank", "")])
    return _flow(items, width)


def _table(simulation: Simulation, width: int) -> list[Line]:
    header, *rows = kept(simulation.schedule, simulation.report)
    header[2:2] = ["busy", "idle"]
    for row, busy, bubble in zip(rows, simulation.busy, simulation.bubbles, strict=True):
        row[2:2] = [_time(busy), f"{bubble:.1%}"]
    first, *others = table([header, *rows], width)
    return [[(first, "label")], *([(line, "")] for line in others)]


def kept(schedule: Schedule, report: Report) -> list[list[str]]:
    """What each rank keeps at its peak, as a table with a header: rank, stages, and the numbers."""
    header = ["rank", "stages", "in flight", "activations", "deferred W"]
    peaks = zip(report.peak_in_flight, report.peak_activations, report.peak_deferred, strict=True)
    rows = [
        [str(rank), " ".join(map(str, schedule.stages_of(rank))), str(flight), f"{share:.4g}", str(deferred)]
        for rank, (flight, share, deferred) in enumerate(peaks)
    ]
    return [header, *rows]


def table(rows: list[list[str]], width: int) -> list[str]:
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


def _summary(simulation: Simulation, width: int) -> list[Line]:
    numbers = [
        ("bubble", f"{simulation.bubble:.1%}"),
        ("without a barrier between steps", f"{simulation.span_bubble:.1%}"),
        ("simulated time", _time(simulation.makespan)),
    ]
    if abs(simulation.span_bubble - simulation.bubble) < 5e-4:
        del numbers[1]
    return _flow([[(f"{name} ", ""), (value, "title")] for name, value in numbers], width, gap="   ")


def _flow(items: list[Line], width: int, gap: str = "  ") -> list[Line]:
    """Items one after the other, on as many lines as they need."""
    lines: list[Line] = [[]]
    for item in items:
        if lines[-1] and _length(lines[-1]) + len(gap) + _length(item) > width:
            lines.append([])
        lines[-1] += [(gap, ""), *item] if lines[-1] else item
    return lines


def _crop(line: Line, width: int) -> Line:
    kept: Line = []
    for text, style in line:
        kept.append((text[:width], style))
        width -= len(kept[-1][0])
    return kept


def _length(line: Line) -> int:
    return sum(len(text) for text, _ in line)


def _rich_style(style: str) -> str:
    if style[:1] in _SHADES and style[1:].isdigit():
        number = int(style[1:])
        return f"{'black' if number > 1 else 'bright_white'} on color({_SHADES[style[0]][number]})"
    return _STYLES.get(style, "")


def _time(value: float) -> str:
    return f"{value:.6g}"


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"
