"""How the ranks of a pipeline come together: all bring the same facts, or all learn who does not, or cannot come.

It goes through the store, by looking and not by waiting there, so that a rank which fails while it builds its
pipeline does not leave the others waiting for its connections.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from penstock.errors import PipelineError, PlanError
from penstock.schedule.source import ScheduleSource
from penstock.split.plan import Plan
from penstock.version import __version__

__all__ = ["Meeting", "facts_of"]

_meetings: Counter[tuple[int, ...]] = Counter()  # how many pipelines this process has begun to build, by their ranks


class Meeting:
    """One pipeline's own corner of the store."""

    def __init__(self, ranks: Sequence[int], rank: int, patience: float = 300.0) -> None:
        """``rank`` is one of ``ranks``, as they are in the world: that of this process."""
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        _meetings[self.ranks] += 1
        name = f"penstock/{_digest(str(self.ranks))}/{_meetings[self.ranks]}"
        self.store = PrefixStore(name, dist.distributed_c10d._get_default_store())
        self.patience = patience  # seconds to wait for ranks that have not come
        self._times = 0

    def cancel(self, error: BaseException) -> None:
        """Tell the others that this rank will not come."""
        word = {"rank": self.ranks[self.rank], "error": f"{type(error).__name__}: {error}"}
        self.store.compare_set("cancelled", "", json.dumps(word))

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Wait for all ranks; raise if one does not come, or comes with other facts than the first."""
        self._times += 1
        keys = [f"facts/{self._times}/{rank}" for rank in range(len(self.ranks))]
        self.store.set(keys[self.rank], json.dumps(facts))
        start = time.monotonic()
        pause = 0.001
        while not self.store.check(keys):
            if self.store.check(["cancelled"]) and not self.store.check(keys):
                word = json.loads(self.store.get("cancelled"))
                rank = word["rank"]
                raise PipelineError(f"rank {rank} could not build its pipeline: {word['error']}", rank=rank)
            if time.monotonic() - start > self.patience:
                missing = [self.ranks[r] for r, key in enumerate(keys) if not self.store.check([key])]
                raise PipelineError(
                    f"after {self.patience:.0f} s, ranks {missing} have not begun to build this pipeline: every rank "
                    "must build the same pipelines in the same order"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        everyone = [json.loads(self.store.get(key)) for key in keys]
        for what, first in everyone[0].items():
            others = {self.ranks[r]: theirs[what] for r, theirs in enumerate(everyone) if theirs[what] != first}
            if others:
                raise PlanError(
                    f"the ranks were given different pipelines: {what} is {first} on rank {self.ranks[0]}, but "
                    + ", ".join(f"{value} on rank {rank}" for rank, value in others.items())
                )


def facts_of(plan: Plan, source: ScheduleSource, options: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same on every rank."""
    schedule = source.training(source.microbatches)
    stages = [(stage.layers, stage.parameters) for stage in plan.stages]
    return {
        "penstock": __version__,
        "torch": torch.__version__,
        "micro-batches": source.microbatches,
        "plan": f"{plan.num_stages} stages ({_digest(str(stages))})",
        "schedule": f"{schedule.name} ({_digest(str(schedule))})",
        **{name: repr(value) for name, value in options.items()},
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
