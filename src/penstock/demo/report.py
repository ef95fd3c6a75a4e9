"""What is known of a demo when it is over, for a report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.demo.compare import Comparison
from penstock.demo.runs import TRACE, Settings
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
    def trace(self) -> Path | None:
        """The file that ``--profile`` has written: ``ps.Trace.load`` reads it."""
        return None if self.settings.profile is None else Path(self.settings.profile, TRACE)


def report(finished: Finished) -> Path | None:
    """Where the report of a demo is: this is the place to make it. None where there is none."""
    return None
