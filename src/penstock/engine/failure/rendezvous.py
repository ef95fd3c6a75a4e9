"""How the ranks of a pipeline come together: all bring the same facts, or all learn who does not, or cannot come.

It goes through the store, by looking and not by waiting there, so that a rank which fails while it builds its
pipeline does not leave the others waiting for its connections. From the start, a watch looks after each rank.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from penstock._torch import default_store
from penstock.engine.channel.base import ChannelError
from penstock.engine.failure.watch import Watch
from penstock.errors import PenstockError, PipelineError, PlanError
from penstock.schedule.provider import ScheduleProvider
from penstock.split.plan import Plan
from penstock.version import __version__

__all__ = ["Rendezvous", "digest", "pipeline_config", "versions"]

_rendezvous_counts: Counter[tuple[int, ...]] = (
    Counter()
)  # how many pipelines this process has begun to build, by their ranks


class Rendezvous:
    """One pipeline's own corner of the store."""

    def __init__(self, ranks: Sequence[int], rank: int, patience: float = 300.0) -> None:
        """``rank`` is one of ``ranks``, as they are in the world: that of this process."""
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        _rendezvous_counts[self.ranks] += 1
        name = f"penstock/{digest(str(self.ranks))}/{_rendezvous_counts[self.ranks]}"
        store = default_store()
        self.store = PrefixStore(name, store)
        self.patience = patience  # seconds to wait for ranks that have not come
        self.met = False  # whether all have
        self.watch = Watch(store, name, self.ranks, rank)
        self._times = 0

    def cancel(self, error: BaseException) -> None:
        """Tell the others that this rank will not come. If that is because of another one, this is raised here."""
        cause = None
        if self.met and isinstance(error, (RuntimeError, ChannelError)) and not isinstance(error, PenstockError):
            cause = self.watch.failures.ask()  # what fails once all have come is a connection to one of them
        if cause is None:
            self.watch.failures.failed(error, where="could not build its pipeline: ")
        self.watch.stop()
        if cause is not None:
            raise cause.error() from error

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Wait for all ranks; raise if one does not come, or comes with other facts than the first."""
        everyone = self.gather(facts)
        for what, first in everyone[0].items():
            found = {self.ranks[r]: theirs.get(what) for r, theirs in enumerate(everyone)}
            differ = {rank: value for rank, value in found.items() if value != first}
            if differ:
                raise PlanError(
                    f"the ranks were given different pipelines: {what} is {first} on rank {self.ranks[0]}, but "
                    + ", ".join(f"{value} on rank {rank}" for rank, value in differ.items())
                )

    def gather(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each rank brings, as JSON has it; waits for all, and raises if one does not come."""
        self._times += 1
        keys = [f"facts/{self._times}/{rank}" for rank in range(len(self.ranks))]
        self.store.set(keys[self.rank], json.dumps(facts))
        others = [rank for place, rank in enumerate(self.ranks) if place != self.rank]
        with self.watch.status.waiting(others, "until this pipeline is begun by"):
            self._wait(keys)
        if not self.met:
            self.met = True
            self.watch.meet([self.store.get(f"address/{rank}") for rank in self.ranks])
        return [json.loads(self.store.get(key)) for key in keys]

    def _wait(self, keys: list[str]) -> None:
        start = time.monotonic()
        pause = 0.001
        while not self.store.check(keys):
            cause = self.watch.cause or self.watch.failures.read()
            if cause is not None and not self.store.check(keys):
                raise cause.error()
            if time.monotonic() - start > self.patience:
                missing = [self.ranks[r] for r, key in enumerate(keys) if not self.store.check([key])]
                raise PipelineError(
                    f"after {self.patience:.0f} s, ranks {missing} have not begun to build this pipeline: every rank "
                    "must build the same pipelines in the same order"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def versions() -> dict[str, str]:
    """The programs that ranks must have alike: messages are of their own kind."""
    return {
        "penstock": __version__,
        "torch": torch.__version__,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }


def pipeline_config(plan: Plan, source: ScheduleProvider, options: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same on every rank."""
    schedule = source.training(source.microbatches)
    what = (plan.stages, plan.edges, plan.ties)
    return {
        **versions(),
        "micro-batches": source.microbatches,
        "plan": f"{plan.num_stages} stages ({digest(str(what))})",
        "schedule": f"{schedule.name} ({digest(str(schedule))})",
        **{name: repr(value) for name, value in options.items()},
    }


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
