"""``Trace``: the records of ``Pipeline.trace``, with a report page."""

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
        """Write an HTML page with the timeline of a step, the causes of idle time and advice. Return its contents."""
        from penstock.profile.report.findings import analyze
        from penstock.profile.report.page import page

        findings = analyze(self)
        Path(path).write_text(page(findings), encoding="utf-8")
        return findings
