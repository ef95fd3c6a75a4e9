"""A simulated schedule as a picture for a page or a notebook: SVG, as text, with nothing to install.

rank 0  ▐F0▐F1▐F2▐          ▐B0    ▐      one row per rank, time from left to right; colours say the kind
rank 1      ▐F0▐F1▐  ▐B0    ▐             of work, shades the stage of a rank, numbers the micro-batch
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from xml.sax.saxutils import escape as xml_escape
from xml.sax.saxutils import quoteattr

from penstock.draw import KINDS, describe
from penstock.gantt import Line, gantt, shade
from penstock.schedule.action import COMPUTE
from penstock.schedule.simulate import Simulation

__all__ = ["to_svg"]

# Four shades of each kind, dark to light: the stages of a rank. White is read on the first two, black on the others.
_SHADES = {
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
_STYLE = (
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
    rows = _columns(simulation) if _crowded(simulation) else _actions(simulation)
    left = _LETTER * len(f"rank {schedule.num_ranks - 1}") + 12
    legend, legend_width = _legend(simulation)
    width = left + max(_WIDEST if _crowded(simulation) else simulation.makespan * _scale(simulation), legend_width)
    height = schedule.num_ranks * (_ROW + _GAP) + 30
    title = _clean(describe(schedule))
    words = (
        f"One row for each of {schedule.num_ranks} ranks, time from left to right. "
        f"{simulation.bubble:.1%} of the ranks' time is idle."
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="penstock" role="img" aria-label={quoteattr(title)} '
        f'viewBox="0 0 {_n(width)} {height}" width="{_n(width)}" style="max-width:100%;height:auto">',
        f"<title>{xml_escape(title)}</title>",
        f"<desc>{xml_escape(words)}</desc>",
        f"<style>{_STYLE}</style>",
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


def _crowded(simulation: Simulation) -> bool:
    return max(map(len, simulation.schedule.orders)) > _WIDEST / 3


def _actions(simulation: Simulation) -> Iterator[list[_Box]]:
    """Every action where it happens."""
    schedule, scale = simulation.schedule, _scale(simulation)
    chunks = {s: c for r in range(schedule.num_ranks) for c, s in enumerate(schedule.stages_of(r))}
    most = 1 + max(chunks.values())
    for order, starts, ends in zip(schedule.orders, simulation.starts, simulation.ends, strict=True):
        yield [
            _Box(start * scale, (end - start) * scale, shade(a.kind, chunks[a.stage], most), str(a))
            for a, start, end in zip(order, starts, ends, strict=True)
            if end > start
        ]


def _columns(simulation: Simulation) -> Iterator[list[_Box]]:
    """What is mainly done in each column, as the picture for the terminal has it."""
    label = len(f"rank {simulation.schedule.num_ranks - 1}") + 2
    for line in gantt(simulation, label + _WIDEST, letters=False)[:-1]:
        yield _runs(line[1:])


def _runs(line: Line) -> list[_Box]:
    boxes: list[_Box] = []
    x = 0
    for text, style in line:
        if boxes and boxes[-1].style == style and boxes[-1].x + boxes[-1].width == x:
            boxes[-1] = boxes[-1]._replace(width=boxes[-1].width + len(text))
        elif style[:1] in _SHADES:
            boxes.append(_Box(x, len(text), style, ""))
        x += len(text)
    return boxes


def _box(box: _Box, y: float) -> str:
    """A rectangle, the action that it is as a tip, and as much of its name as fits: F0, or 0."""
    number = int(box.style[1:])
    fill = _SHADES[box.style[0]][number]
    tip = f"<title>{box.text}</title>" if box.text else ""
    inset = 0.5 if box.width > 4 else 0
    rect = f'<rect x="{_n(box.x)}" y="{y}" width="{_n(box.width - inset)}" height="{_ROW}" fill="{fill}">{tip}</rect>'
    stage_less = box.text.lstrip("0123456789")
    for text in (stage_less, stage_less[1:]):
        if text and _LETTER * len(text) + 3 <= box.width:
            shown = "c l" if number < 2 else "c d"
            return f'{rect}<text class="{shown}" x="{_n(box.x + box.width / 2)}" y="{y + 15}">{text}</text>'
    return rect


def _legend(simulation: Simulation) -> tuple[str, float]:
    """Which colour is what, and the bubble; and how wide that is."""
    parts, x = [], 0.0
    for kind in COMPUTE:
        if kind in simulation.schedule.kinds:
            parts.append(f'<rect x="{_n(x)}" y="0" width="12" height="12" fill="{_SHADES[kind][1]}"/>')
            parts.append(f'<text x="{_n(x + 17)}" y="11">{kind} {KINDS[kind]}</text>')
            x += 17 + _LETTER * (len(KINDS[kind]) + 4)
    bubble = f"bubble {simulation.bubble:.1%}"
    parts.append(f'<text x="{_n(x)}" y="11">{bubble}</text>')
    return "".join(parts), x + _LETTER * len(bubble) + 8


def _clean(text: str) -> str:
    """Without what XML cannot have."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def _n(number: float) -> str:
    """A length, to a hundredth."""
    return f"{round(number, 2):g}" if abs(number) < 1e5 else f"{number:.0f}"
