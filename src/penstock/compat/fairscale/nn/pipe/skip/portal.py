"""As in torchgpipe."""

from penstock.compat.torchgpipe.skip.portal import Context, Portal, PortalBlue, PortalCopy, PortalOrange

__all__ = ["Context", "Portal", "PortalBlue", "PortalCopy", "PortalOrange"]
