"""``partition_uniform`` and others, at the import path of the first generation."""

from penstock.compat.torchdistpackage.parallel.pipeline_parallel.pipeline_helper import (
    CallableModule,
    flat_and_partition,
    flatten_model,
    partition_balanced,
    partition_uniform,
)

__all__ = ["CallableModule", "flat_and_partition", "flatten_model", "partition_balanced", "partition_uniform"]
