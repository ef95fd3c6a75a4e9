"""What a pipeline's steps should take, as far as what it was made from tells."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.local import LocalCrew
from penstock.engine.process import ProcessCrew
from penstock.schedule.costs import Costs
from penstock.schedule.prediction import Prediction
from penstock.schedule.source import ScheduleSource
from penstock.train.mesh import Mesh

__all__ = ["from_costs", "prediction_of"]


def prediction_of(
    made_from: Prediction | None,
    source: ScheduleSource,
    crew: LocalCrew | ProcessCrew,
    mesh: Mesh | None,
    samples: int | None,
) -> Prediction | None:
    """The prediction for steps of a full number of micro-batches; ``samples`` are those of the last one, of all."""
    if made_from is None:
        return None if source.costs is None else from_costs("costs", source.costs, crew)
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


def from_costs(by: str, costs: Costs, crew: LocalCrew | ProcessCrew) -> Prediction:
    """What costs of stages come to in the order that is run."""
    source = crew.source
    return Prediction.simulated(by, source.training(source.microbatches), costs, crew.edges)
