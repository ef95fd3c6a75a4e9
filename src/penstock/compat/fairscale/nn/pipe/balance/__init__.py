"""As in torchgpipe."""

from penstock.compat.fairscale.nn.pipe.balance import blockpartition as blockpartition
from penstock.compat.torchgpipe.balance import balance_by_size, balance_by_time, balance_cost

__all__ = ["balance_by_size", "balance_by_time", "balance_cost"]
