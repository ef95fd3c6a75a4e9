"""``forward_backward``, at the import path of the first generation."""

from penstock.compat.torchdistpackage.parallel.pipeline_parallel.pipeline_sched import forward_backward, forward_eval

__all__ = ["forward_backward", "forward_eval"]
