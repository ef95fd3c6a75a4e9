"""From options and a model to the pipeline that runs it."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from penstock.compat.poptorch.enums import ReductionType
from penstock.compat.poptorch.losses import loss_of
from penstock.compat.poptorch.options import Options
from penstock.compat.poptorch.outputs import Taker
from penstock.compat.poptorch.staging import device_of_ipu, staged
from penstock.compat.poptorch.updates import Updates
from penstock.train.optimizer_offload import Offload
from penstock.train.pipeline import Pipeline

__all__ = ["pipeline_of"]


def pipeline_of(
    model: nn.Module,
    options: Options,
    updates: Updates | None,
    outputs: Taker,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Pipeline:
    """The pipeline of a training model, which has ``updates``, or of an inference model, called with such arguments."""
    strategy = options.execution_strategy
    plan, ipus = staged(model, strategy, (args, kwargs))
    training = options.Training
    turns = options.device_iterations if updates is None else training.gradient_accumulation
    if strategy.name == "pipelined":
        _warn_of_depth(plan.num_stages, turns, training=updates is not None)
    pipe = Pipeline(
        plan,
        _no_loss if updates is None else loss_of,
        microbatches=turns * options.replication_factor,
        schedule="sharded" if strategy.name == "sharded" else "1f1b",
        devices=[device_of_ipu(ipu) for ipu in ipus],
        reduction="mean" if training.accumulation_and_replication_reduction_type == ReductionType.Mean else "sum",
        outputs=outputs,
        seed=options.random_seed,
        recompute="always" if options._Popart.toDict().get("autoRecomputation") else "never",
        accumulate="fp32" if updates is not None and updates.sums_wide else None,
        offload=_offload(options, training=updates is not None),
    )
    if updates is not None:
        updates.attach(pipe)
    return pipe


def _no_loss(output: Any, target: Any) -> Any:
    """An inference model has none, whatever its outputs are called: without targets this is never asked."""
    raise AssertionError


def _offload(options: Options, training: bool) -> Offload | None:
    places = options.TensorLocations
    weights = places.off_chip("weight")
    optimizer, activations = (training and places.off_chip(what) for what in ("optimizer", "activation"))
    if not (weights or optimizer or activations):
        return None
    return Offload(optimizer=optimizer, activations=activations, weights=weights)


def _warn_of_depth(stages: int, depth: int, *, training: bool) -> None:
    """An IPU refuses what leaves it idle; here it runs."""
    needed = 2 * stages - 1 if training else stages
    if stages > 1 and depth < needed:
        what = "gradient accumulation factor" if training else "device iterations"
        option = "Training.gradientAccumulation" if training else "deviceIterations"
        warnings.warn(
            f"For pipelining, depth ({what}) must equal at least the number of pipeline stages ({needed}) on IPUs. "
            f"Here {depth} runs too, with stages that wait: options.{option}({needed}) keeps them busy",
            stacklevel=5,
        )
