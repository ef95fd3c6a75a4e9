"""As in torchgpipe."""

from penstock.compat.torchgpipe.skip.tracker import (
    SkipTracker,
    SkipTrackerThroughPotals,
    current_skip_tracker,
    use_skip_tracker,
)

__all__ = ["SkipTracker", "SkipTrackerThroughPotals", "current_skip_tracker", "use_skip_tracker"]
