"""Who waits for whom, and what the one is doing that everybody waits for.

rank 3 waits for 3RECV_F1 from rank 2, which waits for 2RECV_F1 from rank 1, which has been in 1F1 for 31 s
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.engine.doing import Look
from penstock.engine.failure import Cause

__all__ = ["TIMEOUT", "Chain", "Judge", "Limits", "follow"]

TIMEOUT = "timed out"  # the kind of a cause, which no exception can have

logger = logging.getLogger("penstock")


@dataclass
class Limits:
    """Seconds of waiting in one place after which it is reported, and given up; None is never."""

    stuck_after: float | None = 60.0
    timeout: float | None = None

    @property
    def first(self) -> float | None:
        """The earlier one."""
        return min((limit for limit in (self.stuck_after, self.timeout) if limit is not None), default=None)

    @property
    def pause(self) -> float:
        """Seconds between two looks at others."""
        return 1.0 if self.first is None else min(1.0, self.first / 4)


class Chain(NamedTuple):
    """Who waits for whom in words, the rank at the end, and what that one does, if it is known."""

    text: str
    end: int
    found: Look | None


class Judge:
    """Watches one rank wait: reports after ``stuck_after`` seconds, twice as many, and so on."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._last = 0.0
        self._reported = 0.0  # at which age

    def moved(self) -> None:
        """The rank does something else now."""
        self._reported = 0.0

    def judge(self, look: Look, age: float, now: float, chain: Callable[[], Chain]) -> Cause | None:
        """What has to be said of a look: a report is logged, a timeout is the cause of a failure.

        Others are looked at from half the time on: it takes two looks to see that one has not moved.
        """
        stuck_after, timeout, first = self.limits.stuck_after, self.limits.timeout, self.limits.first
        if look.kind != "waits" or first is None or age < first / 2 or now - self._last < self.limits.pause:
            return None
        self._last = now
        text, end, found = chain()
        if stuck_after is not None and age >= max(stuck_after, 2 * self._reported):
            self._reported = age
            logger.warning("%s", text)
        if timeout is None or age < timeout:
            return None
        place = (None, None, None) if found is None or found.place is None else found.place
        stack = "" if found is None else found.stack
        return Cause(end, TIMEOUT, f"{text}: longer than timeout={timeout:g} s", stack, *place)


def follow(rank: int, look: Look, hear: Callable[[int], Look | None]) -> Chain:
    """From a rank that waits to the one that does not."""
    text, path = f"rank {rank} {look}", [rank]
    while True:
        others = {rank: hear(rank) for rank in look.ranks}
        rank = _suspect(others, path)
        found = others[rank]
        told = "has not come yet" if found is None else str(found)
        text += f", which {told}" if len(others) == 1 else f", of which rank {rank} {told}"
        path.append(rank)
        if found is None or _is_end(found):
            return Chain(text, rank, found)
        if set(found.ranks) & set(path):
            return Chain(f"{text}: they wait for each other", rank, found)
        look = found


def _suspect(others: dict[int, Look | None], path: Sequence[int]) -> int:
    """Of those that a rank waits for, the one that does not wait itself; or that does not wait for those before."""
    for rank, look in others.items():
        if look is None or _is_end(look):
            return rank
    return next((r for r, look in others.items() if look is not None and not set(look.ranks) & set(path)), min(others))


def _is_end(look: Look) -> bool:
    return look.kind != "waits" or look.silent > 0
