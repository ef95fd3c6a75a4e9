"""Who waits for whom, and what the one is doing that everybody waits for.

rank 3 waits for 3RECV_F1 from rank 2, which waits for 2RECV_F1 from rank 1, which has been in 1F1 for 31 s
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from penstock.engine.failure.cause import Cause
from penstock.engine.failure.status import RankStatus, Snapshot
from penstock.engine.runner import Runner

__all__ = ["TIMEOUT", "HangDetector", "HangLimits", "Heartbeat", "ThreadHangDetector", "WaitChain", "wait_chain"]

TIMEOUT = "timed out"  # the kind of a cause, which no exception can have

logger = logging.getLogger("penstock")


@dataclass
class HangLimits:
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


class WaitChain(NamedTuple):
    """Who waits for whom in words, the rank at the end, and what that one does, if it is known."""

    text: str
    end: int
    found: Snapshot | None


class HangDetector:
    """Watches one rank wait: reports after ``stuck_after`` seconds, twice as many, and so on."""

    def __init__(self, limits: HangLimits) -> None:
        self.limits = limits
        self._last = 0.0
        self._reported = 0.0  # at which age

    def moved(self) -> None:
        """The rank does something else now."""
        self._reported = 0.0

    def judge(self, look: Snapshot, age: float, now: float, chain: Callable[[], WaitChain]) -> Cause | None:
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


def wait_chain(rank: int, look: Snapshot, hear: Callable[[int], Snapshot | None]) -> WaitChain:
    """From a rank that waits to the one that does not."""
    text, path = f"rank {rank} {look}", [rank]
    while True:
        others = {rank: hear(rank) for rank in look.ranks}
        rank = _suspect(others, path)
        found = others[rank]
        told = "has not come yet" if found is None else str(found)
        text += f", which {told}" if len(others) == 1 else f", of which rank {rank} {told}"
        path.append(rank)
        if found is None or _ends_chain(found):
            return WaitChain(text, rank, found)
        if set(found.ranks) & set(path):
            return WaitChain(f"{text}: they wait for each other", rank, found)
        look = found


def _suspect(others: dict[int, Snapshot | None], path: Sequence[int]) -> int:
    """Of those that a rank waits for, the one that does not wait itself; or that does not wait for those before."""
    for rank, look in others.items():
        if look is None or _ends_chain(look):
            return rank
    return next((r for r, look in others.items() if look is not None and not set(look.ranks) & set(path)), min(others))


def _ends_chain(look: Snapshot) -> bool:
    return look.kind != "waits" or look.silent > 0


# What the ranks of different processes tell each other, through the store, of what they are doing.


class Heartbeat:
    """What this rank tells, and what it hears of others."""

    def __init__(self, store: Any, rank: int, limits: HangLimits) -> None:
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

    def tell(self, status: RankStatus, look: Snapshot, age: float, now: float) -> None:
        """Tell the others, if it is time to."""
        if self._beat and now - self._told < self.limits.pause:
            return
        self._told = now
        self._beat += 1
        if not self._python[0] and self.limits.first is not None and age > self.limits.first / 2:
            self._python = status.python()
        at, stack = self._python
        look = replace(look, age=age, beat=self._beat, at=at, stack=stack)
        self.store.set(f"doing/{self.rank}", json.dumps(asdict(look)))

    def hear(self, rank: int, now: float) -> Snapshot | None:
        """What a rank has told, if it has."""
        key = f"doing/{rank}"
        if not self.store.check([key]):
            return None
        look = Snapshot.heard(json.loads(self.store.get(key)))
        beat, since = self._heard.get(rank, (-1, now))
        if beat != look.beat:
            self._heard[rank] = (look.beat, now)
        elif now - since > 3 * self.limits.pause + 1:
            return replace(look, silent=now - since)
        return look


# How long the caller waits for the threads of a pipeline in this process, and what it says meanwhile.


class _ThreadRank:
    """One rank, as the caller sees it."""

    def __init__(self, runner: Runner, thread: int, stage_ranks: Sequence[int], limits: HangLimits) -> None:
        self.status = RankStatus()
        self.status.enter()
        self.status.runner, self.status.stage_ranks, self.status.thread = runner, stage_ranks, thread
        self.judge = HangDetector(limits)
        self.key: Hashable = None
        self.since = 0.0
        self.look = Snapshot("idle")

    def see(self, now: float) -> None:
        key, look = self.status.look()
        if key != self.key:
            self.key, self.since = key, now
            self.judge.moved()
        age = now - self.since
        first = self.judge.limits.first
        at, stack = self.status.python() if first is not None and age > first / 2 else ("", "")
        self.look = replace(look, age=age, at=at, stack=stack)


class ThreadHangDetector:
    """Looks at all ranks of a job from time to time."""

    def __init__(
        self, runners: Sequence[Runner], stage_ranks: Sequence[int], threads: Sequence[int], limits: HangLimits
    ) -> None:
        self._what = (runners, stage_ranks, threads, limits)
        self.ranks: list[_ThreadRank] = []

    def look(self) -> None:
        """Log what ranks wait for that have done so for long; raise a ``PipelineError`` if it was too long."""
        if not self.ranks:  # most jobs are done before the first look
            runners, stage_ranks, threads, limits = self._what
            for runner, thread in zip(runners, threads, strict=True):
                self.ranks.append(_ThreadRank(runner, thread, stage_ranks, limits))
        now = time.monotonic()
        for rank in self.ranks:
            rank.see(now)
        for number, rank in enumerate(self.ranks):
            chain = partial(wait_chain, number, rank.look, lambda other: self.ranks[other].look)
            cause = rank.judge.judge(rank.look, rank.look.age, now, chain)
            if cause is not None:
                raise cause.error()
