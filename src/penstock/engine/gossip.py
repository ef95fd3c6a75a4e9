"""What the ranks of different processes tell each other, through the store, of what they are doing."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from penstock.engine.doing import Doing, Look
from penstock.engine.stuck import Limits

__all__ = ["Gossip"]


class Gossip:
    """What this rank tells, and what it hears of others."""

    def __init__(self, store: Any, rank: int, limits: Limits) -> None:
        self.store = store
        self.rank = rank
        self.limits = limits
        self._beat = 0
        self._told = 0.0
        self._python = ("", "")  # where it is, once it has not moved for long
        self._heard: dict[int, tuple[int, float]] = {}  # each rank's last beat, and when it was heard first

    def moved(self) -> None:
        """This rank does something else now."""
        self._python = ("", "")

    def tell(self, doing: Doing, look: Look, age: float, now: float) -> None:
        """Tell the others, if it is time to."""
        if self._beat and now - self._told < self.limits.pause:
            return
        self._told = now
        self._beat += 1
        if not self._python[0] and self.limits.first is not None and age > self.limits.first / 2:
            self._python = doing.python()
        at, stack = self._python
        look = replace(look, age=age, beat=self._beat, at=at, stack=stack)
        self.store.set(f"doing/{self.rank}", json.dumps(asdict(look)))

    def hear(self, rank: int, now: float) -> Look | None:
        """What a rank has told, if it has."""
        key = f"doing/{rank}"
        if not self.store.check([key]):
            return None
        look = Look.heard(json.loads(self.store.get(key)))
        beat, since = self._heard.get(rank, (-1, now))
        if beat != look.beat:
            self._heard[rank] = (look.beat, now)
        elif now - since > 3 * self.limits.pause + 1:
            return replace(look, silent=now - since)
        return look
