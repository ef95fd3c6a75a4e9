"""As in torchgpipe."""

from penstock.compat.fairscale.nn.pipe.skip.namespace import Namespace
from penstock.compat.fairscale.nn.pipe.skip.skippable import pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
