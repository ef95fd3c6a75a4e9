"""Who waits for whom, and what the one is doing that everybody waits for.

    rank 3 waits for 3RECV_F1 from rank 2, which waits for 2RECV_F1 from rank 1, which has been in 1F1 for 31 s

Every rank tells the others through the store what it is doing. One that waits for long follows the chain from itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from penstock.engine.doing import Doing, Look
from penstock.engine.failure import Cause

__all__ = ["TIMEOUT", "Gossip"]

TIMEOUT = "Timeout"  # the kind of a cause

logger = logging.getLogger("penstock")


class Gossip:
    """What this rank tells, and what it hears of others."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store = store
        self.rank = rank
        self.stuck_after: float | None = 60.0
        self.timeout: float | None = None
        self._beat = 0
        self._told = 0.0
        self._place = ("", "")  # in Python, of what has not moved for long
        self._heard: dict[int, tuple[int, float]] = {}  # each rank's last beat, and when it was heard first
        self._followed = 0.0
        self._report = 0.0  # the age at which the next report is due; 0: the first

    @property
    def horizon(self) -> float | None:
        """The first age at which anything happens."""
        return min((limit for limit in (self.stuck_after, self.timeout) if limit is not None), default=None)

    @property
    def pause(self) -> float:
        """Seconds between two words."""
        return 1.0 if self.horizon is None else min(1.0, self.horizon / 4)

    def moved(self) -> None:
        """The main thread does something else now."""
        self._place = ("", "")
        self._report = 0.0

    def tell(self, doing: Doing, look: Look, age: float, now: float) -> None:
        """Tell the others, if it is time to."""
        if now - self._told < self.pause:
            return
        self._told = now
        self._beat += 1
        if self.horizon is not None and age > self.horizon / 2 and not self._place[0]:
            self._place = doing.python()
        at, stack = self._place
        look = replace(look, age=age, beat=self._beat, at=at, stack=stack)
        self.store.set(f"doing/{self.rank}", json.dumps(asdict(look)))

    def judge(self, look: Look, age: float, now: float) -> Cause | None:
        """Report what this rank waits for, if that is due; the cause of a timeout, if it is over."""
        if look.kind != "waits" or self.horizon is None or age < self.horizon / 2:
            return None
        if now - self._followed < self.pause:
            return None
        self._followed = now
        text, end, found = self.follow(look, now)
        if self.stuck_after is not None and age >= max(self._report, self.stuck_after):
            self._report = 2 * max(self._report, self.stuck_after)
            logger.warning("%s", text)
        if self.timeout is None or age < self.timeout:
            return None
        place = (None, None, None) if found is None or found.place is None else found.place
        stack = "" if found is None else found.stack
        return Cause(end, TIMEOUT, f"{text}: longer than timeout={self.timeout:g} s", stack, *place)

    def follow(self, look: Look, now: float) -> tuple[str, int, Look | None]:
        """The chain of who waits for whom in words, the rank at its end, and what that one does, if it is known."""
        text, path = f"rank {self.rank} {look}", [self.rank]
        while True:
            others = {rank: self._hear(rank, now) for rank in look.ranks}
            rank = _suspect(others, path)
            found = others[rank]
            text += f", which {_told(found)}" if len(others) == 1 else f", of which rank {rank} {_told(found)}"
            path.append(rank)
            if found is None or _is_end(found):
                return text, rank, found
            if set(found.ranks) & set(path):
                return f"{text}: they wait for each other", rank, found
            look = found

    def _hear(self, rank: int, now: float) -> Look | None:
        key = f"doing/{rank}"
        if not self.store.check([key]):
            return None
        look = Look.heard(json.loads(self.store.get(key)))
        beat, since = self._heard.get(rank, (-1, now))
        if beat != look.beat:
            self._heard[rank] = (look.beat, now)
            return look
        if now - since < 3 * self.pause + 1:
            return look
        return replace(look, silent=now - since)


def _suspect(others: dict[int, Look | None], path: Sequence[int]) -> int:
    """Of those that a rank waits for, the one that does not wait itself; or that does not wait for those before."""
    for rank, look in others.items():
        if look is None or _is_end(look):
            return rank
    return next((r for r, look in others.items() if look is not None and not set(look.ranks) & set(path)), min(others))


def _is_end(look: Look) -> bool:
    return look.kind != "waits" or look.silent > 0


def _told(look: Look | None) -> str:
    return "has not come yet" if look is None else str(look)
