"""Where stashed values are kept until they are popped, outside of a pipeline."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from penstock.split.skip import Key, Namespace, held, holding

__all__ = ["SkipTracker", "current_skip_tracker", "use_skip_tracker"]


class SkipTracker:
    """The values that are stashed and not yet popped, as ``tensors``. A batch that comes with them is left alone."""

    def __init__(self) -> None:
        self.tensors: dict[Key, Any] = {}

    def save(self, batch: Any, ns: Namespace | None, name: str, tensor: Any) -> None:
        self.tensors[ns, name] = tensor

    def load(self, batch: Any, ns: Namespace | None, name: str) -> Any:
        return self.tensors.pop((ns, name))


def use_skip_tracker(skip_tracker: SkipTracker) -> AbstractContextManager[None]:
    """Layers that run in this thread meanwhile stash into the tracker, and pop from it."""
    return holding(skip_tracker.tensors)


def current_skip_tracker() -> SkipTracker:
    """The tracker of this thread."""
    tracker = SkipTracker()
    tracker.tensors = held()
    return tracker
