"""Skip connections: values that go straight from one layer to a later one."""

from penstock.compat.torchgpipe.skip.namespace import Namespace
from penstock.compat.torchgpipe.skip.skippable import pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
