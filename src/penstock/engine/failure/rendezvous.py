"""Rendezvous of the ranks of a pipeline, with a check that all of them build the same pipeline.

Ranks poll the store instead of blocking on it, so that a rank that fails while it builds its pipeline does not leave
the others waiting for its connections. The watch of each rank runs from the start.
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

from penstock import __version__
from penstock._torch import default_store
from penstock.engine.channel.base import ChannelError
from penstock.engine.failure.watch import Watch
from penstock.errors import PenstockError, PipelineError, PlanError
from penstock.schedule.provider import ScheduleProvider
from penstock.split.plan import Plan

_num_pipelines: Counter[tuple[int, ...]] = Counter()  # that this process has begun to build, by their ranks


class Rendezvous:
    """One pipeline's keys in the store, and the watch of this rank."""

    def __init__(self, ranks: Sequence[int], rank: int, timeout: float = 300.0) -> None:
        """``ranks`` are world ranks, ``rank`` is that of this process, and ``timeout`` is in seconds."""
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        _num_pipelines[self.ranks] += 1
        name = f"penstock/{digest(str(self.ranks))}/{_num_pipelines[self.ranks]}"
        store = default_store()
        self.store = PrefixStore(name, store)
        self.timeout = timeout
        self.complete = False  # whether all ranks have arrived
        self.watch = Watch(store, name, self.ranks, rank)
        self._num_gathers = 0

    def cancel(self, error: BaseException) -> None:
        """Publish that this rank could not build its pipeline. If another rank is the cause, raise that instead."""
        cause = None
        if self.complete and isinstance(error, (RuntimeError, ChannelError)) and not isinstance(error, PenstockError):
            cause = self.watch.failures.wait_for_cause()  # it may be a connection to another rank that failed
        if cause is None:
            self.watch.failures.report(error, prefix="could not build its pipeline: ")
        self.watch.stop()
        if cause is not None:
            raise cause.error() from error

    def compare(self, config: Mapping[str, Any]) -> None:
        """Wait for all ranks; raise if one does not arrive, or if its configuration differs from the first rank's."""
        configs = self.gather(config)
        for name, first in configs[0].items():
            values = {self.ranks[r]: other.get(name) for r, other in enumerate(configs)}
            differ = {rank: value for rank, value in values.items() if value != first}
            if differ:
                raise PlanError(
                    f"the ranks were given different pipelines: {name} is {first} on rank {self.ranks[0]}, but "
                    + ", ".join(f"{value} on rank {rank}" for rank, value in differ.items())
                )

    def publish(self, value: Mapping[str, Any]) -> list[str]:
        """Publish this rank's value, which must be JSON, for the next gathering; returns the keys of all ranks."""
        self._num_gathers += 1
        keys = [f"gather/{self._num_gathers}/{rank}" for rank in range(len(self.ranks))]
        self.store.set(keys[self.rank], json.dumps(value))
        return keys

    def gather(self, value: Mapping[str, Any], how: str = "until this pipeline is begun by") -> list[dict[str, Any]]:
        """Every rank's value; waits for all ranks, and raises if one does not arrive."""
        keys = self.publish(value)
        others = [rank for place, rank in enumerate(self.ranks) if place != self.rank]
        with self.watch.status.waiting(others, how):
            self._wait(keys)
        if not self.complete:
            self.complete = True
            self.watch.set_peer_addresses([self.store.get(f"address/{rank}") for rank in self.ranks])
        return [json.loads(self.store.get(key)) for key in keys]

    def _wait(self, keys: list[str]) -> None:
        start = time.monotonic()
        pause = 0.001
        while not self.store.check(keys):
            cause = self.watch.cause or self.watch.failures.read()
            if cause is not None and not self.store.check(keys):
                raise cause.error()
            if time.monotonic() - start > self.timeout:
                missing = [self.ranks[r] for r, key in enumerate(keys) if not self.store.check([key])]
                raise PipelineError(
                    f"after {self.timeout:.0f} s, ranks {missing} have not begun to build this pipeline: every rank "
                    "must build the same pipelines in the same order"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def versions() -> dict[str, str]:
    """The versions that must be equal on all ranks, because messages are pickled."""
    return {
        "penstock": __version__,
        "torch": torch.__version__,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }


def pipeline_config(plan: Plan, source: ScheduleProvider, options: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that must be equal on all ranks."""
    schedule = source.training(source.microbatches)
    structure = (plan.stages, plan.edges, plan.ties)
    return {
        **versions(),
        "micro-batches": source.microbatches,
        "plan": f"{plan.num_stages} stages ({digest(str(structure))})",
        "schedule": f"{schedule.name} ({digest(str(schedule))})",
        **{name: repr(value) for name, value in options.items()},
    }


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
