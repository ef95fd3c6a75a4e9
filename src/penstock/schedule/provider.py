"""The schedules of one pipeline, for training and evaluation with any number of micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.schedule.costs import Costs
from penstock.schedule.fill_drain import fill_drain
from penstock.schedule.registry import SCHEDULES, build, canonical_name
from penstock.schedule.schedule import Recompute, Schedule, loop, merge_ranks, recompute_modes, vee, with_recompute
from penstock.schedule.search import auto
from penstock.schedule.verify import verify

AUTO = "auto"
"""The name that selects a schedule search with the costs of the pipeline."""


class ScheduleProvider:
    """Builds, verifies and caches the schedules of a pipeline for any number of micro-batches."""

    def __init__(
        self,
        schedule: str | Schedule,
        stages: int,
        edges: Iterable[tuple[int, int]],
        microbatches: int,
        *,
        ranks: int | None = None,
        max_ranks: int | None = None,
        recompute: Recompute = "never",
        microbatch_size: int | None = None,
        costs: Costs | None = None,
    ) -> None:
        """``ranks`` is the exact number of ranks, ``max_ranks`` an upper limit.

        With ``microbatch_size``, the size of the mini-batch determines the number of micro-batches. ``costs`` are
        those for the search of an "auto" schedule.
        """
        size = 1 if microbatch_size is None else microbatch_size
        for name, number, least in (("microbatches", microbatches, "1"), ("microbatch_size", size, "1 sample")):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ScheduleError(f"{name} must be at least {least}, got {number!r}")
        self.microbatches = microbatches
        self.microbatch_size = microbatch_size
        self.edges = tuple(edges)
        self.recompute = recompute_modes(recompute, stages)
        self.costs = costs
        self._fixed = schedule if isinstance(schedule, Schedule) else None
        self._previous: ScheduleProvider | None = None  # the original of ``with_schedule``
        self._unmerged: tuple[ScheduleProvider, Sequence[int]] | None = None  # the original of ``with_merged_ranks``
        self._auto_placement: tuple[int, ...] = ()
        self._cache: dict[tuple[str, int], Schedule] = {}
        if costs is not None and schedule != AUTO:
            raise ScheduleError(f"costs= is for the search of schedule={AUTO!r}: leave it out with {schedule!r}")
        if isinstance(schedule, Schedule):
            for what, number, wanted in (
                ("stages", schedule.num_stages, stages),
                ("ranks", schedule.num_ranks, schedule.num_ranks if ranks is None else ranks),
                ("micro-batches", schedule.num_microbatches, microbatches),
            ):
                if number != wanted:
                    raise ScheduleError(
                        f"schedule {schedule.name!r} is for {number} {what}, but the pipeline has {wanted}: "
                        f"use {number}, or a schedule for {wanted}"
                    )
            self.name, self.ranks, trains = schedule.name, schedule.num_ranks, schedule.trains
        elif not isinstance(schedule, str):
            raise ScheduleError(f"schedule must be a name or a Schedule, got {schedule!r}")
        elif schedule == AUTO:
            self.name, trains = AUTO, True
            self.ranks = min(stages if ranks is None else ranks, stages if max_ranks is None else max(1, max_ranks))
            if self.ranks > stages:
                raise ScheduleError(f"{stages} stages are too few for {self.ranks} ranks: each rank needs one")
            looped = loop(self.ranks, -(-stages // self.ranks))
            self._auto_placement = vee(self.ranks) if stages == 2 * self.ranks else looped[:stages]
        else:
            self.name = canonical_name(schedule)
            self.ranks = _ranks_for(self.name, stages, ranks, max_ranks)
            trains = build(self.name, 1, 1).trains
        if not trains:
            raise ScheduleError(f"schedule {self.name!r} has no backward, and a training step needs one: try '1f1b'")
        self.placement = self.training(1 if self._fixed is None else microbatches).placement

    def count(self, samples: int) -> int:
        """The number of micro-batches for a mini-batch of ``samples``."""
        return self.microbatches if self.microbatch_size is None else -(-samples // self.microbatch_size)

    def recomputes(self, stage: int) -> bool:
        """Whether any micro-batch of ``stage`` is recomputed."""
        return self.recompute[stage] != "never" or stage in self._recomputed_by_schedule()

    def _recomputed_by_schedule(self) -> set[int]:
        return set() if self._fixed is None else {stage for stage, _ in self._fixed.recomputed}

    def with_merged_ranks(self, merged: Sequence[int]) -> ScheduleProvider:
        """The same schedules on fewer ranks: rank ``merged[r]`` runs the actions of rank ``r``, see ``merge_ranks``."""
        provider = copy.copy(self)
        provider._cache, provider._unmerged = {}, (self, merged)
        provider.ranks, provider.placement = max(merged) + 1, tuple(merged[rank] for rank in self.placement)
        return provider

    def with_schedule(self, schedule: Schedule) -> ScheduleProvider:
        """A provider with another training schedule; for more micro-batches than it has, with the present one."""
        if schedule.placement != (self if self._unmerged is None else self._unmerged[0]).placement:
            raise ScheduleError(
                f"schedule {schedule.name!r} has another placement: the stages of a pipeline cannot move to other ranks"
            )
        if self._unmerged is not None:
            provider, merged = self._unmerged
            return provider.with_schedule(schedule).with_merged_ranks(merged)
        recomputed = self._recomputed_by_schedule()
        provider = copy.copy(self)
        provider._fixed, provider._previous, provider.name = schedule, self._previous or self, schedule.name
        provider.recompute = tuple("always" if s in recomputed else mode for s, mode in enumerate(self.recompute))
        provider._cache = {}
        return provider

    def training(self, microbatches: int) -> Schedule:
        """The schedule of a training step of ``microbatches``."""
        return self._get("train", microbatches)

    def fill_drain(self, microbatches: int) -> Schedule:
        """All forwards, then all backwards, with the placement of the training schedule."""
        return self._get("fill_drain", microbatches)

    def forward_only(self, microbatches: int) -> Schedule:
        """All forwards, with the placement of the training schedule."""
        return self._get("forward", microbatches)

    def _get(self, mode: str, microbatches: int) -> Schedule:
        key = (mode, microbatches)
        if key not in self._cache:
            if mode == "train":
                schedule = self._build_training(microbatches)
            else:
                schedule = fill_drain(self.placement, microbatches, backward=mode == "fill_drain")
            if mode != "forward":
                schedule = with_recompute(schedule, self.recompute)
            verify(schedule, self.edges)
            self._cache[key] = schedule
        return self._cache[key]

    def _build_training(self, microbatches: int) -> Schedule:
        if self._unmerged is not None:
            provider, merged = self._unmerged
            return merge_ranks(provider._build_training(microbatches), self.edges, merged)
        if self._fixed is not None:
            if self._previous is not None and microbatches > self._fixed.num_microbatches:
                return self._previous._build_training(microbatches)
            return self._fixed.first(microbatches)
        if self.name == AUTO:
            return self._search(microbatches)
        return build(self.name, self.ranks, microbatches, len(self.recompute) // self.ranks)

    def _search(self, microbatches: int) -> Schedule:
        """Search an automatic schedule.

        The search places the recomputes of a stage only if the costs have its ``checkpoint`` size: without one, a
        recomputed stage seems to hold no memory, and all its forwards would run first. The caller inserts all other
        recomputes. Their stages hold complete micro-batches from R to the end of W. The search counts these twice
        between I and W, so that few weight gradients are pending.
        """
        costs, seconds = (Costs(), 0.05) if self.costs is None else (self.costs, 0.5)  # unit costs gain less
        num_stages = len(self.recompute)
        searched = [stage for stage, mode in enumerate(self.recompute) if mode == "always"]
        checkpoints = costs.of_stages("checkpoint", num_stages)
        if self.costs is None or "except_last" in self.recompute or not all(checkpoints[s] for s in searched):
            searched = []
        inserted = {s for s, mode in enumerate(self.recompute) if mode != "never"} - set(searched)
        if inserted:
            keeps = costs.of_stages("keep", num_stages)
            costs = replace(costs, keep=tuple(max(2.0, k) if s in inserted else k for s, k in enumerate(keeps)))
        return auto(
            costs, self._auto_placement, microbatches, edges=self.edges, seconds=seconds, repeatable=True,
            recompute=searched,
        ).schedule  # fmt: skip


def _ranks_for(name: str, stages: int, ranks: int | None, max_ranks: int | None) -> int:
    """The number of ranks of a named schedule for ``stages``."""
    kind = SCHEDULES[name]
    fixed = kind.stages_per_rank
    if fixed is None:
        if ranks is None and max_ranks is not None:
            ranks = max(1, min(max_ranks, stages))
        if ranks is None:
            ranks = stages if stages % kind.default_v else stages // kind.default_v
        if stages % ranks:
            raise ScheduleError(
                f"schedule {name!r} puts the same number of stages on each rank: {stages} stages do not divide "
                f"over {ranks} ranks"
            )
        return ranks
    if stages % fixed:
        raise ScheduleError(f"schedule {name!r} puts {fixed} stages on each rank: {stages} stages do not divide")
    if ranks not in (None, stages // fixed):
        raise ScheduleError(
            f"schedule {name!r} puts {fixed} stage{'s' * (fixed > 1)} on each rank, so {stages} stages need "
            f"{stages // fixed} ranks, not {ranks}. Schedules that take any number of stages per rank: "
            + ", ".join(repr(other) for other, k in SCHEDULES.items() if k.takes_v and k.default_v > 1)
        )
    return stages // fixed
