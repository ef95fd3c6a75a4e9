"""As in torchgpipe."""

from penstock.compat.torchgpipe.phony import get_phony

__all__ = ["get_phony"]
