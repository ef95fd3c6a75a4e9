"""Pipelines: of both generations, whose import paths differ."""

from penstock.compat.torchdistpackage.parallel.pipeline_parallel.clip_grad_parallel import (
    NativeScalerPP,
    clip_grad_norm_,
)
from penstock.compat.torchdistpackage.parallel.pipeline_parallel.pipeline_helper import (
    CallableModule,
    flat_and_partition,
    flatten_model,
    partition_balanced,
    partition_uniform,
)
from penstock.compat.torchdistpackage.parallel.pipeline_parallel.pipeline_sched import forward_backward, forward_eval

__all__ = [
    "CallableModule",
    "NativeScalerPP",
    "clip_grad_norm_",
    "flat_and_partition",
    "flatten_model",
    "forward_backward",
    "forward_eval",
    "partition_balanced",
    "partition_uniform",
]
