"""As in torchgpipe."""

from penstock.compat.torchgpipe.dependency import Fork, Join, fork, join

__all__ = ["Fork", "Join", "fork", "join"]
