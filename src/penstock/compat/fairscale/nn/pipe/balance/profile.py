"""As in torchgpipe."""

from penstock.compat.torchgpipe.balance.profile import layerwise_sandbox, profile_sizes, profile_times

__all__ = ["layerwise_sandbox", "profile_sizes", "profile_times"]
