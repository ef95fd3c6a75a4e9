"""What a step should take, said before it is run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.schedule.costs import Costs
from penstock.schedule.flow import Edge
from penstock.schedule.schedule import Schedule
from penstock.schedule.simulate import simulate

__all__ = ["Prediction"]


@dataclass(frozen=True)
class Prediction:
    """The time of a step, and for each rank of the pipeline the bytes at its peak, as far as they are known.

    ``by`` says whose it is: ``"plan"`` is what a planner found, ``"costs"`` what the ``costs`` of a pipeline come to,
    ``"replan"`` those of ``pipe.replan``; ``"trace"`` is no prediction in the strict sense, but the simulation of a run
    with the times that were measured in it.
    """

    seconds: float
    by: str
    memory: tuple[float, ...] | None = None  # all of it: parameters, gradients, states of the optimizer, activations
    saved: tuple[float, ...] | None = None  # for backwards to come
    samples: int | None = None  # of a micro-batch, for which it holds; None: of any

    @classmethod
    def simulated(cls, by: str, schedule: Schedule, costs: Costs, edges: Iterable[Edge]) -> Prediction:
        """Of costs in seconds; and in bytes, where activations are not just counted."""
        found = simulate(schedule, costs, edges)
        known = costs.activation != Costs.activation and any(found.peak_memory)
        return cls(found.makespan, by, saved=tuple(found.peak_memory) if known else None)
