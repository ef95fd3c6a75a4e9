"""``Trace``: the records of ``Pipeline.trace``, with their report page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.profile.trace.analysis import TraceData

if TYPE_CHECKING:
    from penstock.profile.report.findings import Findings


@dataclass(repr=False)
class Trace(TraceData):
    """The records of ``with pipe.trace() as trace``; see ``TraceData`` for their fields, numbers and files."""

    def report(self, path: str | Path) -> Findings:
        """Write an HTML page: the timeline of a step, causes of idle time, advice. Return its contents as data."""
        from penstock.profile.report.findings import analyze
        from penstock.profile.report.page import page

        findings = analyze(self)
        Path(path).write_text(page(findings), encoding="utf-8")
        return findings
