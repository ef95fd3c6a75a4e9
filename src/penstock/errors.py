"""The errors of Penstock. Each message has the problem with its numbers, the location and the remedy."""

from __future__ import annotations

from collections.abc import Iterable


class PenstockError(Exception):
    """Base class of all errors of Penstock."""


class ScheduleError(PenstockError, ValueError):
    """A schedule that is unknown, malformed, incomplete, out of order or would deadlock."""


class PlanError(PenstockError, ValueError):
    """A model, plan, input or option that is invalid or cannot be pipelined."""

    stage: int | None = None  # the stage with the error, if known


class CheckpointError(PenstockError, ValueError):
    """A checkpoint that is damaged, incomplete, or of another model, optimizer or loader."""


class PipelineError(PenstockError, RuntimeError):
    """A step failed on a rank. The same error is raised on every rank of the pipeline.

    The attributes are the location of the *first* failure, if known.
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
    """The text of any error, even if its ``__str__`` fails."""
    try:
        return str(error)
    except Exception as another:
        return f"(its text is not available: {type(another).__name__})"


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str = "", cutoff: float = 0.6) -> str:
    """``": did you mean 'conv1'?"``, or ``otherwise`` if no known name has a similarity of ``cutoff`` (0 to 1)."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), 3, cutoff)
    return f": did you mean {' or '.join(map(repr, close))}?" if close else otherwise
