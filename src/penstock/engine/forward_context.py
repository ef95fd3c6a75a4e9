"""Where a layer is while it runs: which micro-batch it works on, and whether this is a second run."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.errors import PlanError

if TYPE_CHECKING:
    from penstock.engine.recompute.keep import KeptValues

__all__ = ["MicroBatch", "current_microbatch", "forward_state", "is_checkpointing", "is_recomputing"]


class MicroBatch:
    """One micro-batch of one step. It is gone when the step is over: a key for what layers keep by micro-batch.

    It is equal to itself alone, and not to its number, which micro-batches of other steps have too: that is ``index``.
    """

    __slots__ = ("__weakref__", "index", "known")

    def __init__(self, index: int) -> None:
        self.index = index
        self.known = False  # whether a layer has asked for it, and may have passed values on under this key

    def __repr__(self) -> str:
        return f"MicroBatch({self.index})"

    def __index__(self) -> int:
        return self.index

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):  # would be False, and nobody would see why
            raise PlanError(f"{self!r} is not a number: compare current_microbatch().index with {other}")
        return self is other


class _ForwardState(threading.local):
    microbatch: MicroBatch | None = None
    checkpointing = False
    recomputing = False
    keeper: KeptValues | None = None  # of the forward that runs, if it is to be run again


forward_state = _ForwardState()


def current_microbatch() -> MicroBatch | None:
    """The micro-batch that this thread's stage works on; None outside of a pipeline."""
    if forward_state.microbatch is not None:
        forward_state.microbatch.known = True
    return forward_state.microbatch


def is_checkpointing() -> bool:
    """Whether this forward keeps nothing for its backward, and will be run again for it."""
    return forward_state.checkpointing


def is_recomputing() -> bool:
    """Whether this forward has run before, and runs again for its backward."""
    return forward_state.recomputing
