"""As in torchgpipe."""

from penstock.compat.torchgpipe.skip.namespace import Namespace

__all__ = ["Namespace"]
