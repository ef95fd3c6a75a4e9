"""As in torchgpipe."""

from penstock.compat.torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
