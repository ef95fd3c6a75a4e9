"""As in torchgpipe."""

from penstock.compat.torchgpipe.microbatch import Batch, check, gather, scatter

__all__ = ["Batch", "check", "gather", "scatter"]
