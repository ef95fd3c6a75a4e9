"""What is known of a demo when it is over, for a report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.demo.compare import Comparison
from penstock.demo.runs import TRACE, Settings
from penstock.profile.trace import Trace
from penstock.schedule.simulate import Simulation
from penstock.split.plan import Plan

__all__ = ["Finished", "report"]


@dataclass(frozen=True)
class Finished:
    """A demo that has trained and was tested."""

    settings: Settings
    plan: Plan
    simulation: Simulation
    comparison: Comparison
    steps: int
    accuracy: float
    processes: bool

    @property
    def trace(self) -> Path:
        """The file of the steps that were recorded: ``ps.Trace.load`` reads it."""
        return Path(self.settings.profile or "", TRACE)


def report(finished: Finished, path: str) -> Path:
    """Make a page of what was recorded."""
    Trace.load(finished.trace).report(path)
    return Path(path)
