"""How long the caller waits for the threads of a pipeline in this process, and what it says meanwhile."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

from penstock.engine.doing import Doing, Look
from penstock.engine.runner import Runner
from penstock.engine.stuck import Judge, Limits, follow

__all__ = ["Patience"]


class _Rank:
    """One rank, as the caller sees it."""

    def __init__(self, runner: Runner, thread: int, homes: Sequence[int], limits: Limits) -> None:
        self.doing = Doing()
        self.doing.enter()
        self.doing.runner, self.doing.homes, self.doing.thread = runner, homes, thread
        self.judge = Judge(limits)
        self.key: Hashable = None
        self.since = 0.0
        self.look = Look("idle")

    def see(self, now: float) -> None:
        key, look = self.doing.look()
        if key != self.key:
            self.key, self.since = key, now
            self.judge.moved()
        age = now - self.since
        first = self.judge.limits.first
        at, stack = self.doing.python() if first is not None and age > first / 2 else ("", "")
        self.look = replace(look, age=age, at=at, stack=stack)


class Patience:
    """Looks at all ranks of a job from time to time."""

    def __init__(self, runners: Sequence[Runner], homes: Sequence[int], threads: Sequence[int], limits: Limits) -> None:
        self._what = (runners, homes, threads, limits)
        self.ranks: list[_Rank] = []

    def look(self) -> None:
        """Log what ranks wait for that have done so for long; raise a ``PipelineError`` if it was too long."""
        if not self.ranks:  # most jobs are done before the first look
            runners, homes, threads, limits = self._what
            self.ranks = [_Rank(runner, thread, homes, limits) for runner, thread in zip(runners, threads, strict=True)]
        now = time.monotonic()
        for rank in self.ranks:
            rank.see(now)
        for number, rank in enumerate(self.ranks):
            chain = partial(follow, number, rank.look, lambda other: self.ranks[other].look)
            cause = rank.judge.judge(rank.look, rank.look.age, now, chain)
            if cause is not None:
                raise cause.error()
