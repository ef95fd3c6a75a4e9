"""As in torchgpipe."""

from penstock.compat.torchgpipe.balance.blockpartition import solve

__all__ = ["solve"]
