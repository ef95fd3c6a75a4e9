"""What ``penstock demo --debug`` tells before it trains: where the stages are, what they take and give, and when."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.schedule.schedule import Schedule
from penstock.schedule.text import to_text
from penstock.split.plan import Plan

__all__ = ["details"]


def details(plan: Plan, schedule: Schedule, microbatch: Tensor) -> str:
    """Several lines. The stages run once, on the model that ``plan`` was made of."""
    lines = [f"What a stage takes and gives, for each of {schedule.num_microbatches} micro-batches", ""]
    value = microbatch
    with torch.no_grad():
        for index, stage in enumerate(plan.stages):
            taken, value = value, plan.stage_module(index)(value)
            where = f"rank {schedule.placement[index]}" + (f" {plan.devices[index]}" if plan.devices else "")
            lines.append(f"stage {index} on {where}: {_shape(taken)} -> {_shape(value)}, by {' '.join(stage.layers)}")
    lines += ["", "The order of each rank: stage, kind and micro-batch", "", to_text(schedule).rstrip()]
    return "\n".join(lines)


def _shape(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
