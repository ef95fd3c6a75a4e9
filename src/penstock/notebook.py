"""Plans, schedules, simulations, traces as notebooks show them, and what a planner found: HTML with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.draw import describe, kept
from penstock.errors import PenstockError, ScheduleError
from penstock.picture import to_svg
from penstock.schedule.schedule import Schedule
from penstock.schedule.simulate import Simulation, simulate

if TYPE_CHECKING:
    from penstock.profile.planner.planned import Planned
    from penstock.profile.trace import Trace
    from penstock.split.plan import Plan

__all__ = [
    "plan_html", "planned_html", "schedule_html", "schedule_svg", "simulation_html", "simulation_svg", "trace_html",
]  # fmt: skip

_MOST_ACTIONS, _MOST_BOXES = 50_000, 6_000
"""Beyond them a picture takes seconds, and megabytes: it has at most about a thousand boxes for a rank."""

_MOST_STAGES = 40  # in the picture of a plan
_MOST_ROWS = 100  # in a table

_BOX, _APART, _UP = 56, 24, 26  # of a plan's picture: width of a stage, distance to the next, height


def schedule_html(schedule: Schedule) -> str:
    """The picture of a schedule, every action taking the same time; why it cannot run; or a summary."""
    if not _drawable(schedule):
        return _summary(schedule, [])
    try:
        return f"<div>{to_svg(simulate(schedule))}</div>"
    except ScheduleError as error:
        return f"<div><p>{_text(describe(schedule))}</p><pre>{_text(str(error), lines=True)}</pre></div>"


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
        return _summary(simulation.schedule, numbers)
    header, *rows = kept(simulation.schedule, simulation.report)
    header[2:2] = ["busy", "idle"]
    for row, busy, bubble in zip(rows, simulation.busy, simulation.bubbles, strict=True):
        row[2:2] = [f"{busy:.6g}", f"{bubble:.1%}"]
    words = ", ".join(f"{name} {value}" for name, value in numbers)
    return f"<div>{to_svg(simulation)}{_table(header, rows)}<p>{_text(words)}</p></div>"


def simulation_svg(simulation: Simulation) -> str | None:
    """The picture alone, where there is one."""
    return to_svg(simulation) if _drawable(simulation.schedule) else None


def trace_html(trace: Trace) -> str:
    """The summary of a trace, and the picture of a step in which each action takes its median time."""
    text = f"<pre>{_text(str(trace), lines=True)}</pre>"
    try:
        simulation = trace.simulation() if _drawable(trace.order) else None
    except PenstockError:  # one rank's part only, or half of a call
        simulation = None
    if simulation is None:
        return f"<div>{text}</div>"
    return f"<div>{text}{to_svg(simulation)}<p>A step with the median time of each action.</p></div>"


def planned_html(planned: Planned) -> str:
    """What it says; the picture of the step that it expects; what each stage takes, and each rank keeps."""
    costs, memory = planned.best.costs, planned.memory
    parts = [f"<pre>{_text(str(planned), lines=True)}</pre>"]
    if costs is not None:
        if _drawable(planned.schedule):
            parts += [to_svg(planned.simulation()), "<p>A step with the time that each action should take.</p>"]
        times = costs.durations(planned.schedule.num_stages)
        both = [f + b for f, b in zip(times["F"], times["B"], strict=True)]
        rows = [
            [str(stage), str(rank), _number(times["F"][stage] * 1e3), _number(times["B"][stage] * 1e3)]
            for stage, rank in enumerate(planned.schedule.placement)
        ]
        rows = [[*row, _bar(seconds, max(both))] for row, seconds in zip(rows, both, strict=True)]
        parts.append(_table(["stage", "rank", "forward, ms", "backward, ms", "of a micro-batch"], rows))
    peaks = [[str(rank), _number(size / 2**20), _bar(size, max(memory))] for rank, size in enumerate(memory)]
    parts.append(_table(["rank", "memory, MiB", "at its peak"], peaks))
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
        f"<p>tie: {_text(' = '.join(tie.names))} (stages {', '.join(map(str, tie.stages))})</p>" for tie in plan.ties
    ]
    if len(ties) > _MOST_ROWS:
        ties = [*ties[:_MOST_ROWS], f"<p>and {len(ties) - _MOST_ROWS} more ties</p>"]
    header = ["stage", "rank", "layers", "parameters", "bytes", "sends to"]
    picture = _plan_svg(plan) if plan.num_stages <= _MOST_STAGES else ""
    return f"<div>{picture}{_table(header, rows)}{''.join(ties)}</div>"


def _drawable(schedule: Schedule) -> bool:
    lengths = [len(order) for order in schedule.orders]
    return sum(lengths) <= _MOST_ACTIONS and sum(min(length, 1000) for length in lengths) <= _MOST_BOXES


def _summary(schedule: Schedule, more: Sequence[tuple[str, str]]) -> str:
    """In place of a picture of too many actions."""
    actions = sum(map(len, schedule.orders))
    rows = [("actions", f"{actions:,}: too many for a picture"), ("kinds", " ".join(sorted(schedule.kinds))), *more]
    return f"<div><p>{_text(describe(schedule))}</p>{_table((), rows)}</div>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Of very many rows, the middle is left out."""
    if len(rows) > _MOST_ROWS:
        gap = ["…", f"{len(rows) - _MOST_ROWS} more", *[""] * (len(rows[0]) - 2)]
        rows = [*rows[: _MOST_ROWS - 10], gap, *rows[-10:]]
    head = f"<thead>{_row(header, 'th')}</thead>" if header else ""
    body = "".join(_row(row, "td") for row in rows)
    return f'<table style="color:inherit">{head}<tbody>{body}</tbody></table>'


def _number(number: float) -> str:
    return f"{number:.4g}" if number < 1000 else f"{number:,.0f}"


class _Picture(str):
    """In a cell as it is, and not as text."""


def _row(cells: Sequence[str], tag: str) -> str:
    shown = (cell if isinstance(cell, _Picture) else _text(cell) for cell in cells)
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in shown)}</tr>"


def _bar(number: float, most: float) -> _Picture:
    """Beside its number: as long as that is of the largest."""
    width = round(120 * number / most, 1) if most else 0
    return _Picture(
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


def _text(text: str, *, lines: bool = False) -> str:
    """Safe between tags, without signs that no page can have."""
    return escape("".join(sign if sign.isprintable() or (lines and sign == "\n") else "�" for sign in text))
