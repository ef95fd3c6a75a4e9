"""``clip_grad_norm_``, at the import path of the first generation."""

from penstock.compat.torchdistpackage.parallel.pipeline_parallel.clip_grad_parallel import (
    NativeScalerPP,
    clip_grad_norm_,
)

__all__ = ["NativeScalerPP", "clip_grad_norm_"]
