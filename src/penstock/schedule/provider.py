"""The schedules that one pipeline runs: for any number of micro-batches, to train and to evaluate."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.schedule.costs import Costs
from penstock.schedule.fill_drain import fill_drain
from penstock.schedule.recompute import Recompute, recompute_modes, with_recompute
from penstock.schedule.registry import SCHEDULES, build, canonical_name
from penstock.schedule.schedule import Action, Edge, Schedule, loop, topological_runs, vee
from penstock.schedule.search import auto
from penstock.schedule.verify import verify

__all__ = ["AUTO", "ScheduleProvider", "merge_ranks"]


# Ranks that take turns: their orders as one, with as few changes from one to the other as the work allows.


def merge_ranks(schedule: Schedule, edges: Iterable[Edge], joined: Sequence[int]) -> Schedule:
    """The same actions on fewer ranks: ``joined[r]`` does the work of rank ``r``, in the order that ``r`` has.

    Each goes on until it must wait for another, so GPipe goes through its stages one after the other::

        rank 0: 0F0 0F1 .   .   .   0B0 0B1        rank 0: 0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1
        rank 1: .   1F0 1F1 1B0 1B1
    """
    orders: list[list[Action]] = [[] for _ in range(max(joined) + 1)]
    for rank, begin, end in topological_runs(schedule, edges).runs:
        orders[joined[rank]].extend(schedule.orders[rank][begin:end])
    placement = [joined[rank] for rank in schedule.placement]
    return Schedule.of(schedule.name, placement, orders, schedule.num_microbatches)


AUTO = "auto"
"""The name of a schedule that is made to measure."""


class ScheduleProvider:
    """A schedule for any number of micro-batches, verified when it is made, and made once."""

    def __init__(
        self,
        schedule: str | Schedule,
        stages: int,
        edges: Iterable[tuple[int, int]],
        microbatches: int,
        *,
        ranks: int | None = None,
        places: int | None = None,
        recompute: Recompute = "never",
        microbatch_size: int | None = None,
        costs: Costs | None = None,
    ) -> None:
        """``ranks`` is how many there are, and all must have work; ``places`` is how many there may be.

        With ``microbatch_size`` it, and not ``microbatches``, says how many a mini-batch has. ``costs`` are what an
        order is made for where the schedule is "auto".
        """
        if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
            raise ScheduleError(f"microbatches must be at least 1, got {microbatches!r}")
        if microbatch_size is not None and (
            not isinstance(microbatch_size, int) or isinstance(microbatch_size, bool) or microbatch_size < 1
        ):
            raise ScheduleError(f"microbatch_size must be at least 1 sample, got {microbatch_size!r}")
        self.microbatches = microbatches
        self.microbatch_size = microbatch_size
        self.edges = tuple(edges)
        self.recompute = recompute_modes(recompute, stages)
        self._given: Schedule | None = None
        self._before: ScheduleProvider | None = None  # what another order has taken the place of
        self._placed: tuple[int, ...] = ()  # where the stages of an automatic schedule are
        self._made: dict[tuple[str, int], Schedule] = {}
        self._apart: tuple[ScheduleProvider, Sequence[int]] | None = None  # where ranks are joined: as they were
        self.stages_per_rank: int | None = None
        self.costs = costs
        if costs is not None and schedule != AUTO:
            raise ScheduleError(f"costs are for schedule={AUTO!r}, which makes an order for them, not for {schedule!r}")
        if isinstance(schedule, Schedule):
            _check_given(schedule, stages, microbatches, ranks)
            self._given, self.name, self.ranks = schedule, schedule.name, schedule.num_ranks
            trains = schedule.trains
        else:
            if not isinstance(schedule, str):
                raise ScheduleError(f"schedule must be a name or a Schedule, got {schedule!r}")
            if schedule == AUTO:
                self.name, trains = AUTO, True
                self.ranks = min(stages if ranks is None else ranks, stages if places is None else max(1, places))
                if self.ranks > stages:
                    raise ScheduleError(f"{stages} stages are too few for {self.ranks} ranks: each must have one")
                rounds = loop(self.ranks, -(-stages // self.ranks))
                self._placed = vee(self.ranks) if stages == 2 * self.ranks else rounds[:stages]
            else:
                self.name = canonical_name(schedule)
                self.ranks, self.stages_per_rank = _ranks_for(self.name, stages, ranks, places)
                trains = build(self.name, 1, 1).trains
        if not trains:
            raise ScheduleError(f"schedule {self.name!r} has no backward, and a training step needs one: try '1f1b'")
        self.placement = self.training(1 if self._given is None else microbatches).placement

    def count(self, samples: int) -> int:
        """How many micro-batches a mini-batch of so many samples is cut into, if it has as many samples."""
        return self.microbatches if self.microbatch_size is None else -(-samples // self.microbatch_size)

    def recomputes(self, stage: int) -> bool:
        """Whether any forward of a stage is run again."""
        given = () if self._given is None else self._given.orders
        return self.recompute[stage] != "never" or any(a.kind == "R" and a.stage == stage for o in given for a in o)

    def with_merged_ranks(self, joined: Sequence[int]) -> ScheduleProvider:
        """The same schedules with ranks that take turns: ``joined[r]`` does the work of rank ``r``."""
        source = copy.copy(self)
        source._made, source._apart = {}, (self, joined)
        source.ranks, source.placement = max(joined) + 1, tuple(joined[rank] for rank in self.placement)
        return source

    def replaced(self, schedule: Schedule) -> ScheduleProvider:
        """The same with another order for training; for more micro-batches than it has, this one goes on."""
        if schedule.placement != (self if self._apart is None else self._apart[0]).placement:
            raise ScheduleError(f"schedule {schedule.name!r} has its stages on other ranks: they stay where they are")
        if self._apart is not None:
            source, joined = self._apart
            return source.replaced(schedule).with_merged_ranks(joined)
        given = () if self._given is None else self._given.orders  # an order may have its own recomputes
        again = {action.stage for order in given for action in order if action.kind == "R"}
        modes = tuple("always" if s in again else mode for s, mode in enumerate(self.recompute))
        source = copy.copy(self)
        source._given, source._before, source.name = schedule, self._before or self, schedule.name
        source._made, source.recompute = {}, modes
        return source

    def training(self, microbatches: int) -> Schedule:
        """The schedule of a step of so many micro-batches."""
        return self._get("train", microbatches)

    def fill_drain(self, microbatches: int) -> Schedule:
        """All forwards, then all backwards, with the stages placed as in training."""
        return self._get("fill_drain", microbatches)

    def forward_only(self, microbatches: int) -> Schedule:
        """All forwards, with the stages placed as in training."""
        return self._get("forward", microbatches)

    def _get(self, what: str, microbatches: int) -> Schedule:
        key = (what, microbatches)
        if key not in self._made:
            schedule = self._make(what, microbatches)
            if what != "forward":
                schedule = with_recompute(schedule, self.recompute)
            verify(schedule, self.edges)
            self._made[key] = schedule
        return self._made[key]

    def _make(self, what: str, microbatches: int) -> Schedule:
        if what != "train":
            return fill_drain(self.placement, microbatches, backward=what == "fill_drain")
        if self._apart is not None:
            source, joined = self._apart
            return merge_ranks(source._make(what, microbatches), self.edges, joined)
        if self._given is not None:
            if self._before is not None and microbatches > self._given.num_microbatches:
                return self._before._make(what, microbatches)
            return self._given.first(microbatches)
        if self.name == AUTO:
            costs, seconds = (Costs(), 0.05) if self.costs is None else (self.costs, 0.5)  # without costs, less to gain
            replayed = self._replayed()
            found = auto(
                self._waiting(costs, replayed), self._placed, microbatches, edges=self.edges, seconds=seconds,
                repeatable=True, recompute=replayed,
            )  # fmt: skip
            return found.schedule
        return build(self.name, self.ranks, microbatches, self.stages_per_rank)

    def _waiting(self, costs: Costs, replayed: Sequence[int]) -> Costs:
        """The costs with twice as much kept for the weight gradients of stages whose recomputes come afterwards.

        From its recompute on a micro-batch is whole, and so it is while its weight gradients wait: few are to do so.
        """
        late = {s for s, mode in enumerate(self.recompute) if mode != "never" and s not in replayed}
        if not late:
            return costs
        keep = costs.of_stages("keep", len(self.recompute))
        return replace(costs, keep=tuple(max(2.0, own) if s in late else own for s, own in enumerate(keep)))

    def _replayed(self) -> list[int]:
        """The stages whose recomputes an order is made with; others' are put into it afterwards.

        None unless it is known what they keep until then: forwards that seem to keep nothing would all run ahead.
        """
        if self.costs is None or "except_last" in self.recompute:
            return []
        stages = [stage for stage, mode in enumerate(self.recompute) if mode == "always"]
        kept = self.costs.of_stages("checkpoint", len(self.recompute))
        return stages if all(kept[stage] for stage in stages) else []


def _check_given(schedule: Schedule, stages: int, microbatches: int, ranks: int | None) -> None:
    if schedule.num_stages != stages:
        raise ScheduleError(
            f"schedule {schedule.name!r} is for {schedule.num_stages} stages, but the plan has {stages}"
        )
    if ranks is not None and schedule.num_ranks != ranks:
        raise ScheduleError(f"schedule {schedule.name!r} is for {schedule.num_ranks} ranks, but there are {ranks}")
    if schedule.num_microbatches != microbatches:
        raise ScheduleError(
            f"schedule {schedule.name!r} is for {schedule.num_microbatches} micro-batches, not for {microbatches}: "
            f"say microbatches={schedule.num_microbatches}"
        )


def _ranks_for(name: str, stages: int, ranks: int | None, places: int | None) -> tuple[int, int | None]:
    """How many ranks a named schedule takes for ``stages``, and the stages per rank where it must be said."""
    fixed = SCHEDULES[name].stages_per_rank
    if fixed is None:
        if ranks is None and places is not None:
            ranks = max(1, min(places, stages))
        if ranks is None:
            ranks = stages // 2 if stages % 2 == 0 and name in ("interleaved", "looped_bfs") else stages
        if stages % ranks:
            raise ScheduleError(
                f"schedule {name!r} puts the same number of stages on each rank: {stages} stages do not divide "
                f"over {ranks} ranks"
            )
        return ranks, stages // ranks
    if stages % fixed:
        raise ScheduleError(f"schedule {name!r} puts {fixed} stages on each rank: {stages} stages do not divide")
    needed = stages // fixed
    if ranks is not None and ranks != needed:
        raise ScheduleError(
            f"schedule {name!r} puts {fixed} stage{'s' * (fixed > 1)} on each rank, so {stages} stages need {needed} "
            f"ranks, not {ranks}. Schedules that take any number of stages per rank: "
            "'interleaved', 'looped_bfs'"
        )
    return needed, None
