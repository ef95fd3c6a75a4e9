"""As in torchgpipe."""

from penstock.compat.torchgpipe.copy import Context, Copy, Wait

__all__ = ["Context", "Copy", "Wait"]
