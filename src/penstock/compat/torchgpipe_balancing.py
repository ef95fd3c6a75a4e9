"""The package that came with torchgpipe 0.0.2; in 0.0.7 it is ``torchgpipe.balance``."""

from penstock.compat.torchgpipe.balance import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
