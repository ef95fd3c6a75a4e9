"""As in torchgpipe."""

from penstock.compat.torchgpipe.skip.tracker import SkipTracker, current_skip_tracker, use_skip_tracker

__all__ = ["SkipTracker", "current_skip_tracker", "use_skip_tracker"]
