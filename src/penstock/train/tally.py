"""What a pipeline has done so far, added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Tally"]


class Result(Protocol):
    """What is counted of a step."""

    @property
    def samples(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def bubble(self) -> float | None: ...


@dataclass
class Tally:
    """Sums over steps. ``idle`` of the ``watched`` seconds were spent waiting: those of steps whose bubble is known."""

    steps: int = 0
    samples: int = 0
    watched: float = 0.0
    idle: float = 0.0

    def add(self, result: Result) -> None:
        self.steps += 1
        self.samples += result.samples
        if result.bubble is not None:
            self.watched += result.seconds
            self.idle += result.bubble * result.seconds

    def since(self, before: Tally) -> Tally:
        """What has come since ``before``."""
        return Tally(
            self.steps - before.steps,
            self.samples - before.samples,
            self.watched - before.watched,
            self.idle - before.idle,
        )

    @property
    def bubble(self) -> float | None:
        """The share of the time that was spent waiting; None where nothing is known of it."""
        return self.idle / self.watched if self.watched else None
