"""The page: one HTML file with its style, its script and its data in it, and nothing loaded from anywhere."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from penstock.profile.report import sections
from penstock.profile.report.choice import chosen, picker, step_name
from penstock.profile.report.findings import Findings, look
from penstock.profile.trace.measure import typical
from penstock.profile.trace.steps import Done, Part, Span, Step

if TYPE_CHECKING:
    from penstock.profile.trace.trace import Trace

__all__ = ["page", "write_report"]


def write_report(trace: Trace, path: str | Path) -> Findings:
    """Write the page of a trace, and return what it says."""
    findings = look(trace)
    Path(path).write_text(page(findings), encoding="utf-8")
    return findings


def page(findings: Findings) -> str:
    """The whole page as text."""
    here = files("penstock.profile.report")
    kinds = ("html", "css", "words.js", "chart.js", "js")
    template, style, *scripts = (here.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in kinds)
    return Template(template).substitute(
        style=style,
        script="".join(scripts),
        data=_embedded(_data(findings)),
        picker=picker(findings),
        **sections.sections(findings),
    )


def _embedded(data: Any) -> str:
    """JSON that no text in it can end: HTML looks for a ``<`` even there."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _data(findings: Findings) -> dict[str, Any]:
    """What the charts draw."""
    trace, simulation = findings.trace, findings.simulation
    shown = chosen(findings)
    simulated = {}
    if simulation is not None:
        for rank, order in enumerate(simulation.schedule.orders):
            times = zip(order, simulation.starts[rank], simulation.ends[rank], strict=True)
            simulated[rank] = [[*action, round(start, 9), round(end, 9)] for action, start, end in times]
    alike = set() if simulation is None else {id(step) for step in typical(trace)}
    return {
        "many_stages": trace.schedule.num_stages > trace.schedule.num_ranks,
        "simulated": simulated,
        "step": shown.index(findings.step),
        "steps": [
            _step(trace, step, simulation.makespan if simulation is not None and id(step) in alike else None)
            for step in shown
        ],
    }


def _step(trace: Trace, step: Step, simulated: float | None) -> dict[str, Any]:
    """One step. Times are in seconds since its first action; ``simulated`` is how long it would be on paper."""
    parts = step.of(range(len(trace.tracks)))
    zero = min(part.actions[0].start for part in parts)

    def since(moment: float) -> float:
        return round(moment - zero, 9)

    def row(done: Done) -> list[Any]:
        waits = [[w.peer, since(w.start), since(w.end), w.what] for w in done.waits if w.end > w.start]
        sent = sum(sent.bytes for sent in done.sends)
        return [*done.action, since(done.start), since(done.end), done.memory, sent, waits]

    def shown(part: Part) -> list[Span]:  # a GPU does its actions beside them
        on_host = all(done.launched is None for done in part.actions)
        return [span for span in part.spans if on_host and span.end > zero]

    rows = [
        {
            "name": sections.rank_name(trace, part.track),
            "place": trace.tracks[part.track].place,
            "actions": [row(done) for done in part.actions],
            "spans": [[span.name, since(span.start), since(span.end)] for span in shown(part)],
        }
        for part in parts
    ]
    ends = [done.end - zero for part in parts for done in part.actions]
    ends += [span.end - zero for part in parts for span in shown(part)]
    return {
        "name": step_name(step),
        "seconds": max([*ends, simulated or 0.0]),
        "paper": simulated is not None,
        "rows": rows,
    }
