"""Every error Penstock raises on purpose. Each says what happened, where, and what to do."""

from __future__ import annotations

__all__ = ["PenstockError", "PipelineError", "PlanError", "ScheduleError", "text_of"]


class PenstockError(Exception):
    """The base of all errors of this library."""


class ScheduleError(PenstockError, ValueError):
    """A schedule that is unknown, malformed, incomplete, out of order or would deadlock."""


class PlanError(PenstockError, ValueError):
    """A model, a split or an input that cannot be pipelined as asked."""

    stage: int | None = None  # of which it is said, where that is one


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
    """What an error of anybody's says of itself."""
    try:
        return str(error)
    except Exception as another:
        return f"(its text could not be made: {type(another).__name__})"
