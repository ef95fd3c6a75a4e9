"""As in torchgpipe."""

from penstock.compat.torchgpipe.skip.layout import SkipLayout, inspect_skip_layout

__all__ = ["SkipLayout", "inspect_skip_layout"]
