"""As in torchgpipe."""

from penstock.compat.torchgpipe.pipeline import clock_cycles

__all__ = ["clock_cycles"]
