"""A faster order for a running pipeline, for the measured costs of its stages; and predictions of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.engine.executor import Executor
from penstock.schedule.costs import Costs
from penstock.schedule.provider import ScheduleProvider
from penstock.schedule.schedule import Edge, Schedule
from penstock.schedule.search import auto
from penstock.schedule.simulate import Prediction, simulate
from penstock.train.mesh import Mesh

MIN_SAVING = 0.01  # the fraction of a step that a new order must save


@dataclass(frozen=True)
class ReplanResult:
    """The result of ``pipe.replan()``: simulated times of a step, and whether the order has changed."""

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
    """The fastest order for these costs, or the present one if it saves too little; recomputes are left out.

    The same arguments give the same result on every rank.
    """
    orders = tuple(tuple(action for action in order if action.kind != "R") for order in schedule.orders)
    again = {action.stage for order in schedule.orders for action in order if action.kind == "R"}
    plain, costs = replace(schedule, orders=orders), _with_recompute(costs, again, schedule.num_stages)
    if not any(costs.of_stages("activation", schedule.num_stages)):
        costs = replace(costs, activation=1.0)  # unknown: keep as many micro-batches in flight as before
    old = simulate(plain, costs, edges)
    found = auto(
        costs, schedule.placement, schedule.num_microbatches, cap=old.peak_memory, edges=edges, seconds=seconds,
        repeatable=True,
    )  # fmt: skip
    if found.makespan > old.makespan * (1 - MIN_SAVING):
        return ReplanResult(old.makespan, old.makespan, False), plain
    return ReplanResult(old.makespan, found.makespan, True), found.schedule


def _with_recompute(costs: Costs, stages: set[int], count: int) -> Costs:
    """The costs with recomputes of ``stages`` included in their backwards."""
    if not stages:
        return costs
    times = costs.durations(count)

    def more(kind: str) -> tuple[float, ...]:
        return tuple(times[kind][s] + (times["R"][s] if s in stages else 0.0) for s in range(count))

    return replace(costs, i=more("I"), b=more("B"))


def predict_step(
    made_from: Prediction | None,
    source: ScheduleProvider,
    executor: Executor,
    mesh: Mesh | None,
    samples: int | None,
) -> Prediction | None:
    """The prediction for steps of a full number of micro-batches; ``samples`` are those of the last step."""
    if made_from is None:
        return None if source.costs is None else predict_from_costs("costs", source.costs, executor)
    if made_from.samples is None:
        return made_from
    if executor.source.ranks != source.ranks:  # ranks take turns, which the plan did not model
        return None
    share = -(-(samples or 0) // (1 if mesh is None else mesh.data))
    if share and -(-share // source.microbatches) != made_from.samples:
        return None
    gpus = {executor.placement[s]: stage.device for s, stage in executor.stages.items() if stage.device.type != "cpu"}
    if len(set(gpus.values())) < len(gpus):  # several ranks allocate on one GPU
        return replace(made_from, memory=None)
    return made_from


def predict_from_costs(by: str, costs: Costs, executor: Executor) -> Prediction:
    """The simulated step of the executor's order with these costs."""
    source = executor.source
    return Prediction.simulated(by, source.training(source.microbatches), costs, executor.edges)
