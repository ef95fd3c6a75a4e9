"""As in torchgpipe."""

from penstock.compat.torchgpipe.skip.skippable import Skippable, pop, skippable, stash, verify_skippables

__all__ = ["Skippable", "pop", "skippable", "stash", "verify_skippables"]
