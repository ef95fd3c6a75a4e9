"""As in torchgpipe."""

from penstock.compat.torchgpipe.batchnorm import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
