"""The errors of Penstock. Their texts have the problem with its numbers, the place, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable


class PenstockError(Exception):
    """Base class of all errors of Penstock."""


class ScheduleError(PenstockError, ValueError):
    """A schedule that is unknown, malformed, incomplete, out of order or would deadlock."""


class PlanError(PenstockError, ValueError):
    """A model, a split or an input that cannot be pipelined as asked."""

    stage: int | None = None  # the stage that it concerns, if it is one


class CheckpointError(PenstockError, ValueError):
    """A checkpoint that is damaged or incomplete, or that is of another model, optimizer or loader."""


class PipelineError(PenstockError, RuntimeError):
    """A step failed on some rank. The same error is raised on every rank of the pipeline.

    Attributes name the place of the *first* failure, where it is known.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        action: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.stage = stage
        self.microbatch = microbatch
        self.action = action


def text_of(error: BaseException) -> str:
    """The text of any error, also of one whose ``__str__`` fails."""
    try:
        return str(error)
    except Exception as another:
        return f"(its text could not be made: {type(another).__name__})"


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str = "", cutoff: float = 0.6) -> str:
    """``": did you mean 'conv1'?"``, or ``otherwise`` if no known name has a similarity of ``cutoff`` (0 to 1)."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), 3, cutoff)
    return f": did you mean {' or '.join(map(repr, close))}?" if close else otherwise
