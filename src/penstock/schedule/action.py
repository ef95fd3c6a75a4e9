"""One unit of work, and its text form: ``2F0`` is the forward of stage 2 on micro-batch 0."""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.errors import ScheduleError

__all__ = ["BACKWARD", "COMPUTE", "Action"]

COMPUTE = ("F", "R", "B", "I", "W")
"""Kinds of work: forward, recompute, full backward, input gradient, weight gradient."""

BACKWARD = ("B", "I")
"""Kinds that turn the gradient of a stage's outputs into the gradient of its inputs."""

_TEXT = re.compile(r"(\d+)([FRBIW])(\d+)")


class Action(NamedTuple):
    """Work of one kind, of one stage, on one micro-batch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action: expected stage, kind ({', '.join(COMPUTE)}) and micro-batch, as in '2F0'"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), kind, int(microbatch))
