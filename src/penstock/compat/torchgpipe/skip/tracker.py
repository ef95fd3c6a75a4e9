"""Where stashed values are kept until they are popped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from penstock.compat.torchgpipe.checkpoint import is_checkpointing
from penstock.compat.torchgpipe.dependency import fork, join
from penstock.compat.torchgpipe.microbatch import Batch
from penstock.compat.torchgpipe.skip.layout import SkipLayout
from penstock.compat.torchgpipe.skip.portal import Portal
from penstock.compat.torchgpipe.stream import AbstractStream
from penstock.split.skip import Namespace, SkipKey, stashed_values, use_stash

__all__ = ["SkipTracker", "SkipTrackerThroughPotals", "current_skip_tracker", "use_skip_tracker"]


class SkipTracker:
    """The values that are stashed and not yet popped, as ``tensors``. A batch that comes with them is left alone."""

    index = 0

    def __init__(self) -> None:
        self.tensors: dict[SkipKey, Any] = {}

    def save(self, batch: Any, ns: Namespace | None, name: str, tensor: Any) -> None:
        """Keep a value that a layer has stashed, with its output."""
        self.tensors[ns, name] = tensor

    def load(self, batch: Any, ns: Namespace | None, name: str) -> Any:
        """Give a value to a layer that pops it, with its input; a KeyError if there is none."""
        return self.tensors.pop((ns, name))

    def copy(
        self, batch: Any, prev_stream: AbstractStream, next_stream: AbstractStream, ns: Namespace | None, name: str
    ) -> None:
        """Move a value to another device."""
        raise TypeError("copy is not supported for non-portal skip tensors")


class SkipTrackerThroughPotals(SkipTracker):
    """Values that go from one partition to another are in ``portals``. Their phonies are tied to the batch.

    A portal's tensor is used by blue and by orange. Where partitions run again in backward, it must last until orange
    has run again; then blue runs again, with the tensor that the second run has made.

        blue ─────────── orange ─── backward: orange again ─── blue again
        2 → 1            1 → 0
        3 → 2            2 → 1                1 → 0             1 → 0        under checkpointing
    """

    def __init__(self, skip_layout: SkipLayout, index: int = 0) -> None:
        super().__init__()
        self.skip_layout, self.index = skip_layout, index
        self.portals: dict[SkipKey, Portal] = {}

    def save(self, batch: Batch, ns: Namespace | None, name: str, tensor: Any) -> None:
        if not self.skip_layout.requires_copy(ns, name):
            return super().save(batch, ns, name, tensor)
        portal = self.portals.get((ns, name))
        if portal is None:
            portal = self.portals[ns, name] = Portal(tensor, 3 if is_checkpointing() else 2, self.index)
        else:
            portal.put_tensor(tensor, 1)
        at = batch.anchor
        batch[at] = join(batch[at], portal.blue())

    def load(self, batch: Batch, ns: Namespace | None, name: str) -> Any:
        if not self.skip_layout.requires_copy(ns, name):
            return super().load(batch, ns, name)
        portal = self.portals[ns, name]
        at = batch.anchor
        batch[at], phony = fork(batch[at])
        return portal.orange(phony)

    def copy(
        self, batch: Batch, prev_stream: AbstractStream, next_stream: AbstractStream, ns: Namespace | None, name: str
    ) -> None:
        assert self.skip_layout.requires_copy(ns, name), f"{name!r} does not go to another partition"
        at = batch.anchor
        batch[at], phony = fork(batch[at])
        batch[at] = join(batch[at], self.portals[ns, name].copy(prev_stream, next_stream, phony))


# ── the one of this thread ───────────────────────────────────────────────────────────────────────────────────────


class _Here(threading.local):
    tracker: SkipTracker | None = None
    values: dict[Any, Any] | None = None  # in a stage of a pipeline others are held: its tracker is not this one


_here = _Here()


def use_skip_tracker(skip_tracker: SkipTracker) -> AbstractContextManager[None]:
    """Layers that run in this thread meanwhile stash into the tracker, and pop from it."""
    return tracking(skip_tracker, skip_tracker.tensors)


def current_skip_tracker() -> SkipTracker:
    """The tracker of this thread."""
    tracker = tracker_in_use()
    if tracker is None:
        tracker = SkipTracker()
        tracker.tensors = stashed_values()
    return tracker


def tracker_in_use() -> SkipTracker | None:
    """The tracker that ``use_skip_tracker`` has set, if that holds."""
    return _here.tracker if _here.values is stashed_values() else None


@contextmanager
def tracking(tracker: SkipTracker, values: dict[Any, Any]) -> Iterator[None]:
    """A tracker is in use, and what layers themselves stash and pop is in ``values``."""
    before = _here.tracker, _here.values
    _here.tracker, _here.values = tracker, values
    try:
        with use_stash(values):
            yield
    finally:
        _here.tracker, _here.values = before
