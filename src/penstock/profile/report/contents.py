"""What a rank keeps when it keeps most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.profile.trace.steps import Part

__all__ = ["Peak", "peak"]


@dataclass(frozen=True)
class Peak:
    """The most bytes of a rank in a step, after an action.

    ``flight[s]`` has the micro-batches of stage ``s`` whose backward is still to come. ``saved`` is what they keep, as
    far as it is known; the rest is parameters, gradients, the optimizer's state, and what else is on the device.
    """

    track: int
    bytes: int
    at: float
    after: str
    flight: Mapping[int, Sequence[int]]
    saved: int

    @property
    def rest(self) -> int:
        return max(0, self.bytes - self.saved)


def peak(part: Part, saved: Mapping[int, int]) -> Peak | None:
    """Of one rank; None where its memory is not known."""
    again = {(done.action.stage, done.action.microbatch) for done in part.actions if done.action.kind == "R"}
    flight: dict[tuple[int, int], int] = {}
    best: Peak | None = None
    for done in part.actions:
        stage, kind, microbatch = done.action
        if kind == "R" or (kind == "F" and (stage, microbatch) not in again):
            flight[stage, microbatch] = saved.get(stage, 0)
        elif kind in "BW":
            flight.pop((stage, microbatch), None)
        if done.memory is not None and (best is None or done.memory > best.bytes):
            of_stage: dict[int, list[int]] = {}
            for s, k in sorted(flight):
                of_stage.setdefault(s, []).append(k)
            best = Peak(part.track, done.memory, done.end, str(done.action), of_stage, sum(flight.values()))
    return best
