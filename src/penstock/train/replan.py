"""A new order for a pipeline that runs: made for what its stages were seen to cost, in the memory of the old one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.engine.distributed import DistributedExecutor
from penstock.engine.threads import ThreadExecutor
from penstock.schedule.costs import Costs
from penstock.schedule.provider import ScheduleProvider
from penstock.schedule.schedule import Edge, Schedule
from penstock.schedule.search import auto
from penstock.schedule.simulate import Prediction, simulate
from penstock.train.mesh import Mesh

__all__ = ["ReplanResult", "find_faster_order", "predict_from_costs", "predict_step"]

MIN_SAVING = 0.01  # what a new order must save, as a fraction, to be taken


@dataclass(frozen=True)
class ReplanResult:
    """What ``pipe.replan()`` has found: the times of a step, as simulated, and whether the order is a new one."""

    before: float
    after: float
    changed: bool

    def __str__(self) -> str:
        if not self.changed:
            return f"the order stays: a step of {self.before:.4g} s, and no other order was found that saves 1 %"
        saved = 1 - self.after / self.before
        return f"a new order: a step of {self.after:.4g} s instead of {self.before:.4g} s, {saved:.1%} less"


def find_faster_order(
    schedule: Schedule, costs: Costs, edges: Sequence[Edge], seconds: float
) -> tuple[ReplanResult, Schedule]:
    """The order for these costs that is to be run: a new one, if it is worth it; without recomputes, which come back.

    The same arguments give the same answer, on every rank.
    """
    orders = tuple(tuple(action for action in order if action.kind != "R") for order in schedule.orders)
    again = {action.stage for order in schedule.orders for action in order if action.kind == "R"}
    plain, costs = replace(schedule, orders=orders), _with_recompute(costs, again, schedule.num_stages)
    if not any(costs.of_stages("activation", schedule.num_stages)):
        costs = replace(costs, activation=1.0)  # of which nothing is known: as many micro-batches as before
    old = simulate(plain, costs, edges)
    found = auto(
        costs, schedule.placement, schedule.num_microbatches, cap=old.peak_memory, edges=edges, seconds=seconds,
        repeatable=True,
    )  # fmt: skip
    if found.makespan > old.makespan * (1 - MIN_SAVING):
        return ReplanResult(old.makespan, old.makespan, False), plain
    return ReplanResult(old.makespan, found.makespan, True), found.schedule


def _with_recompute(costs: Costs, stages: set[int], count: int) -> Costs:
    """Costs in which a recompute is part of the backward that it is for."""
    if not stages:
        return costs
    times = costs.durations(count)

    def more(kind: str) -> tuple[float, ...]:
        return tuple(times[kind][s] + (times["R"][s] if s in stages else 0.0) for s in range(count))

    return replace(costs, i=more("I"), b=more("B"))


# What a pipeline's steps should take, as far as what it was made from tells.


def predict_step(
    made_from: Prediction | None,
    source: ScheduleProvider,
    crew: ThreadExecutor | DistributedExecutor,
    mesh: Mesh | None,
    samples: int | None,
) -> Prediction | None:
    """The prediction for steps of a full number of micro-batches; ``samples`` are those of the last one, of all."""
    if made_from is None:
        return None if source.costs is None else predict_from_costs("costs", source.costs, crew)
    if made_from.samples is None:
        return made_from
    if crew.source.ranks != source.ranks:  # some take turns, of which the plan did not know
        return None
    share = -(-(samples or 0) // (1 if mesh is None else mesh.data))
    if share and -(-share // source.microbatches) != made_from.samples:
        return None
    gpus = {crew.placement[s]: stage.device for s, stage in crew.stages.items() if stage.device.type != "cpu"}
    if len(set(gpus.values())) < len(gpus):  # what is allocated on one is not a rank's own
        return replace(made_from, memory=None)
    return made_from


def predict_from_costs(by: str, costs: Costs, crew: ThreadExecutor | DistributedExecutor) -> Prediction:
    """What costs of stages come to in the order that is run."""
    source = crew.source
    return Prediction.simulated(by, source.training(source.microbatches), costs, crew.edges)
