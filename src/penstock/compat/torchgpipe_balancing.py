"""The package of torchgpipe 0.0.2 that is ``torchgpipe.balance`` in 0.0.7."""

from penstock.compat.torchgpipe.balance import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
